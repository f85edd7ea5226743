"""After ``close()``, no thread of the checkpointer's process groups is left.

One that still holds a tensor when the interpreter ends aborts the process: a job that is complete would fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.launch import torchrun

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
