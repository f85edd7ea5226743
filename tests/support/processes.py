"""Other processes that tests need beside them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.cli import environment

_HOLD = """
import sys
from pathlib import Path
from store.lock import StoreLock
lock = StoreLock(Path(sys.argv[1]), wait_seconds=0)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def holding_lock(root: Path) -> Iterator[int]:
    """A process that holds the store's lock for the time of the block; gives its id."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process.pid
    finally:
        process.stdin.close()
        process.wait(timeout=30)
        process.stdout.close()
