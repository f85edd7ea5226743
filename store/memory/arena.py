"""One rank's shared-memory arena.

How long ago a rank's memory was last written, by a clock that nobody sets: seconds since the machine started.

It stands where a file's time of change does, on the file that the rank's process locks: that can be set without opening
the file, which would cost the process its lock. What stands there may also be of the wall's clock, which is ahead of
the machine's by decades, or of a start of the machine before this one: then the wall's clock has to do.

Whether the process that writes a rank's memory still lives.

A POSIX record lock, as for a store: the kernel drops it when the process dies however it dies, and forked children
(data-loader workers) do not inherit it. Nothing else may open the file in a process that holds it: closing any
descriptor of it would drop the lock, so what this process owns is remembered here.

One rank's memory, as its process writes it: two payloads by turns, and the record that makes one a version.

A payload is overwritten only after its record is gone, and its record written only when all of it is there. So
whatever kills the process leaves the other version whole, if it was; and the hashes in a record tell whether the
payload beside it is what it was. Which of two versions all ranks have, and may therefore not be touched, is the
caller's to know.

Memory of an earlier incarnation is taken over file by file, so that two incarnations never need room for four
payloads. What a living process owns is never taken, nor what jobs on a copy of the store kept. One thread at a time.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from store.errors import MissingError, StorageError
from store.memory.index import SnapshotKey, foreign_snapshots, scan_node, snapshot_key, version_in
from store.memory.layout import BRANCHES, SLOTS, Generation, Tier, VersionRecord
from store.memory.limits import reserve
from store.names import SaveId
from store.schema import to_bytes
from store.session import locking_process
from store.storage.local import Files


def boot_seconds() -> float:
    """Since the machine started, while it slept, too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def touch(owner: Path) -> None:
    """What the rank has counts as written now. OSError."""
    now = boot_seconds()
    os.utime(owner, (now, now))


def seconds_since_written(place: Generation, rank: int, now: float) -> float:
    """Seconds since a rank's memory was written. now: see :func:`boot_seconds`."""
    written = _changed(place.owner(rank))
    if 0.0 < written <= now:
        return now - written
    return time.time() - max(_changed(path) for path in place.of(rank))


def _changed(path: Path) -> float:
    with suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0


_held: dict[Path, int] = {}
"""Process that holds each lock: a forked child has a copy of this, but not of the lock."""


class Owner:
    """Held from construction until :meth:`release`. StorageError where another process holds it; MissingError where
    its folder is not there, or the file was removed in between: then the lock would be on nothing that others see."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if _held.get(path) == os.getpid():
            raise StorageError(f"{path} is held by this process already: close the first checkpointer")
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError as error:
            raise MissingError(f"{path.parent} is not there") from error
        except OSError as error:
            raise StorageError(f"cannot open {path}: {error.strerror}") from error
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            raise StorageError(f"{path} is held by another process: two jobs on one store?") from error
        if not _names(path, self._descriptor):
            os.close(self._descriptor)
            raise MissingError(f"{path} was removed by its owner before")
        _held[path] = os.getpid()

    def release(self) -> None:
        """Let others take what is there. A second call changes nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            _held.pop(self._path, None)


def _names(path: Path, descriptor: int) -> bool:
    """Whether the file is still the one of that name."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except OSError:
        return False


def is_owned(path: Path) -> bool:
    """Whether a living process holds it. Asks only: who tried to take the lock might be in the owner's way."""
    if _held.get(path) == os.getpid():
        return True
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # what cannot be told is left alone
    try:
        return locking_process(descriptor) is not None
    except OSError:
        return True
    finally:
        os.close(descriptor)


_PAGE = mmap.PAGESIZE

_TRIES = 100


