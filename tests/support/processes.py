"""Other processes that tests need beside them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from store.memory.layout import Tier
from store.names import SaveId
from tests.support.cli import environment

_HOLD = """
import sys
from pathlib import Path
from store.session import StoreLock
lock = StoreLock(Path(sys.argv[1]), wait_seconds=0)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def script(code: str, *words: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that runs ``code`` and ends with its input, or killed at the end of the block; and its first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.wait(timeout=180)
        process.stdin.close()
        process.stdout.close()


@contextmanager
def holding_lock(root: Path) -> Iterator[int]:
    """A process that holds the store's lock for the time of the block; gives its id."""
    with script(_HOLD, root) as (process, line):
        assert line == "held\n"
        yield process.pid
        process.stdin.close()  # type: ignore[union-attr]
        process.wait(timeout=180)


_KEEP = """
import sys
from pathlib import Path
from store.memory.arena import Arena
from store.memory.layout import Tier
from store.names import SaveId
from tests.support.made_versions import keep
base, store_id, epoch, rank, world, step = sys.argv[1:]
arena = Arena(Tier(Path(base), store_id), int(epoch), int(rank))
keep(arena, 0, SaveId(int(step), int(epoch)), int(rank), int(world))
print("kept", flush=True)
sys.stdin.read()
"""


@contextmanager
def living(tier: Tier, save: SaveId, rank: int = 0, world: int = 1) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a version of its own for the time of the block, unless it is killed before."""
    with script(_KEEP, tier.base, tier.store_id, save.epoch, rank, world, save.step) as (process, line):
        assert line == "kept\n"
        yield process
