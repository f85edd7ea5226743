"""A disk that is full, under jobs in this process: retention gives way until saves come about again, a job starts on a
full disk and saves once there is room, and what cannot be freed is told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from store.catalog import open_catalog
from store.errors import NoSpaceError
from store.names import SaveId, segment_dir
from store.session import claim_epoch, newest_epoch
from store.storage.local import LocalFiles
from tests.support.hooked import nothing
from tests.support.jobs import Job, job, same
from tests.support.mounts import fill, tmpfs
from tests.support.stores import intact_steps

pytestmark = [
    pytest.mark.needs_root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small filesystem"),
]
SMALL: dict[str, Any] = {"width": 128, "trace": {"enabled": False}}
"""A commit of this job takes 0.6 MiB."""

THREE = {"keep_last": 3, "max_share": None}

COMMIT = 650_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 3 MiB: room for four commits and a half."""
    with tmpfs(tmp_path / "disk", "3m") as place:
        yield place


@pytest.mark.parametrize("share", [None, 0.8])
def test_a_rule_that_keeps_more_than_there_is_room_for(
    disk: Path, share: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Room for two commits, and ``keep_last: 3``."""
    store = disk / "store"
    fill(disk, int(2.6 * COMMIT))
    with job(store, retention={"keep_last": 3, "max_share": share}, **SMALL) as one:
        one.ckpt.resume()
        for _ in range(8):
            one.step()
        saved = one.weights()
    assert intact_steps(store)[-1] == 8
    assert one.metric("driftpoint_failures_total", reason="NoSpaceError") == 0
    assert "deleted the commits of steps 1, which `retention:` keeps otherwise" in caplog.text
    with job(store, **SMALL) as other:
        assert other.ckpt.resume() == 8
        assert same(other.weights(), saved)


def test_a_disk_that_others_fill(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The next save fails, and those after it have the room of the oldest commits."""
    store = disk / "store"
    with job(store, retention=THREE, **SMALL) as one:
        for _ in range(3):
            one.step()
        before = intact_steps(store)
        fill(disk, 4096)
        for _ in range(4):
            one.step()
        assert one.metric("driftpoint_failures_total", reason="NoSpaceError") >= 1
    assert len(before) > 1
    assert intact_steps(store)[-1] >= 6
    assert "deleted the commits of steps" in caplog.text


def test_the_commit_that_was_proven_stays(disk: Path) -> None:
    store = disk / "store"
    with job(store, **SMALL) as one:
        one.step()
    with job(store, retention=THREE, **SMALL) as two:
        assert two.ckpt.resume() == 1
        for _ in range(2):
            two.step()
        fill(disk, 4096)
        for _ in range(4):
            two.step()
    assert intact_steps(store)[0] == 1
    assert intact_steps(store)[-1] >= 5


def test_what_cannot_be_freed_is_told(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = disk / "store"
    with job(store, **SMALL) as one:
        one.step()
        fill(disk, 4096)
        for _ in range(3):
            one.step()
    assert intact_steps(store) == [1]
    assert "no more can be deleted" in caplog.text
    assert "prune" not in caplog.text


def test_a_disk_that_has_room_again_is_not_called_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A quota is not seen in advance, so something is deleted all the same."""
    store = tmp_path / "store"
    with job(store, **SMALL) as one:
        for _ in range(3):
            one.step()
        files = one.hook()

        def refuse(operation: str, path: str) -> None:
            if operation == "write":
                raise NoSpaceError(f"cannot write {path}: no space left on device")

        files.before = refuse
        one.step()
        files.before = nothing
        for _ in range(2):
            one.step()
    assert "refused a save for want of room, which its free space does not show (a quota?)" in caplog.text
    assert "too little room" not in caplog.text and "bytes more" not in caplog.text
    assert intact_steps(store)[-1] == 6


def test_a_job_starts_on_a_full_disk(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One commit, which must stay: the job resumes, trains, and saves when there is room."""
    store = disk / "store"
    with job(store, **SMALL) as one:
        one.step()
        saved = one.weights()
    ballast = fill(disk, 0)
    with job(store, **SMALL) as two:
        assert [record.levelname for record in caplog.records if "no room for the record" in record.message] == [
            "ERROR"
        ]
        assert f"driftpoint prune {store} --minimum" in caplog.text
        assert two.ckpt.resume() == 1
        assert same(two.weights(), saved)
        for _ in range(2):
            report = two.step()
            assert report is not None and report.skipped == "storage"
        assert two.metric("driftpoint_saves_skipped_total", reason="storage") == 2
        assert newest_epoch(LocalFiles(store)) == 1
        ballast.unlink()
        report = two.step()
        assert report is not None and report.skipped is None
        two.step()
    assert newest_epoch(LocalFiles(store)) == 2
    assert intact_steps(store)[-1] == 5
    assert 1 in {save.step for save in open_catalog(LocalFiles(store)).proven()}


def test_a_job_that_was_taken_over_before_it_could_claim(disk: Path) -> None:
    store = disk / "store"
    with job(store, **SMALL) as one:
        one.step()
    ballast = fill(disk, 0)
    with job(store, **SMALL) as two:
        two.ckpt.resume()
        ballast.unlink()
        files = LocalFiles(store)
        claim_epoch(files, open_catalog(files).store_id)  # a job on another machine, which is younger
        report = two.step()
        assert report is not None and report.skipped == "fenced"
    assert newest_epoch(files) == 2
    assert intact_steps(store) == [1]


def test_an_old_commit_makes_room_for_the_start(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = disk / "store"
    with job(store, retention=THREE, **SMALL) as one:
        for _ in range(3):
            one.step()
    oldest = intact_steps(store)[0]
    fill(disk, 0)
    with job(store, **SMALL) as two:
        assert f"deleted the commits of steps {oldest}, to record this start" in caplog.text
        assert two.ckpt.resume() == 3
        for _ in range(3):
            two.step()
    assert intact_steps(store)[-1] >= 5


def test_what_a_killed_save_left_makes_room_for_the_start(disk: Path) -> None:
    store = disk / "store"
    with job(store, **SMALL) as one:
        one.step()
    half = store / segment_dir(SaveId(2, 1))
    half.mkdir()
    (half / ".tmp-0123456789ab-rank-00000.safetensors").write_bytes(bytes(2 * COMMIT))
    fill(disk, 0)
    with job(store, **SMALL) as two:
        assert two.ckpt.resume() == 1
        two.step()
    assert intact_steps(store)[-1] == 2


def test_a_new_store_on_a_full_disk_is_refused(disk: Path) -> None:
    fill(disk, 0)
    with pytest.raises(NoSpaceError, match="the filesystem is full"):
        Job(disk / "store", **SMALL)


def test_memory_of_the_job_before_stays_until_the_store_is_claimed(disk: Path, tmp_path: Path) -> None:
    store, memory = disk / "store", {"enabled": True, "path": str(tmp_path), "every": 1, "stall_share": 1.0}
    with job(store, memory=memory, every=2, **SMALL) as one:
        for _ in range(3):
            one.step()
        one.ckpt.finish(clean=False)
    ballast = fill(disk, 0)
    with job(store, memory=memory, every=2, **SMALL) as two:
        step = two.ckpt.resume()
        assert step == 3
        two.step()
        ballast.unlink()
        for _ in range(3):
            two.step()
    assert intact_steps(store)[-1] >= 6
