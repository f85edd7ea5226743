"""Reading every byte of a store, checking every hash, and decoding what it finds. Changes nothing.

Memory does not grow with fragments, and every byte is read once: differences are checked along with their base.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from store.bases import Key, base_key, stored_whole, whole_key
from store.catalog import Catalog, LoadedGroup
from store.coverage import Source
from store.errors import DamagedError, NothingToResumeError, StorageError, UnreachableError
from store.family import Finding, check_family, check_stored
from store.layout import part_path, payload_path
from store.names import SaveId
from store.payload import check_header
from store.schema import Entry, PartRecord
from store.segments import read_leaves
from store.versions import Bad, newest_resumable, resolve

Progress = Callable[[int], None]
"""Told the number of payload bytes just checked."""


GroupKey = tuple[SaveId, str]
"""A segment group and the digest of its parts."""


@dataclass(frozen=True)
class CommitState:
    """``ok``: as committed. ``fallback``: resumable, with older versions of some units. ``damaged``: not resumable."""

    save: SaveId
    state: str
    problems: tuple[str, ...]


@dataclass(frozen=True)
class VerifyReport:
    """All commits, newest first, and the one that a resume would take now."""

    commits: tuple[CommitState, ...]
    problems: tuple[str, ...]
    resumable: SaveId | None
    bytes_read: int

    @property
    def ok(self) -> bool:
        """Whether nothing at all is wrong."""
        return not self.problems and all(commit.state == "ok" for commit in self.commits)


def verify(
    catalog: Catalog,
    progress: Progress = lambda _: None,
    *,
    only: Collection[SaveId] | None = None,
    checked: Collection[GroupKey] = (),
) -> VerifyReport:
    """Check every commit down to the last byte that it reaches. NewerFormatError where a newer release is needed;
    UnreachableError where an object store does not answer.

    only: these commits instead of all. checked: groups that were read and need not be read again."""
    catalog.forget()
    checker = _Checker(catalog, progress, checked)
    saves = [save for save in catalog.saves() if only is None or save in only]
    checker.check(saves)
    bad = frozenset(checker.bad)
    commits = tuple(_state(catalog, save, checker, bad) for save in saves)
    return VerifyReport(
        commits, (*checker.problems, *catalog.suspects().problems), _resumable(catalog, bad), checker.bytes_read
    )


def groups_of(catalog: Catalog, save: SaveId) -> set[GroupKey]:
    """All groups that a commit reaches. DamagedError or StorageError where its manifest cannot be read."""
    return {(SaveId.parse(name), record.parts) for name, record in catalog.manifest(save).groups.items()}


def total_bytes(catalog: Catalog) -> int:
    """Payload bytes that :func:`verify` is going to read."""
    groups = {}
    for save in catalog.saves():
        try:
            groups.update(catalog.manifest(save).groups)
        except (DamagedError, StorageError):
            continue
    return sum(record.payload_bytes for record in groups.values())


class _Checker:
    def __init__(self, catalog: Catalog, progress: Progress, checked: Collection[GroupKey]) -> None:
        self.problems: list[str] = []
        self.bad: set[Bad] = set()
        self.harmless: set[SaveId] = set()
        self.bytes_read = 0
        self._catalog = catalog
        self._progress = progress
        self._checked = checked
        self._whole: dict[Key, Source] = {}
        self._differences: dict[Key, list[Source]] = {}

    def check(self, saves: Sequence[SaveId]) -> None:
        groups = self._reached(saves)
        stored = [(part, entry) for group in groups for part in group.parts.values() for entry in part.entries]
        self._whole = stored_whole(stored)
        for part, entry in stored:
            key = base_key(entry)
            if key is not None and key in self._whole:
                self._differences.setdefault(key, []).append(Source(part, entry, self._whole[key]))
        for group in groups:
            self.problems.extend(group.problems)
            if group.problems:
                self.harmless.add(group.save)
            for part in group.parts.values():
                self._check_part(part)

    def _reached(self, saves: Sequence[SaveId]) -> list[LoadedGroup]:
        """Of all commits, each once; but what was checked before."""
        found: dict[GroupKey, LoadedGroup] = {}
        for save in saves:
            try:
                manifest = self._catalog.manifest(save)
            except UnreachableError:
                raise
            except (DamagedError, StorageError) as error:
                self.problems.append(str(error))
                continue
            for name, record in manifest.groups.items():
                key = (SaveId.parse(name), record.parts)
                if key not in found and key not in self._checked:
                    found[key] = self._catalog.group(key[0], record)
        return list(found.values())

    def _check_part(self, part: PartRecord) -> None:
        path = payload_path(part.save, part.rank)
        try:
            check_header(self._catalog.files, path, part.header_bytes, part.header_xxh3_128)
        except UnreachableError:
            raise
        except (DamagedError, StorageError) as error:
            # Our own readers do not need the container's header; others do.
            self.problems.append(str(error))
            self.harmless.add(part.save)
        for entry in part.entries:
            self._check_entry(part, entry)
        try:
            read_leaves(self._catalog.files, part)
        except UnreachableError:
            raise
        except (DamagedError, StorageError) as error:
            self.problems.append(str(error))
            self.bad.add(Bad(part.save))
        self._read(sum(tensor.nbytes for tensor in part.run_tensors))

    def _check_entry(self, part: PartRecord, entry: Entry) -> None:
        """With all that are differences to it; a difference waits for its base's turn."""
        key = base_key(entry)
        if key is None:
            source, key = Source(part, entry), whole_key(part, entry)
            differences = self._differences.get(key, []) if self._whole[key].entry is entry else []
            findings = check_family(self._catalog.files, source, differences)
            self._told([source, *differences], findings)
        elif key not in self._whole:  # resolving says so where a commit needs it
            source = Source(part, entry)
            finding = check_stored(self._catalog.files, source)
            self._told([source], [] if finding is None else [finding])

    def _told(self, checked: Sequence[Source], findings: Sequence[Finding]) -> None:
        for found in findings:
            if isinstance(found.error, UnreachableError):
                raise found.error
            part, entry = found.source.part, found.source.entry
            self.problems.append(f"{found.error} ({entry.fqn}/{entry.slot} in {part_path(part.save, part.rank)})")
            self.bad.add(Bad(part.save, entry.unit, entry.fragment))
        self._read(sum(source.entry.nbytes for source in checked))

    def _read(self, count: int) -> None:
        self.bytes_read += count
        self._progress(count)


def _state(catalog: Catalog, save: SaveId, checker: _Checker, bad: frozenset[Bad]) -> CommitState:
    try:
        resolution = resolve(catalog, save, bad)
    except UnreachableError:
        raise
    except (DamagedError, StorageError) as error:
        return CommitState(save, "damaged", (str(error),))
    touched = {SaveId.parse(name) for name in resolution.manifest.groups}
    hurt = resolution.fallbacks or touched & checker.harmless
    return CommitState(save, "fallback" if hurt else "ok", resolution.problems)


def _resumable(catalog: Catalog, bad: frozenset[Bad]) -> SaveId | None:
    try:
        return newest_resumable(catalog, bad)[0].manifest.save
    except NothingToResumeError:
        return None
