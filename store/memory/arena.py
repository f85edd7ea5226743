"""Write one rank's shared memory: two payloads in turn, each with the record that makes it a version.

A payload is overwritten only after its record was removed, and a record is written only after its whole payload, so a
killed process leaves the other version whole. The caller must not overwrite the version that all ranks have.

Memory of an earlier incarnation is taken over file by file, so that two incarnations never need space for four
payloads. Memory of a living process, or of a job on a copy of the store, is never taken. One thread at a time.

A living process holds a POSIX record lock on its ``.owner`` file, which opening it again there would drop. The file's
mtime is the boot time of the last write; if that is of an earlier boot or wall-clock time, the wall clock is used."""

import mmap
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from store.errors import MissingError, StorageError, system_errors
from store.memory.index import foreign_snapshots, scan_node, snapshot_key, version_in
from store.memory.layout import BRANCHES, SLOTS, Generation, Tier, VersionRecord, write_private
from store.memory.limits import reserve
from store.names import SaveId
from store.schema import to_bytes
from store.session import FileLock, is_held_here, locking_process
from store.storage.local import Files, as_bytes


def boot_seconds() -> float:
    """Return the seconds since the machine booted, including sleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def touch(owner: Path) -> None:
    """Mark a rank's memory as written now. Raises OSError."""
    now = boot_seconds()
    os.utime(owner, (now, now))


def seconds_since_written(place: Generation, rank: int, now: float) -> float:
    """Return the seconds since a rank's memory was written; ``now`` is in :func:`boot_seconds`."""
    written = _changed(place.owner(rank))
    if 0.0 < written <= now:
        return now - written
    return time.time() - max(_changed(path) for path in place.of(rank))


def _changed(path: Path) -> float:
    with suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0


class Owner(FileLock):
    """Lock of a rank's memory. StorageError if another process holds it; MissingError if its folder or file is gone."""

    def __init__(self, path: Path, wait_seconds: float = 0.0) -> None:
        if is_held_here(path):
            raise StorageError(f"{path} is held by this process already: close the first checkpointer")
        try:
            super().__init__(path, 0o600, wait_seconds)
        except FileNotFoundError as error:
            raise MissingError(f"{path.parent} is not there") from error
        except BlockingIOError as error:
            raise StorageError(f"{path} is held by another process: two jobs on one store?") from error
        except OSError as error:
            raise StorageError(f"cannot open and lock {path}: {error.strerror}") from error
        with suppress(OSError):  # a lock on a file without a name is invisible to others
            if os.path.samestat(path.lstat(), os.fstat(self._descriptor)):
                return
        self.release()
        raise MissingError(f"{path} was removed by its owner before")

    def mark(self, *, replica: bool) -> None:
        """Record in the file's size whether the memory is for replicas. Others read that without opening the file."""
        with suppress(OSError):
            os.ftruncate(self._descriptor, int(replica))


def is_owned(path: Path) -> bool:
    """Return whether a living process holds the lock, without trying to take it."""
    try:
        return locking_process(path) is not None
    except FileNotFoundError:
        return False
    except OSError:
        return True  # unknown: leave the memory alone


