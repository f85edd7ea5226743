"""After ``close()``, no thread of the checkpointer's process groups is left.

One that still holds a tensor when the interpreter ends aborts the process: a job that is complete would fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import ENVIRONMENT, WORKERS, torchrun

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads in /proc"),
]


@pytest.mark.parametrize("how", ["close", "late", "after the job's group"])
def test_they_end(tmp_path: Path, how: str) -> None:
    done = torchrun("group_threads.py", 2, {"how": how}, tmp_path)
    assert done.code == 0, done.output[-6000:]
    for rank in range(2):
        told = done.one(f"ended {rank}")
        assert told["after"] <= told["before"] < told["during"]


@pytest.mark.parametrize("seconds", [0.3, 2.5])
def test_a_rank_that_ends_before_another_takes_its_last_step_ends_well(tmp_path: Path, seconds: float) -> None:
    """In the middle of the interpreter's end, the sum that it waited for is there."""
    script = WORKERS / "late_rank.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    command += [str(tmp_path / "store"), str(seconds)]
    environment = {**os.environ, **ENVIRONMENT}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
