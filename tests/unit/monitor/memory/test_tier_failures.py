"""The memory tier in trouble, in one process: training never sees it, nothing whole is lost, nothing is kept quiet."""

from __future__ import annotations

import mmap
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import monitor.memory.tier
from monitor.config.load import Config
from monitor.save.async_copy import AsyncCopy, CopyTiming
from monitor.save.write_tracker import write_tracker
from store.catalog import open_catalog
from store.errors import StorageError
from store.memory import cleanup
from store.memory.arena import Arena
from store.memory.cleanup import clear_old
from store.memory.layout import Generation
from store.storage.local import LocalFiles
from tests.support.jobs import Job, same
from tests.support.kept import abandoned, catalog_of, memory, settled, tier_of
from tests.support.memory_jobs import kept_steps, killed_at, run, sources, state_in, trained
from tests.support.mounts import tmpfs


def place_of(store: Path) -> Generation:
    return tier_of(store).generations()[0]


# ---- what a user's objects and the machine do


class Moody:
    """An object of the user's that raises when it is told to."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def state_dict(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"a": 1}


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyError("k"), OSError("gone"), AssertionError()])
def test_what_a_users_object_raises_never_reaches_training(
    store: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    moody = Moody()
    one = trained(store, 3, every=100, state=[moody])
    kept = one.weights()
    moody.error = error
    run(one, 2)
    moody.error = None
    assert kept_steps(store) == [3], "the version before is still there"
    assert "no version of step 4 in memory" in caplog.text
    assert same(state_in(store), kept)
    run(one, 2)
    assert kept_steps(store)[-1] == 7
    one.ckpt.close(save=False)


def test_a_snapshot_that_fails_after_its_copies_began_completes_them(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They go on otherwise, into memory that the next snapshot takes, and no later copy can track writes."""
    one = trained(store, 3, every=100)
    begun = list[AsyncCopy]()
    start = CopyTiming.start

    def fails_late(timing: CopyTiming, copying: AsyncCopy) -> None:
        start(timing, copying)
        begun.append(copying)
        raise RuntimeError("no stream")

    with monkeypatch.context() as patched:
        patched.setattr(CopyTiming, "start", fails_late)
        run(one, 2)
    assert "no version of step 4 in memory: no stream" in caplog.text
    tracker = write_tracker()
    assert begun and all(one._done for one in begun)
    assert tracker is None or not tracker.in_use.locked()
    run(one, 2)
    assert kept_steps(store)[-1] == 7
    one.ckpt.close(save=False)


