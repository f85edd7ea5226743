"""A preempted job does not say that nothing is saved while its last save may still become a commit."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from store.catalog import open_catalog
from store.storage.local import LocalFiles
from tests.support.jobs import Job


@pytest.mark.parametrize("late", [True, False])
def test_a_save_that_is_committed_while_the_process_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, late: bool
) -> None:
    one = Job(tmp_path / "store", every=1, preemption={"grace_seconds": 1.0, "exit": False})
    one.step()
    assert one.ckpt.metrics is not None
    released = threading.Event()

    def before(operation: str, path: str) -> None:
        if operation == "link" and path.startswith("manifests/"):
            released.wait(60)

    files = one.hook()
    files.before = before
    if not late:
        released.set()
    caplog.set_level("INFO")
    one.ckpt.preempt()
    one.update()
    report = one.ckpt.step()
    said = caplog.text
    released.set()
    caplog.clear()
    one.ckpt.close()
    assert report is not None and report.preempted
    assert max(open_catalog(LocalFiles(tmp_path / "store")).saves()).step == 2
    assert "nothing new is saved" not in said
    if late:
        assert "step 2 is not committed yet: not enough time; the newest commit is that of step 1" in said
        assert "preempted: committed step 2" in caplog.text
    else:
        assert "preempted: full save of step 2 committed" in said
