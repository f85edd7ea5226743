"""Write a dead job's version into the store.

One rank's share of a version in memory, written into the store as a segment like any other.

Bytes are read out of shared memory piece by piece into one small buffer, and their hashes are compared with those in
the record of the version before the payload gets its name. They are read, not mapped: whoever shrinks a payload that is
mapped elsewhere kills its reader. A rescue that was killed may have left some of it: what stands and says the same is
taken as it is.

Only for the holder of the rescue lock, and only for jobs whose processes are dead: what stands under the save's name
and says something else is what they left of a save that never came about, and is removed.

Writing out of memory what a dead job left there: its newest version becomes a commit like any other.

It is committed under the epoch of the job that kept it. So as soon as another job has claimed the store the rescue is
fenced, gives up and removes what it wrote; that job finds the version in memory by itself. The store's LOCK is not
taken: nobody waits for a rescue. Killed half-way, it is completed by the next one.

It does not know how anybody learned that the job is dead: it looks at the locks of its processes, and writes nothing as
long as one of them is held. One rescue of a store at a time on a node, whoever begins it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from store.catalog import Catalog
from store.commit import Expected, commit, hint_latest, wait_for_group
from store.errors import (
    DamagedError,
    ExistsError,
    FencedError,
    MissingError,
    SaveError,
    StorageError,
    StoreError,
    StoreInUseError,
)
from store.layout import MANIFESTS, manifest_path, part_path, payload_path, segment_dir
from store.memory.arena import Owner, is_owned
from store.memory.index import HeldSnapshot, MemoryVersion, assemble_version, belonging_to, rank_share, scan_node
from store.memory.layout import Tier, require_own
from store.memory.overlay import Overlay
from store.names import SaveId
from store.resolve import resolve
from store.schema import Entry, ManifestRecord, PartRecord, StateTensor, UnitRecord
from store.segment import SegmentDraft, StagedFragment, check_payload_size, present_parts, read_part, write_segment
from store.session import require_newest
from store.storage.atomic import is_temporary
from store.storage.local import Files
from store.text import listed

_PIECE = 1 << 22


@dataclass(frozen=True)
class _Source:
    """A rank's payload in memory. checked: called between pieces; what it raises ends the write."""

    path: Path
    checked: Callable[[], None]

    def pieces(self, offset: int, nbytes: int, expected: str) -> Iterator[memoryview]:
        """Bytes of the payload. DamagedError, after the last piece, where they do not match their hash."""
        state, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(nbytes, _PIECE)))
        descriptor = _opened(self.path)
        try:
            end = offset + nbytes
            while offset < end:
                self.checked()
                piece = buffer[: end - offset]
                self._fill(descriptor, offset, piece)
                state.update(piece)
                offset += len(piece)
                yield piece
        finally:
            os.close(descriptor)
        if state.hexdigest() != expected:
            raise DamagedError(f"{self.path}: {nbytes} bytes before {end} do not match the hash in their record")

    def _fill(self, descriptor: int, offset: int, target: memoryview) -> None:
        while len(target):
            try:
                got = os.preadv(descriptor, [target], offset)
            except OSError as error:
                raise StorageError(f"cannot read {self.path}: {error.strerror}") from error
            if got == 0:
                raise DamagedError(f"{self.path} ends at byte {offset}")
            target, offset = target[got:], offset + got


@dataclass(frozen=True)
class _Bytes:
    """A :class:`store.segment.StreamedData` of a stored piece of memory."""

    source: _Source
    piece: Entry | StateTensor

    @property
    def nbytes(self) -> int:
        return self.piece.nbytes

    @property
    def exact(self) -> bool:
        return True

    def pieces(self) -> Iterator[memoryview]:
        return self.source.pieces(self.piece.offset, self.piece.nbytes, self.piece.xxh3_128)


@dataclass(frozen=True)
class _Tensor:
    """A :class:`store.segment.RunTensor` that lies in memory."""

    dtype: str
    shape: tuple[int, ...]
    data: _Bytes


def write_share(files: Files, version: MemoryVersion, rank: int, checked: Callable[[], None]) -> None:
    """Have the segment of ``rank`` in the store, durable. DamagedError where memory is not what its record says.

    checked: called between pieces of a few megabytes; what it raises ends the write."""
    part = version.records[rank]
    if _stands(files, part):
        return
    remove_share(files, version.save, rank)
    payload = version.payloads.get(rank)
    if payload is None:
        raise StorageError(f"rank {rank}'s memory is not on this node")
    source = _Source(payload, checked)
    draft = SegmentDraft(
        store_id=part.store_id,
        save=part.save,
        rank=rank,
        world_size=part.world_size,
        plan=part.plan,
        fragments=[_fragment(source, entry) for entry in part.entries],
        run_state=part.run_state,
        run_leaves=[_Tensor(one.dtype, one.shape, _Bytes(source, one)) for one in part.run_tensors],
        facts=part.facts,
    )
    write_segment(files, draft, lambda: part.measures)


