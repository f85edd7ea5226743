"""Remove memory of dead jobs.

Memory of living processes and files with other names are never touched. A dead job's version may be the newest state,
so it is removed only when a commit is newer, on request, or when it is old and the daemon could not rescue it.

A rank's files are removed under its lock, which a job takes when it begins. So a job that begins meanwhile makes new
files, and never writes to removed ones."""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from store.errors import StorageError
from store.memory.arena import Owner, boot_seconds, is_owned, seconds_since_written, touch
from store.memory.index import belonging_to, scan_node, snapshot_key, unfinished_ranks, version_in
from store.memory.layout import SLOTS, Generation, Tier, tiers
from store.memory.limits import size_text
from store.names import SaveId
from store.schema import ManifestRecord
from store.storage.local import Files
from store.text import listed

KEEP_SECONDS = 24 * 3600.0  # time that a dead job's memory is kept for a restart
KEEP_UNREACHABLE_SECONDS = 7 * KEEP_SECONDS  # if its store cannot be reached, so that no rescue could be made


def clear(tier: Tier, files: Files | None = None) -> int:
    """Remove all memory of dead processes. Return the bytes freed.

    files: of a store. Memory of jobs on copies of it, and memory with invalid records, then stays. Raises StorageError
    if the store cannot be read."""
    if files is None:
        return _removed(tier, lambda *_: True)
    own = {snapshot_key(held) for held in belonging_to(scan_node(tier), files).everything()}
    return _removed(tier, lambda place, rank: (place.folder, rank) in own or without_versions(place, rank))


Wanted = Callable[[Generation, int], bool]  # whether to remove a dead rank's memory


def clear_old(base: Path, clock: Callable[[], float] = boot_seconds, *, wanted: Wanted = lambda *_: True) -> int:
    """Remove memory that dead jobs of any store last wrote over ``KEEP_SECONDS`` ago. Return the bytes freed.

    Memory that may hold a state newer than any commit needs a rescue first: ``wanted`` spares it."""
    return sum(clear_old_of(tier, clock=clock, wanted=wanted) for tier in tiers(base))


def clear_old_of(
    tier: Tier,
    keep_seconds: float = KEEP_SECONDS,
    clock: Callable[[], float] = boot_seconds,
    *,
    wanted: Wanted = lambda *_: True,
) -> int:
    """Remove memory of one store, as :func:`clear_old`. Return the bytes freed."""

    return _removed(
        tier, lambda place, rank: seconds_since_written(place, rank, clock()) > keep_seconds and wanted(place, rank)
    )


def without_versions(place: Generation, rank: int) -> bool:
    """Return whether no record makes anything of a rank's memory a version."""
    return not any(place.record(rank, slot).exists() for slot in SLOTS)


def committed(tier: Tier, files: Files, newest: ManifestRecord | None) -> Wanted:
    """Return a test whether a rank's memory holds nothing resumable that is newer than a layer of ``newest``.

    files: Of the store with that commit. Memory of a copy of the store, or with a damaged record, may be newer."""
    node = belonging_to(scan_node(tier), files)
    covered = {
        one.payload
        for save, held in node.versions.items()
        for one in held.values()
        if (newest is not None and save <= newest.oldest) or unfinished_ranks(tier, node, held)
    }

    return lambda place, rank: all(
        place.payload(rank, slot) in covered for slot in SLOTS if place.record(rank, slot).exists()
    )


def oldest_version_seconds(tier: Tier, clock: Callable[[], float] = boot_seconds) -> float:
    """Return the seconds since the oldest memory of dead jobs that holds a version was written; 0 if there is none."""
    ranks = [(place, rank) for place in tier.generations() for rank in place.ranks()]
    return max(
        (
            seconds_since_written(place, rank, clock())
            for place, rank in ranks
            if not without_versions(place, rank) and not is_owned(place.owner(rank))
        ),
        default=0.0,
    )


def renew(tier: Tier, save: SaveId) -> None:
    """Mark a version as written now, because a job resumed from it. Raises OSError, StorageError."""
    for place in tier.generations():
        for rank in place.ranks():
            for slot in SLOTS:
                if version_in(place, rank, slot) == save:
                    with suppress(FileNotFoundError):
                        touch(place.owner(rank))


def used_bytes(tier: Tier) -> int:
    """Return the bytes of memory that the store's versions use on this node."""
    return sum(_bytes(path) for place in tier.generations() for path, _, _ in place.files())


def describe_left(own: Tier) -> str | None:
    """Describe the memory that dead jobs of other stores left, and how to free it; None if none is known.

    Where their stores are is unknown, so it may be the newest state of a job, and stays."""
    found: dict[str, int] = {}
    with suppress(StorageError, OSError):  # the job reports it where it uses the memory
        left = {tier.store_id: sum(map(_bytes, _left(tier))) for tier in tiers(own.base) if tier != own}
        found = {store_id: nbytes for store_id, nbytes in left.items() if nbytes}
    if not found:
        return None
    stores = listed((f"{store_id} ({size_text(nbytes)})" for store_id, nbytes in found.items()), 8)
    return (
        f"dead jobs of other stores left {size_text(sum(found.values()))} in the memory at {own.base}: {stores}. "
        "`driftpoint rescue STORE` commits what no commit has; `driftpoint memory clear ID "
        f"--memory {own.base}` frees the memory of one store"
    )


def _left(tier: Tier) -> Iterator[Path]:
    for place in tier.generations():
        for rank in place.ranks():
            yield from () if is_owned(place.owner(rank)) else place.of(rank)


def _removed(tier: Tier, wanted: Wanted) -> int:
    total = 0
    for place in tier.generations():
        for rank in place.ranks():
            if not is_owned(place.owner(rank)) and wanted(place, rank):
                with _removing:
                    total += _remove(place, rank, wanted)
        with suppress(OSError):
            place.folder.rmdir()
    with suppress(OSError):
        tier.folder.rmdir()
    return total


_removing = threading.Lock()  # held while files are removed: a process can take the lock of a rank twice


def _remove(place: Generation, rank: int, wanted: Wanted) -> int:
    existed = place.owner(rank).exists()  # otherwise locking creates the file, with the present time
    try:
        lock = Owner(place.owner(rank))
    except StorageError:
        return 0  # a job has just begun there, or removed it
    try:
        return sum(_unlink(path) for path in place.of(rank)) if not existed or wanted(place, rank) else 0
    finally:
        lock.release()


def _unlink(path: Path) -> int:
    nbytes = _bytes(path)
    with suppress(FileNotFoundError):
        path.unlink()
        return nbytes
    return 0


def _bytes(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_blocks * 512
    return 0
