"""Write the newest in-memory version of a dead job into the store as a commit.

The commit has the epoch of the dead job. If another job claims the store, the rescue is fenced and removes its files;
that job finds the version in memory itself. The store's LOCK is not taken, so no job waits for a rescue; while a job
holds it, there is none, because on a full disk that job makes room before its claim. One rescue of a store runs on a
node at a time, and only while no process of the job holds its lock. The next rescue completes an interrupted one.

Payloads are read through a small buffer and not mapped, because truncating a mapped payload kills its reader. Their
hashes are checked before the segment gets its name. Other segments under the save's name are leftovers, and removed."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from store import errors, segment
from store.catalog import Catalog
from store.commit import Expected, commit, hint_latest, wait_for_group
from store.memory.arena import Owner, is_owned
from store.memory.index import MemoryVersion, assemble_version, belonging_to, rank_share, scan_node
from store.memory.layout import Tier, make_home
from store.memory.overlay import Overlay
from store.names import MANIFESTS, SaveId, manifest_path, segment_dir
from store.resolve import resolve
from store.schema import Entry, ManifestRecord, PartRecord, StateTensor
from store.session import lock_holder, require_newest
from store.storage.atomic import is_temporary
from store.storage.local import Files, LocalFiles, list_or_empty
from store.text import listed


@dataclass(frozen=True)
class _Bytes:
    """A :class:`store.segment.StreamedData` of a stored piece of memory."""

    path: Path
    piece: Entry | StateTensor
    checked: Callable[[], None]  # called between pieces; its exceptions end the write
    exact: bool = True

    @property
    def nbytes(self) -> int:
        return self.piece.nbytes

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes. Raises DamagedError after the last piece if they do not match their hash."""
        for _, chunk in segment.read_chunks(LocalFiles(self.path.parent), self.path.name, 0, self.piece):
            self.checked()
            yield chunk


def write_share(files: Files, version: MemoryVersion, rank: int, checked: Callable[[], None]) -> None:
    """Write the segment of ``rank`` into the store, durably, unless it is there.

    ``checked`` is called between pieces of a megabyte; its exceptions end the write. Raises DamagedError if memory
    does not match its record."""
    part = version.records[rank]
    if _is_written(files, part):
        return
    segment.remove_segment(files, version.save, rank)
    payload = version.payloads.get(rank)
    if payload is None:
        raise errors.StorageError(f"rank {rank}'s memory is not on this node")
    names = [name for name in segment.StagedFragment.__struct_fields__ if name != "data"]
    draft = segment.SegmentDraft(
        store_id=part.store_id,
        save=part.save,
        rank=rank,
        world_size=part.world_size,
        plan=part.plan,
        fragments=[
            segment.StagedFragment(**{name: getattr(one, name) for name in names}, data=_Bytes(payload, one, checked))
            for one in part.entries
        ],
        run_state=part.run_state,
        run_leaves=[segment.Item("", one.dtype, one.shape, _Bytes(payload, one, checked)) for one in part.run_tensors],
        facts=part.facts,
        differs=part.differs,
    )
    segment.write_segment(files, draft, lambda: part.measures)


def remove_rest(files: Files, save: SaveId) -> None:
    """Remove temporary files of the group, and the group if it is empty."""
    folder = segment_dir(save)
    with suppress(errors.MissingError):
        for name in files.list_dir(folder):
            if is_temporary(name):
                with suppress(errors.MissingError):
                    files.unlink(f"{folder}/{name}")
        if not files.list_dir(folder):
            files.remove_dir(folder)


def _is_written(files: Files, part: PartRecord) -> bool:
    try:
        stored = segment.read_part(files, part.store_id, part.save, part.rank)
        segment.check_payload_size(files, stored)
    except (errors.MissingError, errors.DamagedError):
        return False
    return _without_offsets(stored) == _without_offsets(part)


def _without_offsets(part: PartRecord) -> PartRecord:
    entries = tuple(one.replace(offset=0) for one in part.entries)
    run_tensors = tuple(one.replace(offset=0) for one in part.run_tensors)
    header = {"payload_bytes": 0, "header_bytes": 0, "header_xxh3_128": ""}
    return part.replace(**header, entries=entries, run_tensors=run_tensors)


