"""Open or create a store and read its checked records: manifests, newest first, parts of segment groups, and marks.

A catalog never writes, and caches immutable records. It keeps damage as text beside the readable records, because
readers answer damage with another version and not with an exception.

A mark says that a commit is suspect: jobs which resumed from it (or from the in-memory version of that name) died
before they committed. ``driftpoint run`` sets it, and withdraws it if falling back did not help. A marked commit stays
resumable but comes after others, so a wrong mark costs a little training. Unreadable marks are ignored."""

import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, takewhile

from store import errors, schema
from store import names as paths
from store.names import SaveId, Unit, group_by_key
from store.segment import PART_LIMIT, check_payload_size, parse_part, parts_digest, present_parts
from store.storage.atomic import ensure_dir, is_temporary, replace_hint, write_new
from store.storage.local import Files, list_or_empty

_MANIFEST_LIMIT = 1 << 26
_STORE_LIMIT = 1 << 16
_MARK_LIMIT = 1 << 16


@contextmanager
def noting(problems: list[str], before: str = "") -> Iterator[None]:
    """Add damage and errors of storage to ``problems``, after ``before``; UnreachableError is raised."""
    try:
        yield
    except errors.UnreachableError:
        raise
    except (errors.DamagedError, errors.StorageError) as error:
        problems.append(f"{before}{error}")


@dataclass(frozen=True)
class LoadedGroup:
    """The readable parts of a segment group by rank, and the problems of the others."""

    save: SaveId
    parts: Mapping[int, schema.PartRecord]
    problems: tuple[str, ...]
    refused: bool = False  # storage refused a read (I/O error, too many open files), so missing parts may be whole

    @cached_property
    def by_unit(self) -> Mapping[Unit, tuple[tuple[schema.PartRecord, schema.Entry], ...]]:
        """Stored fragments of all whole parts by unit; cached, because a group may hold a million fragments."""
        stored = ((entry.unit, (part, entry)) for part in self.parts.values() for entry in part.entries)
        return {unit: tuple(fragments) for unit, fragments in group_by_key(stored).items()}


@dataclass(frozen=True)
class CommitSummary:
    """Facts of a commit that pruning needs. Its records never change, so a process reads them once."""

    full_bytes: int  # of all its units
    groups: dict[SaveId, int]  # segment groups that it reaches, with their payload bytes
    versions: frozenset[str]  # saves that hold its units or their bases
    bases: frozenset[str]
    chained: frozenset[str]  # bases, and the saves that hold differences to them
    whole: bool
    previous: str | None  # the commit that it continues


@dataclass(frozen=True)
class CommitSurvey:
    """All commits, newest first, as pruning found them."""

    names: frozenset[str] = frozenset()  # all in manifests/
    others: list[str] = field(default_factory=list)  # those that name no commit
    whole: tuple[SaveId, ...] = ()
    readable: dict[SaveId, CommitSummary] = field(default_factory=dict)
    groups: dict[SaveId, int] = field(default_factory=dict)  # that these reach
    unreadable: tuple[SaveId, ...] = ()  # whose manifest is damaged
    refused: str = ""  # error of a refused read, '' if there was none


