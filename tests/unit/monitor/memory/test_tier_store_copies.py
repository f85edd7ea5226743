"""Stores that were copied, or put back to what they were: whose memory is whose, and what must not be believed."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.supervisor.store_probe import StoreProbe
from store.memory.rescue import NOTHING, rescue_newest
from store.names import SaveId, manifest_path
from tests.support.jobs import Job, same
from tests.support.kept import abandoned, catalog_of, memory, settled, tier_of
from tests.support.memory_jobs import kept_steps, killed_at, run, sources

NEWEST: dict[str, Any] = {"resume": {"at": "newest"}}


def begun(store: Path, **settings: Any) -> Job:
    return Job(store, **{"every": 4, "memory": memory(store), **NEWEST, **settings})


def put_back(store: Path) -> None:
    """The store as it was after step 5, though its job went on to step 10, without a restart, and was killed there."""
    one = begun(store)
    one.ckpt.resume()
    run(one, 5)
    shutil.copytree(store, store.parent / "backup")
    run(one, 5)
    abandoned(one)
    assert kept_steps(store) == [9, 10] and [save.step for save in catalog_of(store).saves()] == [8, 4]
    shutil.rmtree(store)
    (store.parent / "backup").rename(store)


def test_a_store_that_was_put_back_is_not_run_ahead_of(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What memory holds continues a commit that is not there: whoever restored the store wanted to be back there."""
    put_back(store)
    one = begun(store)
    assert one.ckpt.resume() == 4 and sources(one) == {""}
    assert "from before the store was restored" in caplog.text
    run(one, 2)
    abandoned(one)
    again = begun(store)
    assert again.ckpt.resume() == 6 and sources(again) == {"memory"}
    again.ckpt.close()


def test_nothing_is_rescued_into_a_store_that_was_put_back(store: Path) -> None:
    put_back(store)
    before = catalog_of(store).saves()
    assert rescue_newest(tier_of(store), catalog_of(store)).outcome == NOTHING
    assert catalog_of(store).saves() == before


def test_a_commit_removed_by_hand_takes_what_continues_it_along(store: Path) -> None:
    killed_at(store, 10, **NEWEST)
    assert [save.step for save in catalog_of(store).saves()] == [8, 4]
    (store / manifest_path(SaveId(8, 1))).unlink()
    one = begun(store)
    assert one.ckpt.resume() == 4 and sources(one) == {""}
    one.ckpt.close()


def test_what_continues_the_newest_commit_is_believed_though_that_was_not_settled_yet(store: Path) -> None:
    kept = killed_at(store, 10, **NEWEST)
    one = begun(store)
    assert one.ckpt.resume() == 10 and same(one.weights(), kept) and sources(one) == {"memory"}
    one.ckpt.close()


def test_what_was_kept_while_the_next_commit_was_under_way_is_believed_though_the_one_before_is_pruned(
    store: Path,
) -> None:
    one = begun(store, retention={"keep_last": 1, "log_spaced": False})
    run(one, 7)
    files, go = one.hook(), threading.Event()
    files.before = lambda what, path: go.wait(180) if (what, path) == ("link", manifest_path(SaveId(8, 1))) else None
    for _ in range(2):
        one.step(flush=False)
        settled(one)
    go.set()
    kept = one.weights()
    abandoned(one)
    assert kept_steps(store) == [8, 9] and [save.step for save in catalog_of(store).saves()] == [8]
    again = begun(store)
    assert again.ckpt.resume() == 9 and same(again.weights(), kept) and sources(again) == {"memory"}
    again.ckpt.close()


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_job_on_a_copy_does_not_take_the_memory_of_the_stores_own(store: Path, ahead: int) -> None:
    """ahead: claims of the copy since; with none its first job claims the epoch that the store's dead job has."""
    first = begun(store)
    run(first, 4)
    first.ckpt.close()
    copy = store.parent / "copy"
    shutil.copytree(store, copy)
    for _ in range(ahead):
        other = begun(copy)
        other.ckpt.resume()
        other.ckpt.close()
    kept = killed_at(store, 6, **NEWEST)
    assert kept_steps(store) == [9, 10]

    other = begun(copy)
    assert other.ckpt.resume() == 4 and sources(other) == {""}
    run(other, 3)
    assert kept_steps(store) == [6, 7, 9, 10]
    run(other, 1)
    other.ckpt.close()
    assert kept_steps(store) == [9, 10]

    again = begun(store)
    assert again.ckpt.resume() == 10 and same(again.weights(), kept) and sources(again) == {"memory"}
    again.ckpt.close()
    assert kept_steps(store) == []


def test_two_jobs_on_copies_have_memory_each_and_a_restart_finds_its_own(store: Path) -> None:
    """Both claim the same epoch, live at once and keep versions of the same name."""
    first = begun(store)
    run(first, 4)
    first.ckpt.close()
    copy = store.parent / "copy"
    shutil.copytree(store, copy)
    states = {}
    jobs = {path: begun(path) for path in (store, copy)}
    for path, one in jobs.items():
        assert one.ckpt.resume() == 4
        torch.manual_seed(len(path.name))
        run(one, 3)
        states[path] = one.weights()
    assert not same(states[store], states[copy])
    for one in jobs.values():
        abandoned(one)
    for path in (copy, store):
        again = begun(path)
        assert again.ckpt.resume() == 7 and sources(again) == {"memory"}
        assert same(again.weights(), states[path])
        again.ckpt.close()
    assert kept_steps(store) == []


def test_a_supervisor_does_not_count_what_is_not_the_stores(store: Path) -> None:
    """Else a job on a restored store gets no further than memory from before, for ever, and others are blamed."""
    put_back(store)
    sight = StoreProbe(store, store.parent / "shm").look()
    assert (sight.newest, sight.step, sight.resumes) == (SaveId(4, 1), 4, SaveId(4, 1))