class Arena:
    """Writes the memory of one rank. Raises StorageError if another process holds it.

    ``epoch`` is the first one of the incarnation. ``versions``: 2, or 1: then there is no version while one is being
    replaced. ``files`` are the store's, to recognise memory of its copies; without it all memory counts as the store's.
    ``replica``: whether it is for replicas of a rank on another node."""

    def __init__(
        self, tier: Tier, epoch: int, rank: int, versions: int = 2, files: Files | None = None, *, replica: bool = False
    ) -> None:
        self._tier, self._rank = tier, rank
        self.slots = SLOTS[:versions]
        self._maps: dict[int, mmap.mmap] = {}
        # Reads the store only here, while the job starts: a store that hangs later must not stop training.
        node = scan_node(tier)
        self._foreign = set() if files is None else foreign_snapshots(node, files)
        # Memory of a later incarnation is never taken, even if this process slept and that one is dead.
        self._earlier = tuple(one for one in tier.generations() if one.epoch < epoch)
        if files is not None:  # the store of a living process without a version is unknown
            recorded = {snapshot_key(held) for held in node.everything()}
            self._foreign |= {
                (one.folder, rank)
                for one in self._earlier
                for rank in one.ranks()
                if (one.folder, rank) not in recorded and is_owned(one.owner(rank))
            }
        branches = (tier.generation(epoch, branch) for branch in range(1 if files is None else BRANCHES))
        free = (one for one in branches if (one.folder, rank) not in self._foreign)
        self._place, self._owner = _acquire_first_free(rank, free)
        self._owner.mark(replica=replica)
        self._touch()

    def files(self, slot: int) -> tuple[Path, Path]:
        """Return the paths of a slot's record and payload."""
        return self._place.record(self._rank, slot), self._place.payload(self._rank, slot)

    def holding(self, save: SaveId) -> int | None:
        return next((slot for slot in self.slots if version_in(self._place, self._rank, slot) == save), None)

    def room(self, slot: int, nbytes: int) -> mmap.mmap:
        """Drop the slot's version and return its memory: at least ``nbytes`` bytes, reserved. StorageError if full."""
        self.drop(slot)
        buffer = self._maps.get(slot)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._maps[slot] = self._map(slot, max(nbytes, 1))
        return buffer

    def write_at(self, slot: int, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write bytes into a payload that has :meth:`room` for them."""
        view = as_bytes(data)
        self._maps[slot][offset : offset + len(view)] = view

    def seal(self, slot: int, record: VersionRecord) -> None:
        """Write the record of a complete payload, which makes it a version. Raises StorageError."""
        path, temporary = self._place.record(self._rank, slot), self._place.unsealed(self._rank, slot)
        write_private(path, temporary, to_bytes(record))
        self._touch()

    def drop(self, slot: int) -> None:
        """Remove the record, so that the payload is no version any more. Raises StorageError."""
        _remove([self._place.record(self._rank, slot)])

    def take_over(self, keep: SaveId | None) -> Sequence[int]:
        """Take over this rank's memory of earlier incarnations, except the version ``keep``. Raises StorageError.

        Return the slots that need memory now: if ``keep`` is on this node, its memory becomes the last slot later."""
        spared = False
        for old in (one for one in self._earlier if self._may_take(one, self._rank)):
            for slot in SLOTS:
                if keep is not None and version_in(old, self._rank, slot) == keep:
                    spared = True
                else:
                    self._take(old, slot)
        return self.slots[: -1 if spared else None]

    def take_rest(self, world_size: int) -> None:
        """Take over or remove all memory of earlier incarnations, once every rank has a version of this one.

        Each rank takes its own; memory of ranks that are on another node now, or no longer exist, is removed by any
        rank. Raises StorageError."""
        for old in self._earlier:
            for rank in old.ranks():
                own = rank == self._rank
                unused = own or rank >= world_size or not is_owned(self._place.owner(rank))
                if unused and self._may_take(old, rank):
                    for slot in SLOTS if own else ():
                        self._take(old, slot)
                    _remove(old.of(rank))
            with suppress(OSError):  # it may still hold files of other ranks
                old.folder.rmdir()

    def close(self, *, remove: bool, unmap: bool = True) -> None:
        """Unmap the memory and release the lock; with ``remove``, delete the files. A second call changes nothing.

        unmap: False where it may be written to; it stays mapped while tensors refer to it. Raises StorageError if the
        files cannot be deleted."""
        for buffer in self._maps.values() if unmap else ():
            with suppress(BufferError):  # a view still exists; the mapping ends with the process
                buffer.close()
        self._maps.clear()
        try:
            if remove:  # the owner file last, while it is locked: afterwards it may belong to another process
                _remove(self._place.of(self._rank))
        finally:
            self._owner.release()
        if remove:
            for folder in (self._place.folder, self._tier.folder):
                with suppress(OSError):
                    folder.rmdir()

    def give_back(self, slot: int) -> None:
        """Delete a version and free its memory. Raises StorageError."""
        self.drop(slot)
        self._maps.pop(slot, None)
        _remove([self._place.payload(self._rank, slot)])

    def _touch(self) -> None:
        with suppress(OSError):  # then the wall clock is used
            touch(self._place.owner(self._rank))

    def _may_take(self, old: Generation, rank: int) -> bool:
        return (old.folder, rank) not in self._foreign and not is_owned(old.owner(rank))

    def _take(self, old: Generation, slot: int) -> None:
        """Rename a payload to a free slot of this incarnation, or remove it if there is none."""
        _remove([old.record(self._rank, slot), old.unsealed(self._rank, slot)])
        payload = old.payload(self._rank, slot)
        free = [one for one in self.slots if not self._place.payload(self._rank, one).exists()]
        with system_errors("take over", payload), suppress(FileNotFoundError):
            if free:
                payload.rename(self._place.payload(self._rank, free[0]))
            else:
                payload.unlink()

    def _map(self, slot: int, nbytes: int) -> mmap.mmap:
        path = self._place.payload(self._rank, slot)
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with system_errors("open", path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with system_errors("map", path):
                reserve(descriptor, size, path)
                return mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)


def _acquire_first_free(rank: int, places: Iterable[Generation]) -> tuple[Generation, Owner]:
    """Lock the first place that no living process holds: jobs on copies of a store may have the same epoch."""
    refused = StorageError("memory holds too many jobs of this epoch: run `driftpoint memory clear` to free it")
    for place in places:
        try:
            return place, _acquire(place, rank)
        except StorageError as error:
            refused = error
    raise refused


_CLEANUP_WAIT = 1.0  # seconds to wait for a lock, which a cleanup may hold for a moment


def _acquire(place: Generation, rank: int) -> Owner:
    for _ in range(100):  # a cleanup may remove the empty folder in between
        place.make()
        with suppress(MissingError):
            return Owner(place.owner(rank), _CLEANUP_WAIT)
    raise StorageError(f"another process keeps removing {place.folder}: stop it")


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with system_errors("remove", path):
            path.unlink(missing_ok=True)
