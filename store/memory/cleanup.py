"""Giving memory back: what dead jobs left, once nobody will resume from it.

Never touched: whatever a living process owns, and files with names that are not ours. A dead job's version is the
newest state that there is until a commit is newer, so by itself only what a commit outranks is removed; the rest goes
when it is old, or when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from store.memory.arena import boot_seconds, is_owned, seconds_since_written, touch
from store.memory.index import version_in
from store.memory.layout import SLOTS, Generation, Tier, tiers
from store.names import SaveId

KEEP_SECONDS = 24 * 3600.0
"""How long a dead job's memory stays for a restart that may come yet."""


def clear(tier: Tier, newest: SaveId | None = None) -> int:
    """Remove what no living process owns: all of it, or what the commit ``newest`` outranks. Returns the bytes."""

    def worthless(place: Generation, rank: int) -> bool:
        held = [version_in(place, rank, slot) for slot in SLOTS]
        return newest is None or all(save is None or save <= newest for save in held)

    return _removed(tier, worthless)


def clear_old(base: Path, keep_seconds: float = KEEP_SECONDS, clock: Callable[[], float] = boot_seconds) -> int:
    """Remove, of every store, what dead jobs last wrote longer than ``keep_seconds`` ago. Returns the bytes.

    clock: see :func:`store.memory.arena.boot_seconds`."""

    def old(place: Generation, rank: int) -> bool:
        return seconds_since_written(place, rank, clock()) > keep_seconds

    return sum(_removed(tier, old) for tier in tiers(base))


def renew(tier: Tier, save: SaveId) -> None:
    """A job came back for this version: what there is of it counts as written now. OSError, StorageError."""
    for place in tier.generations():
        for rank in place.ranks():
            for slot in SLOTS:
                if version_in(place, rank, slot) == save:
                    with suppress(FileNotFoundError):
                        touch(place.owner(rank))


def used_bytes(tier: Tier) -> int:
    """Bytes of memory that the store's versions take on this node."""
    return sum(_bytes(path) for place in tier.generations() for path, _, _ in place.files())


def _removed(tier: Tier, wanted: Callable[[Generation, int], bool]) -> int:
    total = 0
    for place in tier.generations():
        for rank in place.ranks():
            if not is_owned(place.owner(rank)) and wanted(place, rank):
                total += _remove(place, rank)
        with suppress(OSError):
            place.folder.rmdir()
    with suppress(OSError):
        tier.folder.rmdir()
    return total


def _remove(place: Generation, rank: int) -> int:
    total = 0
    for path in place.of(rank):
        nbytes = _bytes(path)
        with suppress(FileNotFoundError):
            path.unlink()
            total += nbytes
    return total


def _bytes(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_blocks * 512
    return 0