def test_refused_again_and_again_it_goes_off_and_leaves_the_last_version(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    moody = Moody()
    one = trained(store, 3, every=100, state=[moody])
    kept = one.weights()
    moody.error = StorageError("broken for good")
    run(one, 8)
    assert one.metric("driftpoint_memory_on") == 0 and "broken for good" in caplog.text
    moody.error = None
    run(one, 2)
    assert kept_steps(store) == [3]
    assert len(list((store.parent / "shm").rglob("*.payload"))) == 1
    abandoned(one)
    two = Job(store, every=100, memory=memory(store), state=[Moody()])
    assert two.ckpt.resume() == 3
    assert same(two.weights(), kept)
    two.ckpt.close()
    assert not list((store.parent / "shm").rglob("rank-*"))


def test_memory_that_is_removed_under_it_goes_off(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By a cleaner of /dev/shm, say: what the background thread writes is refused then, for ever."""
    one = trained(store, 3)
    shutil.rmtree(tier_of(store).home)
    run(one, 8)
    assert caplog.text.count("the memory tier is off") == 1 and caplog.text.count("no version of step") == 3
    assert one.metric("driftpoint_memory_on") == 0.0
    one.ckpt.close(save=False)
    assert [save.step for save in catalog_of(store).saves()] == [8, 4]


def test_off_it_is_given_back_at_the_end(store: Path) -> None:
    moody = Moody()
    one = trained(store, 3, every=100, state=[moody])
    moody.error = StorageError("broken for good")
    run(one, 8)
    moody.error = None
    one.ckpt.save(wait=True)
    one.ckpt.close(save=False)
    assert not list((store.parent / "shm").rglob("rank-*"))


def test_memory_that_cannot_be_mapped_is_a_version_less(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grown = [torch.zeros(10)]

    class Grown:
        def state_dict(self) -> dict[str, Any]:
            return {"x": grown[0]}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            grown[0] = state["x"]

    one = trained(store, 3, every=100, state=[Grown()])
    real = mmap.mmap

    def refused(*_: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refused)
        grown[0] = torch.zeros(1_000_000)
        run(one, 1)
    assert mmap.mmap is real
    assert kept_steps(store) == [3] or kept_steps(store) == [2, 3]
    run(one, 2)
    assert kept_steps(store)[-1] == 6
    one.ckpt.close(save=False)


def test_a_record_that_cannot_be_removed_stays_out_of_training(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder stands where a record should be removed: at a failed version, and at giving back."""
    one = trained(store, 3, every=100)
    with torch.no_grad():
        one.model.head.weight[0, 0] = float("nan")
    one.step()
    settled(one)
    (blocked,) = (path for slot in (0, 1) if not (path := place_of(store).record(0, slot)).exists())
    blocked.mkdir()
    (blocked / "x").touch()
    run(one, 4)
    assert "memory" in caplog.text
    one.ckpt.close(save=False)
    assert blocked.exists()


@pytest.mark.needs_root
def test_a_folder_of_others_turns_it_off_and_says_so(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = memory(store)
    (store.parent / "shm" / f"driftpoint-{os.getuid()}").mkdir(mode=0o777)
    (store.parent / "shm" / f"driftpoint-{os.getuid()}").chmod(0o777)
    one = Job(store, every=4, memory=settings)
    assert one.ckpt.resume() == 0
    assert one.metric("driftpoint_memory_on") == 0
    assert f"driftpoint-{os.getuid()}" in caplog.text
    run(one, 5)
    one.ckpt.close(save=False)
    assert open_catalog(LocalFiles(store)).saves()[0].step == 4


# ---- little room


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "small", "6m") as place:
        yield place


WIDE = 320
"""The model has 3.8 MB of state: with a margin, one version fits into 6 MB, and two do not."""


@pytest.mark.needs_root
def test_without_room_the_store_alone_goes_on(store: Path, small: Path, caplog: pytest.LogCaptureFixture) -> None:
    shared = {"enabled": True, "every": 1, "path": str(small)}
    one = Job(store, every=4, memory=shared, width=WIDE)
    assert one.ckpt.resume() == 0
    run(one, 7)  # the optimizer has no state at first, and so there was room for what was known to be needed
    assert one.metric("driftpoint_memory_on") == 0 and "versions: 1" in caplog.text
    one.ckpt.close(save=False)
    assert not list(small.rglob("rank-*"))
    assert open_catalog(LocalFiles(store)).saves()[0].step == 4


@pytest.mark.needs_root
def test_one_version_survives_one_restart_after_the_other(store: Path, small: Path) -> None:
    """Room for one payload and not for two: what the job stands on is replaced by its own first version."""
    shared = {"enabled": True, "every": 1, "path": str(small), "versions": 1}
    at, kept = 0, None
    for _ in range(4):
        one = Job(store, every=100, memory=shared, width=WIDE)
        assert one.ckpt.resume() == at
        assert kept is None or same(one.weights(), kept)
        run(one, 3)
        kept, at = one.weights(), at + 3
        assert one.metric("driftpoint_memory_on") == 1
        abandoned(one)
    last = Job(store, every=100, memory=shared, width=WIDE)
    assert last.ckpt.resume() == at
    last.ckpt.close()
    assert not list(small.rglob("rank-*"))


# ---- ends


def test_memory_stays_until_the_save_under_way_is_committed(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while close() waits for the disk, the job must not have thrown its newest state away."""
    monkeypatch.setattr(Config, "shares_memory", lambda _: False)  # the save is no version in memory
    one = trained(store, 7)
    blocked, released = threading.Event(), threading.Event()

    def wait(_: str, path: str) -> None:
        if "segments" in path:
            blocked.set()
            assert released.wait(60)

    one.hook().before = wait
    one.step(flush=False)
    assert blocked.wait(60)
    closing = threading.Thread(target=one.ckpt.close)
    closing.start()
    closing.join(1.0)
    assert closing.is_alive()
    assert kept_steps(store)[-1] == 7, "as long as it is the newest state that there is"
    released.set()
    closing.join(60)
    assert not list((store.parent / "shm").rglob("rank-*"))
    assert open_catalog(LocalFiles(store)).saves()[0].step == 8


def test_a_job_that_kept_nothing_itself_gives_back_what_it_began_with(store: Path) -> None:
    killed_at(store, 7)
    two = Job(store, every=4, memory=memory(store))
    assert two.ckpt.resume() == 7
    two.ckpt.close()
    assert not list((store.parent / "shm").rglob("rank-*"))


def test_after_an_error_memory_stays(store: Path) -> None:
    one = Job(store, every=4, memory=memory(store))
    kept = {}
    with pytest.raises(ZeroDivisionError), one.ckpt:
        one.ckpt.resume()
        run(one, 7)
        kept = one.weights()
        raise ZeroDivisionError
    two = Job(store, every=4, memory=memory(store))
    assert two.ckpt.resume() == 7
    assert same(two.weights(), kept)
    two.ckpt.close(save=False)


def test_a_version_that_is_not_finished_when_the_job_goes_back_is_not_written_over(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The background thread is slow, and close timeouts short: its payload must not be used before it is done."""
    one = Job(store, every=100, memory=memory(store), timeouts={"close": 0.0})
    one.ckpt.resume()
    for _ in range(4):
        one.step(flush=False)
        settled(one)
    begun, go_on = threading.Event(), threading.Event()
    real = monitor.memory.tier.seal_snapshot

    def slow(version: Any) -> float:
        begun.set()
        assert go_on.wait(60)
        return real(version)

    monkeypatch.setattr(monitor.memory.tier, "seal_snapshot", slow)
    one.step(flush=False)
    assert begun.wait(60)
    monkeypatch.setattr(monitor.memory.tier, "seal_snapshot", real)
    assert one.ckpt.resume() == 4
    for _ in range(3):
        one.step(flush=False)
    go_on.set()
    settled(one)
    for _ in range(3):
        one.step(flush=False)
        settled(one)
    kept = one.weights()
    assert same(state_in(store), kept)
    abandoned(one)
    two = Job(store, every=100, memory=memory(store))
    assert two.ckpt.resume() == 10
    assert same(two.weights(), kept)
    two.ckpt.close(save=False)


def test_the_arena_is_let_go_of_even_where_it_cannot_be_given_back(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = trained(store, 3)
    real = Arena.close

    def close(arena: Arena, *, remove: bool, **more: bool) -> None:
        real(arena, remove=False, **more)
        raise StorageError(f"cannot remove anything, remove={remove}")

    monkeypatch.setattr(Arena, "close", close)
    one.ckpt.close(save=False)
    assert "cannot remove anything" in caplog.text


def test_what_a_job_came_back_for_is_not_old_any_more(store: Path) -> None:
    """After a weekend: only the first restart would find it, and cleaning would take it from under that one."""
    kept = killed_at(store, 6)
    weekend_ago = time.time() - 2.5 * 24 * 3600
    for path in place_of(store).folder.iterdir():
        os.utime(path, (weekend_ago, weekend_ago))
    two = Job(store, every=4, memory=memory(store))
    assert two.ckpt.resume() == 6
    clear_old(store.parent / "shm")  # as the daemon of the node does
    abandoned(two)
    three = Job(store, every=4, memory=memory(store))
    assert three.ckpt.resume() == 6 and same(three.weights(), kept)
    three.ckpt.close(save=False)


# ---- one identity, two stores


def test_a_copy_of_the_store_and_its_jobs_are_another_history(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What a job on a copy kept is newer than everything here, and has the store's identity."""
    kept = killed_at(store, 6)
    copy = store.parent / "copy"
    shutil.copytree(store, copy)
    two = Job(copy, every=4, memory=memory(store), resume={"at": "newest"})
    assert two.ckpt.resume() == 6 and same(two.weights(), kept)
    run(two, 9)
    abandoned(two)
    assert kept_steps(store)[-1] == 15

    one = Job(store, every=4, memory=memory(store), resume={"at": "newest"})
    assert one.ckpt.resume() == 4 and sources(one) == {""}
    assert "on a copy of this store" in caplog.text
    run(one, 1)
    one.ckpt.close(save=False)


def test_a_store_that_was_restored_knows_nothing_of_the_epochs_since(store: Path) -> None:
    """The next job there claims their numbers anew, and finds their versions under its own."""
    first = Job(store, every=4)
    for _ in range(4):
        first.step()
    first.ckpt.close(save=False)
    shutil.copytree(store, store.parent / "backup")
    killed_at(store, 6)
    assert kept_steps(store)[-1] == 10
    shutil.rmtree(store)
    shutil.copytree(store.parent / "backup", store)

    again = Job(store, every=4, memory=memory(store), resume={"at": "newest"})
    assert again.ckpt.resume() == 4 and sources(again) == {""}
    run(again, 3)
    abandoned(again)
    last = Job(store, every=4, memory=memory(store), resume={"at": "newest"})
    assert last.ckpt.resume() == 7 and sources(last) == {"memory"}
    last.ckpt.close(save=False)


# ---- what dead jobs of other stores left


def test_memory_of_dead_jobs_of_other_stores_is_told_with_the_command_that_frees_it(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed_at(store, 6)
    left, living = tier_of(store), trained(store.parent / "living", 2, memory=memory(store))
    caplog.clear()
    other = trained(store.parent / "other", 2, memory=memory(store))
    told = [text for text in caplog.messages if "dead jobs of other stores" in text]
    freed = sum(path.stat().st_blocks * 512 for place in left.generations() for path, *_ in place.files())
    assert len(told) == 1 and f"{left.store_id} ({freed / 1e6:.1f} MB)" in told[0]
    assert f"driftpoint memory clear ID --memory {left.base}" in told[0]
    assert tier_of(store.parent / "living").store_id not in told[0], "its job lives"
    assert kept_steps(store)[-1] == 6, "it may be the newest state of its job"
    living.ckpt.close()
    other.ckpt.close()
    caplog.clear()
    assert cleanup.clear(left) == freed
    trained(store.parent / "other", 2, memory=memory(store)).ckpt.close()
    assert "dead jobs of other stores" not in caplog.text