REASON = "written out of memory after the job died"
_CHECKED = 0.5  # seconds between two checks of the newest epoch
RESCUE_LOCK = "rescue-{}.lock"  # beside the stores' memory, named by store id, held during a rescue on this node
WRITTEN = "written"
NOTHING = "nothing"  # memory holds nothing newer than the store
INCOMPLETE = "incomplete"  # versions in memory lack ranks


@dataclass(frozen=True)
class RescueResult:
    """Result of a rescue, with the manifest if one was written."""

    outcome: str
    why: str  # of the outcome
    manifest: ManifestRecord | None = None


def rescue_newest(tier: Tier, catalog: Catalog, *, aborted: Callable[[], bool] = lambda: False) -> RescueResult:
    """Commit the newest whole version that all ranks have, if no commit is as new.

    Raises StoreInUseError if a process that owns it lives or another rescue is running, FencedError if another job
    claimed the store, DamagedError if no version is whole, SaveError if ``aborted`` returned True, and StorageError if
    storage failed or the store is damaged. The memory may be whole."""
    place = make_home(tier.base) / RESCUE_LOCK.format(tier.store_id)
    try:
        lock = Owner(place)
    except errors.StorageError as error:
        raise errors.StoreInUseError(f"another rescue of it is under way on this node, wait for it: {error}") from error
    try:
        catalog.forget()
        return _rescue_newest(tier, catalog, aborted)
    finally:
        lock.release()


def rescue(
    files: Files, catalog: Catalog, version: MemoryVersion, *, aborted: Callable[[], bool] = lambda: False
) -> ManifestRecord:
    """Commit one version whose ranks are all on this node and dead; the caller holds the rescue lock.

    After an error its files are removed, unless it became a commit. Errors as :func:`rescue_newest`."""
    watch = _Watch(files, version.save.epoch, aborted)
    try:
        watch.require_newest()
        try:
            resolve(Catalog(Overlay(files, version), catalog.record), version.save)
        except errors.DamagedError as error:  # the commit could not be resumed
            raise _LackingError(str(error)) from error
        for rank in sorted(version.records):
            write_share(files, version, rank, watch)
        remove_rest(files, version.save)
        manifest = _manifest(files, catalog, version)
        with suppress(errors.ExistsError):  # an interrupted rescue committed it
            commit(files, manifest, resolved=True)
        # Again: a job that took the lock before the manifest had its name may be removing the segments, to make room.
        watch.require_newest()
    except (errors.StoreError, errors.SaveError) as error:
        with suppress(errors.StorageError):  # pruning removes the remains
            _remove_unless_committed(files, catalog, version)
        if not isinstance(error, errors.FencedError):
            watch.require_newest()  # the error may come from a job that claimed the store and took the memory
        raise
    with suppress(errors.StorageError):
        hint_latest(files, version.save)
    return manifest


class _LackingError(errors.DamagedError):
    """The store lacks versions that a version in memory continues; the memory may be whole."""


def newest_whole(catalog: Catalog) -> ManifestRecord | None:
    """Return the newest commit whose records are whole and can be read, suspect or not; None if there is none."""
    for save in catalog.saves():
        with suppress(errors.DamagedError):
            return resolve(catalog, save).manifest
    return None


class _Watch:
    """Raises between pieces if the rescue was aborted or fenced."""

    def __init__(self, files: Files, epoch: int, aborted: Callable[[], bool]) -> None:
        self._files, self._epoch, self._aborted = files, epoch, aborted
        self._next = time.monotonic() + _CHECKED

    def __call__(self) -> None:
        if self._aborted():
            raise errors.SaveError("the rescue was given up on request")
        if time.monotonic() >= self._next:
            self.require_newest()
            self._next = time.monotonic() + _CHECKED

    def require_newest(self) -> None:
        require_newest(self._files, self._epoch)
        if isinstance(self._files, LocalFiles) and lock_holder(self._files.root) is not None:
            raise errors.StoreInUseError(f"a job on {self._files.root} begins: it finds the memory by itself")


