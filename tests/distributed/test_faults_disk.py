"""Real disks that fill up, vanish, are read-only, or limit a file's size, under a job in this process: training goes on
to the end, the trouble is told, what was committed stays, and when there is room again saves come about.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from store.errors import StorageError
from tests.support.jobs import Job, job, same
from tests.support.launch import alone
from tests.support.mounts import fill, tmpfs
from tests.support.stores import intact_steps

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small filesystem")
WIDTH = 128
"""A commit of this job takes 0.6 MiB."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 3 MiB."""
    with tmpfs(tmp_path / "disk", "3m") as place:
        yield place


@pytest.mark.needs_root
@ROOT_ONLY
@pytest.mark.parametrize("leave", [0, 4096, 300_000])
def test_a_disk_that_fills_up_and_is_freed(disk: Path, leave: int, caplog: pytest.LogCaptureFixture) -> None:
    store = disk / "store"
    with job(store, width=WIDTH, retention={"keep_last": 1, "log_spaced": False}) as one:
        one.step()
        ballast = fill(disk, leave)
        for _ in range(4):
            one.step()
        assert one.metric("driftpoint_failures_total", reason="NoSpaceError") >= 3
        assert any(record.levelno >= logging.WARNING for record in caplog.records)
        assert intact_steps(store) == [1]
        ballast.unlink()
        one.ckpt.flush()
        one.step()
        saved = one.weights()
    assert intact_steps(store) == [6]
    with job(store, width=WIDTH) as other:
        assert other.ckpt.resume() == 6
        assert same(other.weights(), saved)


@pytest.mark.needs_root
@ROOT_ONLY
def test_failed_saves_do_not_eat_the_disk(disk: Path) -> None:
    """Room for a commit and a half: every save fails, and leaves as much room as there was."""
    store = disk / "store"
    with job(store, width=WIDTH, trace={"path": str(disk.parent / "trace.jsonl")}) as one:  # it grows meanwhile
        one.step()
        ballast = fill(disk, 400_000)
        room = os.statvfs(disk).f_bavail
        for _ in range(5):
            one.step()
        one.ckpt.save(wait=True, strict=False)
        one.ckpt.flush()
        assert one.metric("driftpoint_failures_total", reason="NoSpaceError") == 6
        assert os.statvfs(disk).f_bavail == room - 1  # the record of the epoch that save() claimed
        ballast.unlink()
    assert [path.name[:8] for path in (store / "segments").iterdir() if any(path.iterdir())] == ["00000001"]


def test_a_store_that_is_deleted_under_the_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = tmp_path / "store"
    with job(store, width=WIDTH) as one:
        one.step()
        store.rename(tmp_path / "elsewhere")
        for _ in range(3):
            report = one.step()
            assert report is not None and report.skipped is None
        assert one.metric("driftpoint_failures_total", reason="StorageError") == 2
        assert not store.exists()
        (tmp_path / "elsewhere").rename(store)
        one.step()
    assert "the newest commit is that of step 1" in caplog.text
    assert intact_steps(store) == [1, 5]


@pytest.mark.needs_root
@ROOT_ONLY
def test_a_store_on_a_read_only_disk_is_refused(disk: Path) -> None:
    with job(disk / "store", width=WIDTH) as one:
        one.step()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    for place in ("store", "new"):
        with pytest.raises(StorageError, match=re.escape(str(disk / place))):
            Job(disk / place, width=WIDTH)
    assert intact_steps(disk / "store") == [1]


@pytest.mark.needs_root
@ROOT_ONLY
def test_observing_a_store_on_a_read_only_disk(disk: Path) -> None:
    with job(disk / "store", width=WIDTH) as one:
        one.step()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with job(disk / "store", width=WIDTH, policy={"name": "observe"}) as other:
        assert other.ckpt.resume() == 1
        other.step()


@pytest.mark.slow
def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    done = alone("faults_file_limit.py", {}, tmp_path)
    assert done.code == 0, done.output[-4000:]
    end = done.one("end")
    assert end["failures"] == 3
    assert end["commits"] == [1, 5]
