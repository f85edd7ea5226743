"""Reading every byte of a store and checking every hash. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from store.catalog import Catalog, LoadedGroup
from store.errors import DamagedError, NothingToResumeError, StorageError
from store.layout import part_path, payload_path
from store.names import SaveId
from store.payload import check_header
from store.schema import PartRecord
from store.segments import read_entry, read_leaves
from store.versions import Bad, newest_resumable, resolve

Progress = Callable[[int], None]
"""Told the number of payload bytes just checked."""


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


def verify(catalog: Catalog, progress: Progress = lambda _: None) -> VerifyReport:
    """Check every commit down to the last byte that it reaches."""
    catalog.forget()
    checker = _Checker(catalog, progress)
    saves = catalog.saves()
    for save in saves:
        checker.check_manifest(save)
    bad = frozenset(checker.bad)
    commits = tuple(_state(catalog, save, checker, bad) for save in saves)
    return VerifyReport(commits, tuple(checker.problems), _resumable(catalog, bad), checker.bytes_read)


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
    def __init__(self, catalog: Catalog, progress: Progress) -> None:
        self.problems: list[str] = []
        self.bad: set[Bad] = set()
        self.harmless: set[SaveId] = set()
        self.bytes_read = 0
        self._catalog = catalog
        self._progress = progress
        self._seen: set[tuple[SaveId, str]] = set()

    def check_manifest(self, save: SaveId) -> None:
        try:
            manifest = self._catalog.manifest(save)
        except (DamagedError, StorageError) as error:
            self.problems.append(str(error))
            return
        for name, record in manifest.groups.items():
            key = (SaveId.parse(name), record.parts)
            if key not in self._seen:
                self._seen.add(key)
                self._check_group(self._catalog.group(key[0], record))

    def _check_group(self, group: LoadedGroup) -> None:
        self.problems.extend(group.problems)
        if group.problems:
            self.harmless.add(group.save)
        for part in group.parts.values():
            self._check_part(part)

    def _check_part(self, part: PartRecord) -> None:
        path = payload_path(part.save, part.rank)
        try:
            check_header(self._catalog.files, path, part.header_bytes, part.header_xxh3_128)
        except (DamagedError, StorageError) as error:
            # Our own readers do not need the container's header; others do.
            self.problems.append(str(error))
            self.harmless.add(part.save)
        for entry in part.entries:
            try:
                read_entry(self._catalog.files, part, entry, memoryview(bytearray(entry.nbytes)))
            except (DamagedError, StorageError) as error:
                self.problems.append(f"{error} ({entry.fqn}/{entry.slot} in {part_path(part.save, part.rank)})")
                self.bad.add(Bad(part.save, entry.unit))
            self._read(entry.nbytes)
        try:
            read_leaves(self._catalog.files, part)
        except (DamagedError, StorageError) as error:
            self.problems.append(str(error))
            self.bad.add(Bad(part.save))
        self._read(sum(tensor.nbytes for tensor in part.run_tensors))

    def _read(self, count: int) -> None:
        self.bytes_read += count
        self._progress(count)


def _state(catalog: Catalog, save: SaveId, checker: _Checker, bad: frozenset[Bad]) -> CommitState:
    try:
        resolution = resolve(catalog, save, bad)
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