def remove_share(files: Files, save: SaveId, rank: int) -> None:
    """Remove a rank's segment of a save that nothing points to; whole, or what there is of it."""
    for path in (part_path(save, rank), payload_path(save, rank)):  # a part must not outlive its payload
        with suppress(MissingError):
            files.unlink(path)


def remove_rest(files: Files, save: SaveId) -> None:
    """Remove what a killed write left in the group, and the group where nothing is in it any more."""
    folder = segment_dir(save)
    with suppress(MissingError):
        for name in files.list_dir(folder):
            if is_temporary(name):
                with suppress(MissingError):
                    files.unlink(f"{folder}/{name}")
        if not files.list_dir(folder):
            files.remove_dir(folder)


def _stands(files: Files, part: PartRecord) -> bool:
    """Whether the rank's segment is there as this version's."""
    try:
        found = read_part(files, part.store_id, part.save, part.rank)
        check_payload_size(files, found)
    except (MissingError, DamagedError):
        return False
    return _said(found) == _said(part)


def _said(part: PartRecord) -> PartRecord:
    """What a part says, but for where things lie in the payload."""
    return part.model_copy(
        update={
            "payload_bytes": 0,
            "header_bytes": 0,
            "header_xxh3_128": "",
            "entries": tuple(one.model_copy(update={"offset": 0}) for one in part.entries),
            "run_tensors": tuple(one.model_copy(update={"offset": 0}) for one in part.run_tensors),
        }
    )


def _fragment(source: _Source, entry: Entry) -> StagedFragment:
    return StagedFragment(
        layer=entry.layer,
        slot=entry.slot,
        fqn=entry.fqn,
        start=entry.start,
        numel=entry.numel,
        dtype=entry.dtype,
        encoding=entry.encoding,
        data=_Bytes(source, entry),
    )


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise StorageError(f"cannot open {path}: {error.strerror}") from error


REASON = "written out of memory after the job died"

_CHECKED = 0.5
"""Seconds between two looks at whether the store was claimed."""

RESCUE_LOCK = "rescue-{}.lock"
"""Beside the stores' memory, with a store's id: held by whoever rescues on this node what lies there."""

WRITTEN = "written"
NOTHING = "nothing"
INCOMPLETE = "incomplete"


@dataclass(frozen=True)
class RescueResult:
    """What became of it. outcome: ``written``; ``nothing``: memory holds nothing newer than the store; ``incomplete``:
    what it holds is not there of all ranks. why: in words. manifest: of what was written."""

    outcome: str
    why: str
    manifest: ManifestRecord | None = None


def rescue_newest(tier: Tier, catalog: Catalog, *, aborted: Callable[[], bool] = lambda: False) -> RescueResult:
    """Write the newest version that all ranks have and whose bytes are right, if no commit is as new.

    StoreInUseError where a process that owns it lives, or another rescue is under way. FencedError where another job
    claimed the store. DamagedError where no version is whole. SaveError where it was ``aborted``. StorageError."""
    lock = _locked(tier)
    try:
        catalog.forget()
        return _rescue_newest(tier, catalog, aborted)
    finally:
        lock.release()


def rescue(
    files: Files, catalog: Catalog, version: MemoryVersion, *, aborted: Callable[[], bool] = lambda: False
) -> ManifestRecord:
    """Commit one version, all of whose ranks lie on this node and are dead; for the holder of the rescue lock.

    Whatever it raises: nothing of it is left, unless it stands in the store as a commit after all. Errors as above."""
    watch = _Watch(files, version.save.epoch, aborted)
    try:
        watch.require_newest()
        _require_readable(files, catalog, version)
        for rank in sorted(version.records):
            write_share(files, version, rank, watch)
        remove_rest(files, version.save)
        manifest = _manifest(files, catalog, version)
        with suppress(ExistsError):  # one that was killed before it could tell had come this far
            commit(files, manifest)
    except (StoreError, SaveError) as error:
        with suppress(StorageError):  # pruning knows what is left then
            _give_up(files, catalog, version)
        if not isinstance(error, FencedError):
            watch.require_newest()  # the job that claimed the store took the memory, too
        raise
    with suppress(StorageError):
        hint_latest(files, version.save)
    return manifest


def owner_path(tier: Tier, rank: int, held: HeldSnapshot) -> Path:
    """What the process that keeps a version holds locked as long as it lives."""
    epoch, _, branch = held.payload.parent.name.partition(".")
    return tier.generation(int(epoch), int(branch or 0)).owner(rank)


