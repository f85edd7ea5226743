"""Remove memory of dead jobs.

Memory of living processes and files with other names are never touched. A dead job's version may be the newest state,
so it is removed only when a commit is newer, on request, or when it is old and the daemon could not rescue it.

A rank's files are removed under its lock, which a job takes when it begins. So a job that begins meanwhile makes new
files, and never writes to removed ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from store.errors import StorageError
from store.memory.arena import Owner, boot_seconds, is_owned, seconds_since_written, touch
from store.memory.index import version_in
from store.memory.layout import SLOTS, Generation, Tier, tiers
from store.names import SaveId

KEEP_SECONDS = 24 * 3600.0
"""Time that a dead job's memory is kept for a restart."""


def clear(tier: Tier, newest: SaveId | None = None) -> int:
    """Remove memory of dead processes: all, or versions up to the commit ``newest``. Return the bytes freed."""

    def worthless(place: Generation, rank: int) -> bool:
        held = [version_in(place, rank, slot) for slot in SLOTS]
        return newest is None or all(save is None or save <= newest for save in held)

    return _removed(tier, worthless)


def clear_old(base: Path, keep_seconds: float = KEEP_SECONDS, clock: Callable[[], float] = boot_seconds) -> int:
    """Remove memory that dead jobs of any store last wrote over ``keep_seconds`` ago. Return the bytes freed."""
    return sum(
        _removed(tier, lambda place, rank: seconds_since_written(place, rank, clock()) > keep_seconds)
        for tier in tiers(base)
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


def _removed(tier: Tier, wanted: Callable[[Generation, int], bool]) -> int:
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


_removing = threading.Lock()
"""Held while files are removed: a process can take the lock of a rank twice."""


def _remove(place: Generation, rank: int, wanted: Callable[[Generation, int], bool]) -> int:
    dated = place.owner(rank).exists()  # otherwise locking makes the file, and its date is now
    try:
        lock = Owner(place.owner(rank))
    except StorageError:
        return 0  # a job has just begun there, or removed it
    try:
        return sum(_unlink(path) for path in place.of(rank)) if not dated or wanted(place, rank) else 0
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