class Catalog:
    """Reads the records of one store."""

    def __init__(self, files: Files, record: schema.StoreRecord) -> None:
        self.files = files
        self.record = record
        self._manifests: dict[SaveId, schema.ManifestRecord] = {}
        self._groups: dict[tuple[SaveId, str], LoadedGroup] = {}
        self.survey = CommitSurvey()  # the last one
        self.swept: set[SaveId] = set()  # finished segment groups without temporary files
        self.weights: dict[SaveId, str | None] = {}  # weights-only commits, and the commit that each continues
        self.kept_weights: set[SaveId] = set()  # commits with a weights-only commit that this process read back
        self.damaged_weights: set[SaveId] = set()  # commits, weights-only ones too, whose weights are damaged
        self.left_epochs: set[int] = set()  # given up by the job of this process, for its next one or at its end

    @property
    def store_id(self) -> str:
        """Identity of the store, which every record in it carries."""
        return self.record.store_id

    def saves(self) -> list[SaveId]:
        """Return all commits by file name, newest first, without reading them.

        Raises DamagedError if there are segments but no ``manifests/``, so that commits were lost."""
        return newest_first(self.manifest_names())

    def manifest_names(self) -> list[str]:
        """Return all names in ``manifests/``. Raises as :meth:`saves`."""
        try:
            return self.files.list_dir(paths.MANIFESTS)
        except errors.MissingError as error:
            if any(paths.parse_save_dir(name) is not None for name in list_or_empty(self.files, paths.SEGMENTS)):
                raise errors.DamagedError(
                    f"{_root(self.files)} holds segments but its {paths.MANIFESTS}/ is missing: restore that "
                    "directory from a copy, or make an empty one to begin anew"
                ) from error
            return []

    def survey_commits(self, summarize: Callable[["Catalog", SaveId], CommitSummary]) -> CommitSurvey:
        """Read the manifests that are new since the last survey, by ``summarize``, and forget those that are gone."""
        names, last = frozenset(self.manifest_names()), self.survey
        all_read = not (last.unreadable or last.refused)
        if last.names == names and all_read:
            return last
        added, new, unreadable, refused = names - last.names, dict[SaveId, CommitSummary](), [], ""
        for save in newest_first(added if all_read else names):
            try:
                if save not in last.readable:
                    new[save] = summarize(self, save)
            except errors.DamagedError:
                unreadable.append(save)
            except errors.StorageError as error:
                refused = str(error)
        unnamed = (name for name in added.union(last.others) & names if paths.parse_save_file(name) is None)
        newest = next(iter(last.readable), SaveId(0, 0))
        if len(names) < len(last.names) + len(added) or min(new, default=newest) < newest:
            new |= {save: last.readable[save] for save in last.readable.keys() & newest_first(names)}
            new, last = {save: new[save] for save in sorted(new, reverse=True)}, CommitSurvey()
        groups = last.groups.copy()  # of thousands of commits, only new ones are looked at, unless some are gone
        for one in new.values():
            groups.update(one.groups)
        whole = (*(save for save, one in new.items() if one.whole), *last.whole)
        readable = {**new, **last.readable}
        found = CommitSurvey(names, sorted(unnamed), whole, readable, groups, tuple(unreadable), refused)
        self.survey = found  # another thread may forget it
        return found

    def lost(self) -> tuple[str, ...]:
        """Return a problem if LATEST, written after each commit, names one that is newer than all in ``manifests/``."""
        text = (
            "{}: it was committed, as LATEST tells, and is gone from manifests/. Restore that file from a copy before "
            "the next save, which removes the segments. If it was moved away on purpose, or this is a copy of a store "
            "in use, remove LATEST"
        )
        with suppress(errors.StorageError, ValueError):
            named = SaveId.parse(self.files.read(paths.LATEST, _MARK_LIMIT).decode().rstrip("\n"))
            return (text.format(named),) if named > max(self.saves(), default=SaveId(0, 0)) else ()  # listed after it
        return ()

    def proven(self) -> set[SaveId]:
        """Return the commits that a job resumed from and then took a step."""
        return set(newest_first(list_or_empty(self.files, paths.PROVEN)))

    def suspects(self) -> "Suspects":
        """Return the suspect marks; damaged and unreadable ones are ignored and listed as problems."""
        why: dict[SaveId, str] = {}
        problems: list[str] = []
        try:
            names = self.files.list_dir(paths.SUSPECT)
        except errors.MissingError:
            return Suspects()
        except errors.StorageError as error:
            return Suspects(problems=(f"{error}; no commit counts as suspect",))
        for name in sorted(names):
            save = paths.parse_save_file(name)
            if save is None:
                if not is_temporary(name):
                    problems.append(f"{paths.SUSPECT}/{name} is not a mark's name; it is ignored")
                continue
            path = paths.suspect_path(save)
            try:
                mark = schema.from_bytes(schema.SuspectRecord, self.files.read(path, _MARK_LIMIT), path)
                if (mark.store_id, mark.save) != (self.store_id, save.name):
                    raise errors.DamagedError(
                        f"{path} is the mark of {mark.save} of store {mark.store_id}: it was copied or renamed"
                    )
                why[save] = mark.why
            except errors.MissingError:  # withdrawn or pruned just now
                continue
            except (errors.DamagedError, errors.StorageError) as error:
                problems.append(f"{error}; the mark is ignored")
        return Suspects(why, tuple(problems))

    def manifest(self, save: SaveId) -> schema.ManifestRecord:
        """Return a manifest. Raises DamagedError if it is not whole, or of another store or save."""
        if save not in self._manifests:
            path = paths.manifest_path(save)
            try:
                manifest = schema.from_bytes(schema.ManifestRecord, self.files.read(path, _MANIFEST_LIMIT), path)
            except errors.MissingError as error:
                raise errors.DamagedError(str(error)) from error
            if (manifest.store_id, manifest.save) != (self.store_id, save):
                raise errors.DamagedError(
                    f"{path} is manifest {manifest.save} of store {manifest.store_id}: it was copied or renamed"
                )
            self._manifests[save] = manifest
        return self._manifests[save]

    def group(self, save: SaveId, record: schema.GroupRecord) -> LoadedGroup:
        """Return the parts of a group that match the manifest's ``record``, with the sizes of their payloads checked.

        Raises UnreachableError if an object store does not answer; all other problems are listed in the group."""
        key = (save, record.parts)
        if key not in self._groups:
            group = self._load_group(save, record)
            if group.refused:  # the next read may succeed
                return group
            self._groups[key] = group
        return self._groups[key]

    def retain(self, saves: Collection[SaveId]) -> None:
        """Drop cached records that none of ``saves`` needs, to bound memory in a long-lived process."""
        self._manifests = {save: self._manifests[save] for save in self._manifests.keys() & frozenset(saves)}
        needed = {
            (SaveId.parse(name), record.parts)
            for manifest in self._manifests.values()
            for name, record in manifest.groups.items()
        }
        self._groups = {key: group for key, group in self._groups.items() if key in needed}

    def forget(self) -> None:
        """Clear the cache, so that records are read from storage again."""
        self._manifests.clear()
        self._groups.clear()
        self.survey = CommitSurvey()
        self.swept.clear()

    def _load_group(self, save: SaveId, record: schema.GroupRecord) -> LoadedGroup:
        parts: dict[int, schema.PartRecord] = {}
        raw: list[bytes] = []
        problems: list[str] = []
        refused = False
        # Lists the names first: the world size in the record is not trusted before it matches.
        try:
            ranks = [rank for rank in present_parts(self.files, save) if rank < record.world_size]
        except errors.UnreachableError:
            raise
        except (errors.DamagedError, errors.StorageError) as error:
            return LoadedGroup(save, {}, (str(error),), refused=isinstance(error, errors.StorageError))
        if len(ranks) != record.world_size:
            present = set(ranks)
            missing = list(islice((rank for rank in range(record.world_size) if rank not in present), 4))
            problems.append(
                f"segments/{save}: {len(ranks)} of {record.world_size} parts are present; missing: ranks {missing} ..."
            )
        for rank in ranks:
            try:
                data = self.files.read(paths.part_path(save, rank), PART_LIMIT)
                part = parse_part(data, self.store_id, save, rank)
                check_payload_size(self.files, part)
            except errors.UnreachableError:
                raise
            except (errors.DamagedError, errors.StorageError) as error:
                problems.append(str(error))
                refused |= not isinstance(error, errors.DamagedError | errors.MissingError)
            else:
                raw.append(data)
                parts[rank] = part
        if not problems and parts_digest(raw) != record.parts:
            return LoadedGroup(save, {}, (f"segments/{save}: its parts are not those that were committed",))
        return LoadedGroup(save, parts, tuple(problems), refused)