class _Watch:
    """Asked between pieces whether to go on."""

    def __init__(self, files: Files, epoch: int, aborted: Callable[[], bool]) -> None:
        self._files, self._epoch, self._aborted = files, epoch, aborted
        self._next = time.monotonic() + _CHECKED

    def __call__(self) -> None:
        if self._aborted():
            raise SaveError("the rescue was given up: it was asked to end")
        if time.monotonic() >= self._next:
            self.require_newest()
            self._next = time.monotonic() + _CHECKED

    def require_newest(self) -> None:
        """FencedError where another job claimed the store."""
        require_newest(self._files, self._epoch)


def _rescue_newest(tier: Tier, catalog: Catalog, aborted: Callable[[], bool]) -> RescueResult:
    node, newest = belonging_to(scan_node(tier), catalog.files), next(iter(catalog.saves()), None)
    newer = sorted((save for save in node.versions if newest is None or save > newest), reverse=True)
    incomplete, damaged = [], list(node.problems)
    for save in newer:
        held = node.versions[save]
        _require_dead(tier, held)
        missing = _missing(held)
        if missing is not None:
            incomplete.append(f"version {save}: {missing}")
            continue
        try:
            version = assemble_version(save, [rank_share(held)], node)
            manifest = rescue(catalog.files, catalog, version, aborted=aborted)
        except DamagedError as error:
            damaged.append(str(error))
            continue
        nbytes = sum(part.payload_bytes for part in version.records.values())
        return RescueResult(WRITTEN, f"wrote version {save} of {len(held)} ranks, {nbytes} bytes", manifest)
    if damaged:
        raise DamagedError("no version in memory is whole: " + listed(damaged, 4, "; "))
    if incomplete:
        return RescueResult(INCOMPLETE, listed(incomplete, 4, "; "))
    there = "nothing" if not node.versions else f"version {node.newest}"
    return RescueResult(NOTHING, f"memory holds {there}, and the newest commit of the store is {newest or 'none'}")


def _missing(held: Mapping[int, HeldSnapshot]) -> str | None:
    """Which of its ranks were not on this node: replicas are of ranks that may live, which only their nodes know."""
    world_size = next(iter(held.values())).record.part.world_size
    lacking = sorted(set(range(world_size)) - {rank for rank, one in held.items() if not one.record.replica})
    return f"ranks {lacking[:8]} of {world_size} are not in the memory of this node" if lacking else None


def _locked(tier: Tier) -> Owner:
    try:
        tier.home.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot make {tier.home}: {error.strerror}") from error
    require_own(tier.home)
    try:
        return Owner(tier.home / RESCUE_LOCK.format(tier.store_id))
    except StorageError as error:
        raise StoreInUseError(f"another rescue of it is under way on this node, wait for its end: {error}") from error


def _require_dead(tier: Tier, held: Mapping[int, HeldSnapshot]) -> None:
    for rank, one in held.items():
        if is_owned(owner_path(tier, rank, one)):
            raise StoreInUseError(f"rank {rank} of the job that keeps version {one.record.save} lives: it saves itself")


def _require_readable(files: Files, catalog: Catalog, version: MemoryVersion) -> None:
    """DamagedError where the commit could not be resumed: what it takes from older commits may be gone."""
    resolve(Catalog(Overlay(files, version), catalog.record), version.save)


def _manifest(files: Files, catalog: Catalog, version: MemoryVersion) -> ManifestRecord:
    """Rank 0's, with what was not known when it was kept: its own segments, and the commit before it."""
    head, save = version.manifest, version.save
    plan = next(iter(version.records.values())).plan
    group = wait_for_group(files, Expected(catalog.store_id, save, head.world_size, plan), timeout=0.0)
    previous, commits = _before(catalog, head)
    return head.model_copy(
        update={
            "previous": previous,
            "commits": commits + 1,
            "groups": {**head.groups, save.name: group.record},
            "units": tuple(_told(unit, save) for unit in head.units),
        }
    )


def _before(catalog: Catalog, head: ManifestRecord) -> tuple[str | None, int]:
    """The commit that a version continues, and how many there were. In one epoch a job never goes back, so the newest
    of its own is that; before it has one, it is what the job knew when it kept the version."""
    for save in catalog.saves():
        if save.epoch == head.epoch and save < head.save:
            with suppress(DamagedError):
                return save.name, catalog.manifest(save).commits
    return head.previous, head.commits


def _told(unit: UnitRecord, save: SaveId) -> UnitRecord:
    return unit.model_copy(update={"reason": REASON}) if unit.version == save else unit


def _give_up(files: Files, catalog: Catalog, version: MemoryVersion) -> None:
    """Remove what was written, unless it is a commit. One that came about too late, so that another job's pruning took
    its segments for garbage, is removed as well: nobody was ever told of it."""
    save = version.save
    if save in catalog.saves():
        catalog.forget()
        if present_parts(files, save):
            return
        with suppress(MissingError):
            files.unlink(manifest_path(save))
        files.sync_dir(MANIFESTS)
    for rank in version.records:
        remove_share(files, save, rank)
    remove_rest(files, save)
