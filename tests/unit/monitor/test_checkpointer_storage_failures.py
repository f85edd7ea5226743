"""Storage fails or hangs during a save: training continues, and earlier commits stay intact."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from monitor import background
from monitor.save import save_task
from monitor.save.save_task import SaveTask
from store.catalog import open_catalog
from store.errors import NoSpaceError, StorageError
from store.names import Unit
from store.session import require_newest
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.internals import saver_of
from tests.support.jobs import LAYERS, committed_steps, job, same, skip_reason


def raise_if_writing(operation: str, path: str) -> None:
    if operation == "write":
        raise StorageError(f"cannot write {path}: the filesystem is full")


def test_the_segment_of_a_failed_save_is_removed(store: Path) -> None:
    with job(store) as one:
        one.step()
        files = one.hook()
        files.before = lambda operation, path: (
            raise_if_writing(operation, path) if path.endswith("rank-00000.json") else None
        )
        one.step()
        one.step()
        assert one.metric("driftpoint_failures_total", reason="StorageError") == 1
        files.before = lambda operation, path: None
        one.ckpt.flush()
        one.step()
        assert sorted(path.name[:8] for path in (store / "segments").iterdir()) == ["00000001", "00000004"]


def test_a_failed_save_is_told_at_the_next_step(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not at the next decision, which may be hours later, or never."""
    with job(store, every=2) as one:
        one.hook().before = raise_if_writing
        for _ in range(2):
            one.step()
        assert one.step() is None
        assert one.metric("driftpoint_failures_total", reason="StorageError") == 1
        assert one.metric("driftpoint_saves_failed_in_a_row") == 1
        assert "the save of step 2 failed" in caplog.text


def test_segments_stay_if_the_manifest_was_linked_but_not_synced(store: Path) -> None:
    """The fsync of the directory fails after the link, so the commit may exist although it was not acknowledged."""

    def unsynced(operation: str, path: str) -> None:
        if operation == "sync_dir" and path == "manifests" and (store / "manifests/00000002-000001.json").exists():
            raise StorageError("cannot fsync manifests: the device reported an I/O error")

    with job(store) as one:
        one.step()
        files = one.hook()
        files.before = unsynced
        one.step()
        files.before = lambda operation, path: None
        one.update()
        one.ckpt.step()
        assert one.metric("driftpoint_failures_total", reason="StorageError") == 1
        saved = one.weights()
    assert committed_steps(store) == [1, 2, 3]
    with job(store) as other:
        assert other.ckpt.resume() == 3
        assert same(other.weights(), saved)
    assert all(commit.state == "ok" for commit in verify(open_catalog(LocalFiles(store))).commits)


@pytest.mark.parametrize("policy", ["full", {"name": "threshold", "threshold": 0.0}])
def test_a_full_disk_fails_saves_and_training_continues(store: Path, policy: object) -> None:
    with job(store, policy=policy) as one:
        one.step()
        files = one.hook()
        files.before = raise_if_writing
        for _ in range(3):
            report = one.step()
            assert report is not None and report.skipped is None
        assert one.metric("driftpoint_failures_total", reason="StorageError") == 2
        files.before = lambda operation, path: None
        one.step()
        saved = one.weights()
    assert committed_steps(store) == [1, 5]
    with job(store) as other:
        assert other.ckpt.resume() == 5
        assert same(other.weights(), saved)


def test_drift_is_relative_to_the_last_commit_after_failed_saves(store: Path) -> None:
    """Failed saves do not move the reference."""
    with job(store, policy={"name": "threshold", "threshold": 1e9}) as one:
        one.step()
        committed = one.weights()
        files = one.hook()
        files.before = raise_if_writing
        assert skip_reason(one.step()) == "nothing"
        one.ckpt.save(wait=True, strict=False)
        assert one.metric("driftpoint_failures_total", reason="StorageError") == 1
        report = one.step()
        assert report is not None
        drift = {stat.unit: stat.drift for stat in report.stats}
        now = one.weights()
    for layer in LAYERS:
        names = [name for name in now if name.startswith(f"{layer}.") and name.endswith("/fp32")]
        moved = sum((now[name] - committed[name]).double().square().sum() for name in names)
        size = sum(committed[name].double().square().sum() for name in names)
        assert drift[Unit(layer, "fp32")] == pytest.approx(float((moved / size) ** 0.5), rel=1e-5)


