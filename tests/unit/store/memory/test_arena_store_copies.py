"""Whose memory it is, where jobs on copies of a store begin on one node at the same moment."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from store.catalog import open_or_create
from store.memory.arena import Arena
from store.memory.index import belonging_to, scan_node
from store.memory.layout import Tier
from store.names import SaveId
from store.session import claim_epoch
from store.storage.local import LocalFiles
from tests.support.made_versions import NBYTES, abandon, content, record_of, tier_at

WORLD = 2


class Jobs:
    """A store and a copy of it, and the ranks of a job on each."""

    def __init__(self, place: Path) -> None:
        root = place / "store"
        root.mkdir()
        first = open_or_create(LocalFiles(root))
        shutil.copytree(root, place / "copy")
        self.tier: Tier = tier_at(place / "shm", first.store_id)
        self.files = {name: LocalFiles(place / name) for name in ("store", "copy")}
        self.claims = {name: self.claimed(name) for name in self.files}

    def claimed(self, name: str) -> tuple[int, str]:
        record = claim_epoch(self.files[name], self.tier.store_id)
        return record.epoch, record.token

    def arena(self, name: str, rank: int) -> Arena:
        return Arena(self.tier, self.claims[name][0], rank, files=self.files[name])

    def keep(self, arena: Arena, name: str, rank: int, step: int, slot: int = 0) -> None:
        epoch, token = self.claims[name]
        save = SaveId(step, epoch)
        record = record_of(save, rank, WORLD)
        part = record.part.replace(store_id=self.tier.store_id)
        head = record.head and record.head.replace(store_id=self.tier.store_id)
        arena.room(slot, NBYTES)
        arena.write_at(slot, 0, content(save, rank))
        arena.seal(slot, record.replace(claim=token, part=part, head=head))

    def held(self, name: str) -> dict[int, tuple[int, ...]]:
        """Steps that memory holds of a store's own jobs, and of which ranks."""
        node = belonging_to(scan_node(self.tier), self.files[name])
        assert all(one.record.claim == self.claims[name][1] for held in node.versions.values() for one in held.values())
        return {save.step: tuple(sorted(held)) for save, held in node.versions.items()}


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path)


def test_ranks_of_jobs_on_two_copies_that_begin_together_do_not_cost_each_other_their_memory(jobs: Jobs) -> None:
    """Each rank takes the first place that is free, so a folder may come to hold ranks of both."""
    arenas = {one: jobs.arena(*one) for one in (("store", 0), ("copy", 0), ("copy", 1), ("store", 1))}
    for (name, rank), arena in arenas.items():
        jobs.keep(arena, name, rank, 5 if name == "store" else 7)
    for arena in arenas.values():
        abandon(arena)
    assert jobs.held("store") == {5: (0, 1)}
    assert jobs.held("copy") == {7: (0, 1)}

    jobs.claims["store"] = jobs.claimed("store")  # and the successor of one takes only what is its own
    again = [jobs.arena("store", rank) for rank in range(WORLD)]
    for arena in again:
        arena.take_over(None)
    for rank, arena in enumerate(again):
        jobs.keep(arena, "store", rank, 9)
    for arena in again:
        arena.take_rest(WORLD)
        abandon(arena)
    assert jobs.held("store") == {9: (0, 1)}
    assert jobs.held("copy") == {7: (0, 1)}


def test_what_a_job_on_a_copy_keeps_first_after_another_one_began_is_not_that_ones_to_take(jobs: Jobs) -> None:
    """It lives, and says of itself only later whose it is; then it is killed, and its restart is to find it."""
    theirs = jobs.arena("copy", 0)
    jobs.claims["store"] = jobs.claimed("store")
    mine = jobs.arena("store", 0)
    jobs.keep(theirs, "copy", 0, 7)
    abandon(theirs)
    mine.take_over(None)
    jobs.keep(mine, "store", 0, 9)
    mine.take_rest(1)
    mine.close(remove=True)
    assert jobs.held("copy") == {7: (0,)}