def open_catalog(files: Files) -> Catalog:
    """Open an existing store. Raises NoStoreError, NewerFormatError or DamagedError if it cannot be read."""
    try:
        data = files.read(paths.STORE, _STORE_LIMIT)
    except errors.MissingError as error:
        if not newest_first(list_or_empty(files, paths.MANIFESTS)):
            raise errors.NoStoreError(f"{_root(files)} is no driftpoint store: it has no {paths.STORE}") from error
        # Commits follow STORE.json: either another process made the store just now, or the file was lost.
        try:
            data = files.read(paths.STORE, _STORE_LIMIT)
        except errors.MissingError as gone:
            raise errors.DamagedError(f"{_root(files)} holds commits but its {paths.STORE} is missing") from gone
    reader = schema.from_bytes(schema.ReaderRecord, data, paths.STORE).reader
    if reader > schema.READER:
        raise errors.NewerFormatError(
            f"{_root(files)} is in a format that needs a reader of format {reader}; this release reads up to "
            f"{schema.READER}: run `pip install --upgrade driftpoint`"
        )
    return Catalog(files, schema.from_bytes(schema.StoreRecord, data, paths.STORE))


def require_reader(files: Files, reader: int) -> None:
    """Refuse readers of versions before ``reader`` from now on; durable on return."""
    record = open_catalog(files).record
    if record.reader < reader:
        replace_hint(files, paths.STORE, schema.to_bytes(record.replace(reader=reader)))