class Arena:
    """The memory of ``rank``. versions: 2, or 1: then nothing is there while a version is being replaced.

    files: of the store, to tell what is its own from what is a copy's; without it all that lies there is. StorageError
    where the place is held by another process."""

    def __init__(self, tier: Tier, epoch: int, rank: int, versions: int = 2, files: Files | None = None) -> None:
        self._tier = tier
        self._rank = rank
        self._slots = SLOTS[:versions]
        self._maps: dict[int, mmap.mmap] = {}
        # Asked once, while the job begins: a store may hang later, and training is not to hang with it.
        node = scan_node(tier)
        self._strange = set() if files is None else foreign_snapshots(node, files)
        # What a later incarnation has is never ours to take, also where this process slept and that one is dead.
        self._earlier = tuple(one for one in tier.generations() if one.epoch < epoch)
        if files is not None:  # who lives and has no version yet does not say whose it is
            self._strange |= _untold(self._earlier, {snapshot_key(held) for held in node.everything()})
        branches = (tier.generation(epoch, branch) for branch in range(1 if files is None else BRANCHES))
        free = (one for one in branches if (one.folder, rank) not in self._strange)
        self._place, self._owner = _first_free(rank, free)
        self._date()

    @property
    def slots(self) -> tuple[int, ...]:
        """Which there are."""
        return self._slots

    def files(self, slot: int) -> tuple[Path, Path]:
        """Where the record of a payload is, and the payload."""
        return self._place.record(self._rank, slot), self._place.payload(self._rank, slot)

    def holding(self, save: SaveId) -> int | None:
        """The payload that is this version."""
        return next((slot for slot in self._slots if version_in(self._place, self._rank, slot) == save), None)

    def room(self, slot: int, nbytes: int) -> mmap.mmap:
        """Memory of at least ``nbytes`` bytes, backed, to write a version into; what was one there is none any more.

        StorageError, saying what to do, where there is no room."""
        self.drop(slot)
        found = self._maps.get(slot)
        if found is None or len(found) < nbytes:
            found = self._maps[slot] = self._mapped(slot, max(nbytes, 1))
        return found

    def write_at(self, slot: int, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Put bytes into a payload that has :meth:`room` for them."""
        view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        self._maps[slot][offset : offset + len(view)] = view

    def seal(self, slot: int, record: VersionRecord) -> None:
        """The payload holds all that the record says: from now on it is a version. StorageError where it cannot be."""
        path, temporary = self._place.record(self._rank, slot), self._place.unsealed(self._rank, slot)
        try:
            with open(temporary, "wb", opener=_private) as file:
                file.write(to_bytes(record))
            temporary.rename(path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise StorageError(f"cannot write {path}: {error.strerror}") from error
        self._date()

    def drop(self, slot: int) -> None:
        """The payload is no version any more. StorageError."""
        _remove([self._place.record(self._rank, slot)])

    def take_over(self, keep: SaveId | None) -> None:
        """Have the memory of this rank's earlier incarnations, but for the version ``keep``. StorageError."""
        for old in self._older():
            for slot in SLOTS:
                if keep is None or version_in(old, self._rank, slot) != keep:
                    self._take(old, slot)

    def spares(self, keep: SaveId | None) -> bool:
        """Whether an earlier incarnation's memory of this rank holds the version ``keep`` on this node."""
        if keep is None:
            return False
        return any(version_in(old, self._rank, slot) == keep for old in self._older() for slot in SLOTS)

    def take_rest(self, world_size: int) -> None:
        """There is a version of this incarnation on every rank: nobody goes back to an older one's. StorageError.

        What they left on this node is taken over or removed: each rank's by its successor, by whoever comes first
        where that is on another node now, or is none in this world."""
        for old in self._earlier:
            for rank in old.ranks():
                if rank == self._rank or rank >= world_size or not is_owned(self._place.owner(rank)):
                    self._clear(old, rank)
            with suppress(OSError):  # others' files may be in it still
                old.folder.rmdir()

    def close(self, *, remove: bool) -> None:
        """Let go of the memory; ``remove``: and give it back. A second call changes nothing.

        StorageError where it cannot be given back."""
        for found in self._maps.values():
            with suppress(BufferError):  # somebody still looks at it; it ends with the process
                found.close()
        self._maps.clear()
        owner = self._place.owner(self._rank)
        try:
            if remove:
                _remove(path for path in self._place.of(self._rank) if path != owner)
                _remove([owner])  # as long as it is locked: afterwards it may be another's
        finally:
            self._owner.release()
        if remove:
            for folder in (self._place.folder, self._tier.folder):
                with suppress(OSError):
                    folder.rmdir()

    def give_back(self, slot: int) -> None:
        """This payload is not needed any more, nor is its memory. StorageError."""
        self.drop(slot)
        self._maps.pop(slot, None)
        _remove([self._place.payload(self._rank, slot)])

    def _date(self) -> None:
        with suppress(OSError):  # then the wall's clock has to do
            touch(self._place.owner(self._rank))

    def _older(self) -> Sequence[Generation]:
        return [one for one in self._earlier if self._ours(one, self._rank)]

    def _ours(self, old: Generation, rank: int) -> bool:
        """Whether an earlier incarnation's memory may be taken: of a dead process, and of this store."""
        return (old.folder, rank) not in self._strange and not is_owned(old.owner(rank))

    def _take(self, old: Generation, slot: int) -> None:
        """One payload becomes ours, or is removed where we need none."""
        _remove([old.record(self._rank, slot), old.unsealed(self._rank, slot)])
        payload = old.payload(self._rank, slot)
        free = [mine for mine in self._slots if not self._place.payload(self._rank, mine).exists()]
        try:
            if free:
                payload.rename(self._place.payload(self._rank, free[0]))
            else:
                payload.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageError(f"cannot take over {payload}: {error.strerror}") from error

    def _clear(self, old: Generation, rank: int) -> None:
        if not self._ours(old, rank):
            return
        for slot in SLOTS if rank == self._rank else ():
            self._take(old, slot)
        _remove(old.of(rank))

    def _mapped(self, slot: int, nbytes: int) -> mmap.mmap:
        path = self._place.payload(self._rank, slot)
        size = -(-nbytes // _PAGE) * _PAGE
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise StorageError(f"cannot open {path}: {error.strerror}") from error
        try:
            reserve(descriptor, size, path)
            return mmap.mmap(descriptor, size)
        except OSError as error:
            raise StorageError(f"cannot map {path}: {error.strerror}") from error
        finally:
            os.close(descriptor)


def _untold(places: Iterable[Generation], told: Collection[SnapshotKey]) -> set[SnapshotKey]:
    """What living processes have that has no record yet."""
    return {
        (one.folder, rank)
        for one in places
        for rank in one.ranks()
        if (one.folder, rank) not in told and is_owned(one.owner(rank))
    }


def _first_free(rank: int, places: Iterable[Generation]) -> tuple[Generation, Owner]:
    """The first place that no living process has: an epoch belongs to one job of a store, but copies have theirs."""
    refused = StorageError("memory holds too many jobs of this epoch: `driftpoint memory clear` gives it back")
    for place in places:
        try:
            return place, _owned(place, rank)
        except StorageError as error:
            refused = error
    raise refused


def _owned(place: Generation, rank: int) -> Owner:
    """The rank's place, made and locked. Whoever cleans up may remove a folder while there is nothing in it."""
    for _ in range(_TRIES):
        place.make()
        with suppress(MissingError):
            return Owner(place.owner(rank))
    raise StorageError(f"{place.folder} is removed again and again by another process")


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"cannot remove {path}: {error.strerror}") from error


def _private(path: str | Path, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
