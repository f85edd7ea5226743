"""Verify a store: read every byte once, check every hash, unpack and decode. Changes nothing.

A fragment is checked together with all differences to it, chunk by chunk, so memory is a few chunks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

import xxhash

from store.catalog import Catalog, LoadedGroup, noting
from store.certificate import certify, run_saves
from store.encoding import encoding_named
from store.encoding.base import Bytes, chunk_sizes
from store.encoding.stream import next_chunk, require_end
from store.errors import DamagedError, MissingError, NothingToResumeError, StorageError, UnreachableError
from store.fragments import Readable, Source, StoredBytes, check_encoded
from store.journal import find_chain, journal_catalog, recorded
from store.names import SEGMENTS, SaveId, part_path, payload_path
from store.resolve import (
    RejectedVersion,
    Resolution,
    base_key,
    index_bases,
    newest_resumable,
    own_key,
    resolve,
    with_base,
)
from store.schema import Entry, PartRecord
from store.segment import check_header, check_payload_size, present_parts, read_leaves, read_part
from store.session import listed_epochs, read_epoch
from store.storage.local import list_or_empty


@dataclass(frozen=True)
class Finding:
    """A stored fragment whose bytes are damaged, cannot be read, or do not decode to the stored values."""

    source: Source
    error: DamagedError | StorageError


def check_with_differences(files: Readable, base: Source, differences: Sequence[Source]) -> list[Finding]:
    """Check a fragment, and the differences to it and to each other, each after its base.

    Of a difference to what is damaged, only its own bytes are checked."""
    members = [_Member(files, source) for source in (base, *differences)]
    places = {own_key(one.source.part, one.source.entry): place for place, one in reversed([*enumerate(members)])}
    bases = [places[key] if (key := base_key(one.source.entry)) in places else None for one in members]
    after: list[list[int]] = [[] for _ in members]
    for place, of in enumerate(bases):
        if of is not None:
            after[of].append(place)
    for size in chunk_sizes(base.entry.numel):
        waiting: list[tuple[int, Bytes | None]] = [(0, None)]  # members, and the chunk of their base
        while waiting:
            place, chunk = waiting.pop()
            chunk = members[place].chunk(size, chunk)
            waiting += [(one, chunk) for one in after[place]] if chunk is not None else ()
    findings: list[Finding | None] = []
    whole: list[bool] = []
    for one, of in zip(members, bases, strict=True):
        based = of is None or whole[of]
        findings.append(_finding(one.source, partial(one.check, well_based=based)))
        whole.append(based and findings[-1] is None)
    return [finding for finding in findings if finding is not None]


def check_stored(files: Readable, source: Source) -> Finding | None:
    """Check only the hash of stored bytes, for a difference whose base is gone because no commit needs it."""
    return _finding(source, StoredBytes(files, source).check)


def _finding(source: Source, check: Callable[[], None]) -> Finding | None:
    try:
        check()
    except (DamagedError, StorageError) as error:
        return Finding(source, error)
    return None


class _Member:
    """Reads one fragment chunk by chunk without keeping chunks."""

    def __init__(self, files: Readable, source: Source) -> None:
        self.source = source
        self._bytes = StoredBytes(files, source)
        self._hash = xxhash.xxh3_128()
        self._encoding = encoding_named(source.entry.encoding)
        self._error: DamagedError | StorageError | None = None

    def chunk(self, size: int, base: Bytes | None = None) -> Bytes | None:
        """Return the next encoded chunk of ``size`` elements after test-decoding it; None after an error."""
        if self._error is not None:
            return None
        lanes = self._encoding.lanes(size, self.source.dtype)
        try:
            chunk = next_chunk(self._bytes.read, lanes, self._bytes.packed, base)
            if self._bytes.packed:
                self._hash.update(chunk.data)
            self._encoding.decode(chunk, size, self.source.dtype)
        except (DamagedError, StorageError) as error:
            self._error = error
            return None
        return chunk

    def check(self, well_based: bool) -> None:
        """Raise the error of the fragment after all chunks were read. ``well_based``: its base, if any, is whole.

        Damage of the stored bytes is raised first, because it also causes errors of unpacking."""
        if well_based and self._error is None:
            try:
                require_end(self._bytes.read)
            except (DamagedError, StorageError) as error:
                self._error = error
        self._bytes.check()
        if not well_based:
            return
        if self._error is not None:
            raise self._error
        if self._bytes.packed:
            check_encoded(self.source, self._hash.hexdigest())


Progress = Callable[[int], None]  # called with the number of payload bytes just checked


@dataclass(frozen=True)
class CommitState:
    """``ok``: as committed. ``fallback``: resumable, with other versions or run states. ``damaged``: not resumable."""

    save: SaveId
    state: str
    problems: tuple[str, ...]
    weights_only: bool = False


@dataclass(frozen=True)
class VerifyReport:
    """All commits, newest first, and the one that a resume would take."""

    commits: tuple[CommitState, ...]
    problems: tuple[str, ...]
    resumable: SaveId | None
    bytes_read: int
    journal: int | None = None  # step that the records after ``resumable`` lead to; None if there are no records
    beyond: int | None = None  # step of the newest record that they do not lead to

    @property
    def damaged(self) -> tuple[str, ...]:
        """Names of the commits that are not as they were committed."""
        return tuple(commit.save.name for commit in self.commits if commit.state != "ok")

    @property
    def ok(self) -> bool:
        return not self.problems and not self.damaged


def verify(catalog: Catalog, progress: Progress = lambda _: None) -> VerifyReport:
    """Check every byte that every commit needs; a commit that is pruned meanwhile is left out.

    Raises NewerFormatError if the store needs a newer release, UnreachableError if an object store does not answer,
    StorageError if all commits were pruned meanwhile."""
    catalog.forget()
    checker, listed = _Checker(catalog, progress), catalog.saves()
    checker.check(checker.reached(listed))
    present = set(catalog.saves())
    saves = [save for save in listed if save in present]
    if listed and not saves:
        raise StorageError(
            f"all {len(listed)} commits were pruned while they were read, so none is verified: keep more of them "
            "(`retention:`), or verify a copy of the store"
        )
    bad = frozenset(checker.bad)
    commits = tuple(_state(catalog, save, checker, bad) for save in saves)
    problems = [*catalog.lost(), *checker.problems(saves), *catalog.suspects().problems]
    for epoch in listed_epochs(catalog.files):
        with noting(problems), suppress(MissingError):
            read_epoch(catalog.files, epoch)
    found = tuple(problems), _resumable(catalog, bad), checker.bytes_read
    return _with_journal(VerifyReport(commits, *found), catalog, bad, progress)


def total_bytes(catalog: Catalog) -> int:
    """Return the payload bytes that :func:`verify` will read."""
    groups = {}
    for save in catalog.saves():
        with suppress(DamagedError, StorageError):
            groups.update(catalog.manifest(save).groups)
    return sum(record.payload_bytes for record in groups.values())


def _with_journal(
    report: VerifyReport, catalog: Catalog, bad: frozenset[RejectedVersion], progress: Progress
) -> VerifyReport:
    """Check every byte of the journal, and how far it leads."""
    journal = journal_catalog(catalog)
    checker, groups = _Checker(journal, progress), list(_records(journal))
    checker.check(groups)
    present = list_or_empty(journal.files, SEGMENTS)  # others were removed meanwhile
    damaged = {save for save, _ in checker.found if save.name in present}
    problems = (*report.problems, *(f"journal: {text}" for save, text in checker.found if save in damaged))
    report = replace(report, problems=problems, bytes_read=report.bytes_read + checker.bytes_read)
    if report.resumable is None or not groups:
        return report
    resolution, end = resolve(catalog, report.resumable, _units(bad)), report.resumable
    chain = find_chain(journal, end, {one.save for one in resolution.versions.values() if one.record.moving})
    for record in takewhile(lambda one: one.save not in damaged, () if chain is None else chain.steps):
        end = record.save if record.save.step > end.step else end
    whole = [group.save for group in groups if any(len(group.parts) == one.world_size for one in group.parts.values())]
    return replace(report, journal=end.step, beyond=max((one.step for one in whole if one > end), default=None))


def _records(journal: Catalog) -> Iterator[LoadedGroup]:
    """Yield the parts of all records. What a crash may leave of the last ones is no damage."""
    for save in recorded(journal.files):
        parts, problems = dict[int, PartRecord](), list[str]()
        for rank in present_parts(journal.files, save):
            with noting(problems), suppress(MissingError):
                part = read_part(journal.files, journal.store_id, save, rank)
                journal.files.size(payload_path(save, rank))  # its name may be lost
                check_payload_size(journal.files, part)
                parts[rank] = part
        yield LoadedGroup(save, parts, tuple(problems))


class _Checker:
    def __init__(self, catalog: Catalog, progress: Progress) -> None:
        self.bad: set[RejectedVersion] = set()
        self.harmless: set[SaveId] = set()
        self.bytes_read = 0
        self._catalog = catalog
        self._progress = progress
        self._unreadable: dict[SaveId, list[str]] = {}  # problems of manifests
        self.found: list[tuple[SaveId, str]] = []  # problems of segment groups
        self._needs: dict[SaveId, set[SaveId]] = {}  # the groups that each commit needs
        self._families: dict[int, list[Source]] = {}  # by the id of a whole entry: itself, and what rests on it
        self._rooted: set[int] = set()  # ids of all entries in families

    def check(self, groups: Sequence[LoadedGroup]) -> None:
        stored = [(part, entry) for group in groups for part in group.parts.values() for entry in part.entries]
        known = index_bases(stored)
        for part, entry in stored:
            with suppress(DamagedError):  # if a commit needs the base, resolving reports it
                source = with_base(part, entry, known.get)
                *_, root = source.chain()
                self._families.setdefault(id(root.entry), []).append(source)
                self._rooted.add(id(entry))
        for group in groups:
            self._note(group.save, group.problems)
            if group.problems:
                self.harmless.add(group.save)
            for part in group.parts.values():
                self._check_part(part)

    def problems(self, saves: Sequence[SaveId]) -> list[str]:
        """Return the problems of what these commits need."""
        manifests = [text for save in saves for text in self._unreadable[save]]
        needed = set[SaveId]().union(*(self._needs[save] for save in saves))
        return manifests + [text for group, text in self.found if group in needed]

    def _note(self, group: SaveId, problems: Iterable[str]) -> None:
        self.found += [(group, text) for text in problems]

    def reached(self, saves: Sequence[SaveId]) -> list[LoadedGroup]:
        found: dict[tuple[SaveId, str], LoadedGroup] = {}
        for save in saves:
            needs, unreadable = self._needs.setdefault(save, set()), self._unreadable.setdefault(save, [])
            with noting(unreadable):
                for name, record in self._catalog.manifest(save).groups.items():
                    key = (SaveId.parse(name), record.parts)
                    needs.add(key[0])
                    if key not in found:
                        found[key] = self._catalog.group(key[0], record)
        return list(found.values())

    def _check_part(self, part: PartRecord) -> None:
        path = payload_path(part.save, part.rank)
        header: list[str] = []
        with noting(header):
            check_header(self._catalog.files, path, part.header_bytes, part.header_xxh3_128)
        if header:  # our own readers do not need the container's header; others do
            self.harmless.add(part.save)
        self._note(part.save, header)
        for entry in part.entries:
            self._check_entry(part, entry)
        leaves: list[str] = []
        with noting(leaves):
            read_leaves(self._catalog.files, part)
        if leaves:
            self.bad.add(RejectedVersion(part.save))
        self._note(part.save, leaves)
        self._read(sum(tensor.nbytes for tensor in part.run_tensors))

    def _check_entry(self, part: PartRecord, entry: Entry) -> None:
        """Check an entry with all that rests on it; a difference is checked with its base."""
        if id(entry) in self._families:
            family = sorted(self._families[id(entry)], key=lambda source: sum(1 for _ in source.chain()))
            self._record(family, check_with_differences(self._catalog.files, family[0], family[1:]))
        elif id(entry) not in self._rooted:
            source = Source(part, entry)
            finding = check_stored(self._catalog.files, source)
            self._record([source], [] if finding is None else [finding])

    def _record(self, checked: Sequence[Source], findings: Sequence[Finding]) -> None:
        for found in findings:
            if isinstance(found.error, UnreachableError):
                raise found.error
            part, entry = found.source.part, found.source.entry
            self._note(part.save, [f"{found.error} ({entry.fqn}/{entry.slot} in {part_path(part.save, part.rank)})"])
            self.bad.add(RejectedVersion(part.save, entry.unit, entry.fragment))
        self._read(sum(source.entry.nbytes for source in checked))

    def _read(self, count: int) -> None:
        self.bytes_read += count
        self._progress(count)


def _state(catalog: Catalog, save: SaveId, checker: _Checker, bad: frozenset[RejectedVersion]) -> CommitState:
    try:
        resolution = resolve(catalog, save, _units(bad))
        unread = _require_run_state(catalog, resolution, bad)
    except UnreachableError:
        raise
    except (DamagedError, StorageError) as error:
        return CommitState(save, "damaged", (str(error),))
    touched = {SaveId.parse(name) for name in resolution.manifest.groups}
    hurt = resolution.fallbacks or unread or touched & checker.harmless
    return CommitState(save, "fallback" if hurt else "ok", (*resolution.problems, *unread))


def _resumable(catalog: Catalog, bad: frozenset[RejectedVersion]) -> SaveId | None:
    passed_over: set[SaveId] = set()
    while True:
        try:
            resolution = newest_resumable(catalog, _units(bad), passed_over)[0]
        except NothingToResumeError:
            return None
        with suppress(DamagedError):
            _require_run_state(catalog, resolution, bad)
            return resolution.manifest.save
        passed_over.add(resolution.manifest.save)


def _units(bad: frozenset[RejectedVersion]) -> frozenset[RejectedVersion]:
    """Return the rejected versions of units, without run states: a composite may resume with that of another save."""
    return frozenset(one for one in bad if one.unit is not None)


def _require_run_state(catalog: Catalog, resolution: Resolution, bad: frozenset[RejectedVersion]) -> tuple[str, ...]:
    """Return the problems of damaged run states that a resume does not need, since another save's is whole.

    A resume by default takes that of the save nearest to the effective step. Raises DamagedError if all are damaged."""
    problems: list[str] = []
    saves = run_saves(resolution, certify(resolution).effective_step)
    for save, record in saves.items():
        group = catalog.group(save, record)
        if RejectedVersion(save) in bad or group.problems or len(group.parts) != record.world_size:
            problems.append(f"the run state of {save} is damaged")
    if len(problems) == len(saves):
        raise DamagedError("; ".join(problems))
    return tuple(problems)
