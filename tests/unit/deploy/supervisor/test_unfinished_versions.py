"""A version in memory that not all ranks have: no job resumes it, so it is no progress, and clears no commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.supervisor.restart_policy import Attempt, GiveUp, Limits, Restart, RestartHistory, decide_restart
from deploy.supervisor.store_probe import StoreProbe
from monitor.memory.replica_server import ReplicaStore
from store.memory.arena import Arena
from store.memory.layout import Tier
from store.names import SaveId
from store.session import read_epoch
from store.storage.local import LocalFiles
from tests.support.made_versions import NBYTES, abandon, content, head_of, part_of, record_of, tier_at
from tests.support.stores import StoreBuilder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


class TwoRanks:
    """A job of two ranks that keeps versions in memory, at the epoch that it claims."""

    def __init__(self, root: Path, store: StoreBuilder) -> None:
        self.store, self._root = store, root
        self.tier: Tier = tier_at(root.parent / "shm", store.store_id)

    def dies(self, *steps: int, unfinished: int | None = None) -> None:
        """Versions of both ranks, and one that rank 0 alone finished."""
        self.store.restart()
        epoch = self.store.epoch
        arenas = [Arena(self.tier, epoch, rank, files=LocalFiles(self._root)) for rank in (0, 1)]
        for arena in arenas:
            arena.take_over(None)
        for number, step in enumerate(steps):
            for rank, arena in enumerate(arenas):
                self._keep(arena, number % 2, SaveId(step, epoch), rank)
        if unfinished is not None:
            self._keep(arenas[0], len(steps) % 2, SaveId(unfinished, epoch), 0)
        for arena in arenas:
            abandon(arena)

    def _keep(self, arena: Arena, slot: int, save: SaveId, rank: int) -> None:
        arena.room(slot, NBYTES)
        arena.write_at(slot, 0, content(save, rank))
        token = read_epoch(LocalFiles(self._root), save.epoch).token
        part = part_of(save, rank, 2, store_id=self.store.store_id)
        head = head_of(save, 2, store_id=self.store.store_id) if rank == 0 else None
        record = record_of(save, rank, 2)
        arena.seal(slot, record.replace(claim=token, part=part, head=head))


def test_a_version_that_one_rank_never_finished_is_neither_newest_nor_what_is_resumed(root: Path) -> None:
    store = StoreBuilder(root)
    job, first = TwoRanks(root, store), store.save(10)
    probe = StoreProbe(root, root.parent / "shm")
    job.dies(unfinished=11)
    assert (probe.look().newest, probe.look().step, probe.look().resumes) == (first, 10, first)
    job.dies(11, unfinished=12)
    whole = SaveId(11, store.epoch)
    assert (probe.look().newest, probe.look().step, probe.look().resumes) == (whole, 11, whole)


def test_a_commit_that_kills_every_job_while_one_rank_keeps_a_version_is_suspected(root: Path) -> None:
    store = StoreBuilder(root)
    job = TwoRanks(root, store)
    store.save(10)
    bad = store.save(20)
    probe, history = StoreProbe(root, root.parent / "shm"), RestartHistory()
    for _ in range(3):
        before = probe.look()
        assert before.resumes == bad
        job.dies(unfinished=21)
        history, verdict = decide_restart(history, Attempt(1, before, probe.look()), Limits(), lambda: 0.0)
        assert not isinstance(verdict, GiveUp)
        assert isinstance(verdict, Restart)
        if verdict.suspect is not None:
            assert verdict.suspect == bad
            return
    pytest.fail("the commit that every attempt resumed and died of is not suspected")


def test_ranks_of_other_nodes_are_not_missed(root: Path) -> None:
    """Each node has its own ranks, and its own supervisor."""
    store = StoreBuilder(root)
    job = TwoRanks(root, store)
    store.save(10)
    job.dies(11)
    for path in job.tier.generation(store.epoch).of(1):
        path.unlink(missing_ok=True)
    assert StoreProbe(root, root.parent / "shm").look().step == 11


def test_a_version_that_ranks_of_other_nodes_may_not_have_finished_is_no_progress(root: Path) -> None:
    """No rank begins a version before all have finished the last one: that one is whole."""
    store = StoreBuilder(root)
    job = TwoRanks(root, store)
    store.save(10)
    bad = store.save(20)
    probe, history = StoreProbe(root, root.parent / "shm"), RestartHistory()
    for number in range(3):
        before = probe.look()
        assert (before.resumes, before.step) == (bad, 20)
        job.dies(21)
        for rank in (0, 1):
            job.tier.generation(store.epoch).payload(rank, 1).touch()
        for path in job.tier.generation(store.epoch).of(1):
            path.unlink(missing_ok=True)
        history, verdict = decide_restart(history, Attempt(1, before, probe.look()), Limits(), lambda: 0.0)
        if number == 1:
            assert isinstance(verdict, Restart) and verdict.suspect == bad
            break
    job.dies(21, 22)
    for path in job.tier.generation(store.epoch).of(1):
        path.unlink(missing_ok=True)
    assert (probe.look().step, probe.look().resumes) == (21, SaveId(21, store.epoch))


def test_a_replica_that_is_being_received_is_not_a_rank_that_did_not_finish(root: Path) -> None:
    store = StoreBuilder(root)
    job = TwoRanks(root, store)
    store.save(10)
    job.dies(11, 12)
    for path in job.tier.generation(store.epoch).of(1):
        path.unlink(missing_ok=True)
    replicas = ReplicaStore(2)
    assert replicas.take(job.tier, store.epoch, {1: NBYTES}, None, LocalFiles(root)) is None
    for still_lives in (True, False):
        assert StoreProbe(root, root.parent / "shm").look().step == 11, still_lives
        replicas.close(remove=False)