def newest_first(names: Iterable[str]) -> list[SaveId]:
    """Return the saves that files are named after, newest first. Fast for sorted names."""
    return sorted((save for name in names if (save := paths.parse_save_file(name)) is not None), reverse=True)


def _root(files: Files) -> str:
    return str(getattr(files, "root", "this directory"))


def open_or_create(files: Files) -> Catalog:
    """Open the store at the root of ``files``, or create it there, durably.

    Raises StorageError if the directory holds other files: a store is never created among them. Raises DamagedError if
    it holds commits without ``STORE.json``: a new store never replaces them."""
    advice = "run `driftpoint doctor --repair STORE`, or name an empty directory as `store:` to begin anew"
    try:
        return open_catalog(files)
    except errors.NoStoreError:
        files.make_dir("")
    except errors.DamagedError as error:
        raise errors.DamagedError(f"{error}: {advice}") from error
    there = [name for name in files.list_dir("") if not is_temporary(name)]
    unknown = [name for name in there if name not in paths.TOP_LEVEL | paths.FOREIGN]
    if unknown:
        raise errors.StorageError(
            f"{_root(files)} is no store and not empty (it holds {unknown[0]!r}): name an empty or new directory as "
            "`store:`"
        )
    holding = [name for name in there if name in (paths.EPOCHS, paths.SEGMENTS, paths.MANIFESTS, paths.PROVEN)]
    if any(not is_temporary(name) for folder in holding for name in files.list_dir(folder)):
        # Records are written after STORE.json: either another process made the store just now, or the file was lost.
        try:
            return open_catalog(files)
        except errors.NoStoreError as error:
            raise errors.DamagedError(f"{error}, but records of one: {advice}") from error
    for folder in (paths.EPOCHS, paths.SEGMENTS, paths.MANIFESTS, paths.PROVEN):
        ensure_dir(files, folder)
    record = schema.StoreRecord(format=schema.FORMAT, reader=schema.FORMAT, store_id=secrets.token_hex(16))
    with suppress(errors.ExistsError):  # another process created the store at the same moment
        write_new(files, paths.STORE, schema.to_bytes(record))
    return open_catalog(files)


