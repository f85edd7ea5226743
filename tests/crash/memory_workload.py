"""A job of two ranks that keeps versions in memory through the store's public functions, killed by others.

As in training: a rank overwrites a payload only when all ranks have the version in the other one. Copies are made in
pieces with a system call between them, so that a kill meets half a copy. What all ranks have goes to a journal.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from store.memory.arena import Arena
from store.memory.layout import Tier
from store.names import SaveId
from store.storage.local import LocalFiles
from tests.crash.workload import Journal
from tests.support.made_versions import NBYTES, STORE, content, record_of, tier_at, whole

RANKS = 2
ROOM = 3 * 4096
PIECES = 4


class Keeper:
    """One incarnation."""

    def __init__(self, tier: Tier, epoch: int, journal: Journal | None = None, ranks: int = RANKS) -> None:
        self.tier, self.epoch, self.ranks, self.journal = tier, epoch, ranks, journal
        self.stands = max(whole(tier), default=None)
        self.whole: int | None = None
        self.arenas = [Arena(tier, epoch, rank) for rank in range(ranks)]
        for arena in self.arenas:
            arena.take_over(self.stands)
            for slot in arena.slots[: 1 if self.stands else None]:
                arena.room(slot, ROOM)

    def keep(self, step: int) -> SaveId:
        """All ranks keep a version, one after the other."""
        save = SaveId(step, self.epoch)
        slot = 0 if self.whole is None else 1 - self.whole
        for rank, arena in enumerate(self.arenas):
            self.copy(arena, slot, save, rank)
            arena.seal(slot, record_of(save, rank, self.ranks))
        first, self.whole = self.whole is None, slot
        if self.journal is not None:
            self.journal.note("whole", save=save.name)
        if first:
            for arena in self.arenas:
                arena.take_rest(self.ranks)
        return save

    def copy(self, arena: Arena, slot: int, save: SaveId, rank: int) -> None:
        """A system call after each piece."""
        arena.room(slot, ROOM)
        data, size = content(save, rank), NBYTES // PIECES
        for start in range(0, NBYTES, size):
            arena.write_at(slot, start, data[start : start + size])
            os.truncate(self.tier.base / "piece", 0)

    def close(self) -> None:
        for arena in self.arenas:
            arena.close(remove=True)


def prepared(files: LocalFiles) -> Tier:
    """The tier, and a file to make system calls on."""
    base = Path(files.root)
    base.mkdir(parents=True, exist_ok=True)
    (base / "piece").touch()
    return tier_at(base, STORE)


def keeps(files: LocalFiles, journal: Journal) -> None:
    """Four versions from nothing."""
    job = Keeper(prepared(files), 1, journal)
    for step in range(1, 5):
        job.keep(step)
    for arena in job.arenas:
        arena.close(remove=False)


def takes(ranks: int = RANKS) -> Callable[[LocalFiles, Journal], None]:
    """Goes on from what ``keeps`` left, in a world of another size, and keeps three versions; leaves them."""

    def run(files: LocalFiles, journal: Journal) -> None:
        tier = prepared(files)
        epoch = max((one.epoch for one in tier.generations()), default=0) + 1
        job = Keeper(tier, epoch, journal, ranks)
        for step in range(5, 8):
            job.keep(step)
        for arena in job.arenas:
            arena.close(remove=False)

    return run


def closes(files: LocalFiles, journal: Journal) -> None:
    """Goes on, keeps one version and gives everything back."""
    tier = prepared(files)
    job = Keeper(tier, 9, journal)
    job.keep(50)
    journal.note("closing")
    job.close()


MEMORY = {
    "memory-keeps": keeps,
    "memory-takes": takes(),
    "memory-shrinks": takes(1),
    "memory-grows": takes(3),
    "memory-closes": closes,
}