def _rescue_newest(tier: Tier, catalog: Catalog, aborted: Callable[[], bool]) -> RescueResult:
    node, newest = belonging_to(scan_node(tier), catalog.files), max(catalog.saves(), default=None)
    newer = sorted((save for save in node.versions if newest is None or save > newest), reverse=True)
    if not newer and newest is not None:
        # The newest commit may be damaged. A version may have its name, or that of segments that some commit needs: it
        # must not replace them, since other ranks' parts may be whole. A job that resumes it finds them all.
        whole = newest_whole(catalog)
        older = sorted((save for save in node.versions if whole is None or save > whole.save), reverse=True)
        newer = [save for save in older if not list_or_empty(catalog.files, segment_dir(save))]
    incomplete: list[str] = []
    lacking: list[str] = []
    damaged = list(node.problems)
    for save in newer:
        held = node.versions[save]
        for rank, one in held.items():
            epoch, _, branch = one.payload.parent.name.partition(".")
            if is_owned(tier.generation(int(epoch), int(branch or 0)).owner(rank)):
                raise errors.StoreInUseError(f"rank {rank} of the job of {one.record.save} lives: it saves itself")
        world_size = next(iter(held.values())).record.part.world_size
        missing = sorted(set(range(world_size)) - {rank for rank, one in held.items() if not one.record.replica})
        if missing:  # also of a rank with a replica only, which may live elsewhere
            incomplete.append(f"version {save}: ranks {missing[:8]} of {world_size} are not in the memory of this node")
            continue
        try:
            version = assemble_version(save, [rank_share(held)], node)
            manifest = rescue(catalog.files, catalog, version, aborted=aborted)
        except errors.DamagedError as error:
            (lacking if isinstance(error, _LackingError) else damaged).append(str(error))
            continue
        nbytes = sum(part.payload_bytes for part in version.records.values())
        return RescueResult(WRITTEN, f"wrote version {save} of {len(held)} ranks, {nbytes} bytes", manifest)
    if lacking:
        raise errors.StorageError("the store lacks what versions in memory continue: " + listed(lacking, 4, "; "))
    if damaged:
        raise errors.DamagedError("no version in memory is whole: " + listed(damaged, 4, "; "))
    if incomplete:
        return RescueResult(INCOMPLETE, listed(incomplete, 4, "; "))
    there = "nothing" if not node.versions else f"version {node.newest}"
    return RescueResult(NOTHING, f"memory holds {there}, and the newest commit of the store is {newest or 'none'}")


def _manifest(files: Files, catalog: Catalog, version: MemoryVersion) -> ManifestRecord:
    """Complete rank 0's manifest with its own group and the previous commit."""
    head, save = version.manifest, version.save
    plan = next(iter(version.records.values())).plan
    group = wait_for_group(files, Expected(catalog.store_id, save, head.world_size, plan), timeout=0.0)
    previous, commits = _before(catalog, head)
    groups = {**head.groups, save.name: group.record}
    units = tuple(one.replace(reason=REASON) if one.version == save else one for one in head.units)
    return head.replace(previous=previous, commits=commits + 1, groups=groups, units=units)


def _before(catalog: Catalog, head: ManifestRecord) -> tuple[str | None, int]:
    """Return the commit that a version continues, and the number of commits so far.

    In one epoch a job never goes back, so it is the newest commit of that epoch, else the one that the job recorded."""
    for save in catalog.saves():
        if save.epoch == head.epoch and save < head.save:
            with suppress(errors.DamagedError):
                return save.name, catalog.manifest(save).commits
    return head.previous, head.commits


def _remove_unless_committed(files: Files, catalog: Catalog, version: MemoryVersion) -> None:
    """Remove the rescue's files unless they are a commit; also a commit whose segments another job already pruned.

    Such a commit came too late and was never acknowledged."""
    save = version.save
    if save in catalog.saves():
        catalog.forget()
        if segment.present_parts(files, save):
            return
        with suppress(errors.MissingError):
            files.unlink(manifest_path(save))
        files.sync_dir(MANIFESTS)
    for rank in version.records:
        segment.remove_segment(files, save, rank)
    remove_rest(files, save)