def restore_store_record(files: Files) -> Catalog:
    """Write a lost or damaged ``STORE.json`` anew, with the store id that the records of epochs and commits carry.

    Raises ExistsError if it is whole, NewerFormatError if it is a newer release's, DamagedError if no record can be
    read, or they carry several ids."""
    with suppress(errors.NoStoreError, errors.DamagedError):
        open_catalog(files)
        raise errors.ExistsError(f"{_root(files)} has its {paths.STORE}: nothing is to be restored")
    kinds: tuple[tuple[str, type[schema.EpochRecord | schema.ManifestRecord]], ...] = (
        (paths.EPOCHS, schema.EpochRecord),
        (paths.MANIFESTS, schema.ManifestRecord),
    )
    ids, reader = set(), schema.FORMAT
    for folder, kind in kinds:
        for name in (name for name in list_or_empty(files, folder) if name.endswith(".json")):
            with suppress(errors.DamagedError):  # marks of closed epochs, and records that are damaged
                known = schema.from_bytes(kind, files.read(f"{folder}/{name}", _MANIFEST_LIMIT), name)
                ids.add(known.store_id)
                reader = max(reader, known.reader if isinstance(known, schema.ManifestRecord) else schema.FORMAT)
    if len(ids) != 1:
        raise errors.DamagedError(
            f"the records in {_root(files)} carry {len(ids)} store ids, so its {paths.STORE} cannot be restored: copy "
            "that file from a backup"
        )
    record = schema.StoreRecord(format=schema.FORMAT, reader=reader, store_id=ids.pop())
    replace_hint(files, paths.STORE, schema.to_bytes(record))
    return open_catalog(files)


@dataclass(frozen=True)
class Suspects:
    """The marked commits, each with the cause of the jobs' deaths. ``problems``: unreadable marks."""

    why: Mapping[SaveId, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def saves(self) -> Set[SaveId]:
        return self.why.keys()

    def messages(self, chosen: SaveId, saves: Sequence[SaveId]) -> Iterator[str]:
        """Yield messages about marks that affect a resume from ``chosen`` of all ``saves``."""
        if chosen in self.why:
            yield f"{chosen} is suspect ({self.why[chosen]}), but no other commit can be resumed"
        for save in saves:
            if save > chosen and save in self.why:
                yield f"{save} is suspect ({self.why[save]}): older commits are resumed from first"


def mark_suspect(files: Files, store_id: str, save: SaveId, why: str) -> None:
    """Record that jobs which resumed from the commit died. Durable on return. A second mark changes nothing."""
    ensure_dir(files, paths.SUSPECT)
    with suppress(errors.ExistsError):
        record = schema.SuspectRecord(store_id=store_id, save=save.name, why=why)
        write_new(files, paths.suspect_path(save), schema.to_bytes(record))


def withdraw_suspect(files: Files, save: SaveId) -> None:
    """Remove the mark, durably, if there is one."""
    with suppress(errors.MissingError):
        files.unlink(paths.suspect_path(save))
        files.sync_dir(paths.SUSPECT)


def resume_order(saves: Sequence[SaveId], suspects: Set[SaveId], proven: Set[SaveId]) -> list[SaveId]:
    """Return ``saves`` (newest first) in the order to resume from: suspects last.

    If only the newest commit is suspect, the one before it comes first. If the two newest are suspect, the state was
    bad before them, so proven commits come first."""
    leading = sum(1 for _ in takewhile(suspects.__contains__, saves))
    sound = [save for save in saves if save not in suspects]
    if leading > 1:
        sound.sort(key=lambda save: save not in proven)
    return sound + [save for save in saves if save in suspects]


def find_lineage(newest: SaveId, previous: Mapping[SaveId, str | None]) -> set[SaveId]:
    """Return ``newest`` and the commits that it continues, without those whose steps a later one took again.

    ``previous``: the commit that each one continues. If that is gone, the next older one takes its place, unless it is
    ahead in steps: then it is of a branch that a rollback abandoned."""
    lineage, after, step = set[SaveId](), newest, newest.step + 1
    for save in sorted(previous, reverse=True):
        if save == after or (save < after and save.step < min(step, after.step)):
            lineage |= {save} if save.step < step else set()
            step, name = min(step, save.step), previous[save]
            if name is None:
                break
            after = SaveId.parse(name)
    return lineage