def test_step_does_not_wait_for_a_hanging_disk(store: Path) -> None:
    go_on = threading.Event()
    with job(store, timeouts={"close": 0.2}) as one:
        one.step(flush=False)
        assert saver_of(one.ckpt)._writer.join(180)  # flush() waits for 0.2 s, and the disk may be slower
        files = one.hook()
        files.before = lambda operation, path: None if operation != "write" else wait_for(go_on)
        assert skip_reason(one.step(flush=False)) is None
        assert [skip_reason(one.step(flush=False)) for _ in range(5)] == ["busy"] * 5
        assert one.metric("driftpoint_saves_skipped_total", reason="busy") == 5
        one.ckpt.close(save=False)
        assert one.metric("driftpoint_failures_total", reason="close_timeout") == 1
        assert committed_steps(store) == [1]
        go_on.set()
    with job(store) as other:
        assert other.ckpt.resume() in (1, 2)


def wait_for(event: threading.Event) -> None:
    assert event.wait(180)


def test_failure_to_mark_a_commit_proven_is_reported(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    with job(store) as one:
        one.step()
    with job(store, every=10) as other:
        other.ckpt.resume()
        other.hook().before = raise_if_writing
        other.step()
        assert other.metric("driftpoint_failures_total", reason="upkeep") == 1
    assert "marking the commit proven failed" in caplog.text
    assert open_catalog(LocalFiles(store)).proven() == set()


def test_failure_to_prune_is_reported_and_commits_stay(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    def stuck(operation: str, path: str) -> None:
        if operation == "unlink" and path.startswith("manifests/0"):
            raise StorageError(f"cannot unlink {path}: the device reported an I/O error")

    with job(store, retention={"keep_last": 1, "log_spaced": False}) as one:
        one.step()
        one.hook().before = stuck
        one.step()
        one.step()
        assert one.metric("driftpoint_failures_total", reason="upkeep") == 2
        assert one.metric("driftpoint_last_commit_step") == 2
    assert "tidying up after the commit of step 2 failed: pruning stopped" in caplog.text
    assert committed_steps(store) == [1, 2, 3]


def test_room_made_while_the_job_renews_its_own_epoch_is_no_fence(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    began, renewed, went_on = threading.Event(), threading.Event(), threading.Event()

    def full(operation: str, path: str) -> None:
        if operation == "write" and path.startswith("segments"):
            raise NoSpaceError(f"cannot write {path}: the filesystem is full")

    with job(store) as one:
        one.step()
        files = one.hook()
        files.before = full
        one.step()

        def waits(task: SaveTask, epoch: int) -> None:
            began.set()
            assert renewed.wait(60)
            require_newest(task.files, epoch)
            went_on.set()

        save_task.make_room, original = waits, save_task.make_room

        def until_it_makes_room(operation: str, path: str) -> None:
            if path.startswith("epochs") and threading.current_thread() is threading.main_thread():
                background._held.hand_over()  # as if the decision before had submitted it
                wait_for(began)

        try:
            files.before = until_it_makes_room
            one.ckpt._step = 1  # rolled back, as a framework's own load does: the next save renews the epoch
            one.ckpt.save()
            assert one.ckpt._saver._session.epoch == 2
            renewed.set()
            one.ckpt.flush()
        finally:
            save_task.make_room = original
        one.ckpt.flush()
    assert "took it over" not in caplog.text and "making room" not in caplog.text
    assert not went_on.is_set()
