"""Memory that is removed at the moment at which a job begins to use it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from store.memory.arena import Arena, boot_seconds, is_owned
from store.memory.cleanup import KEEP_SECONDS, clear_old
from store.memory.layout import Tier
from store.names import SaveId
from store.session import locking_process
from tests.support.made_versions import NBYTES, abandon, keep, tier_at, values, wanted
from tests.support.processes import living, script


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return tier_at(tmp_path / "shm")


def test_a_job_that_begins_between_the_look_and_the_removal_keeps_its_memory(tier: Tier) -> None:
    """A cleanup asks for the time after it saw that no process lives, and then removes."""
    arena = Arena(tier, 1, 0)
    keep(arena, 0, SaveId(4, 1))
    abandon(arena)
    with ExitStack() as stack:
        begun: list[int] = []

        def clock() -> float:
            if not begun:
                begun.append(stack.enter_context(living(tier, SaveId(9, 1))).pid)
            return boot_seconds() + 2 * KEEP_SECONDS

        clear_old(tier.base, clock=clock)
        assert begun
        assert values(tier, SaveId(9, 1)) == wanted(SaveId(9, 1))
        assert locking_process(tier.generation(1).owner(0)) == begun[0], "its lock is on a file that has no name"


_SLOW_CLEANUP = """
import sys, time
from pathlib import Path
from store.memory import cleanup
from store.memory.layout import Tier
unlink = cleanup._unlink
def slow(path):
    if path.name.endswith("owner"):
        print("removing", flush=True)
        time.sleep(0.3)
    return unlink(path)
cleanup._unlink = slow
cleanup.clear(Tier(Path(sys.argv[1]), sys.argv[2]))
print("removed", flush=True)
sys.stdin.read()
"""


def test_a_job_that_begins_during_a_removal_has_a_lock_that_is_seen(tier: Tier) -> None:
    arena = Arena(tier, 1, 0)
    keep(arena, 0, SaveId(4, 1))
    abandon(arena)
    with script(_SLOW_CLEANUP, tier.base, tier.store_id) as (process, line):
        assert line == "removing\n"
        arena = Arena(tier, 1, 0)
        keep(arena, 0, SaveId(5, 1))
        assert process.stdout is not None and process.stdout.readline() == "removed\n"
        record, payload = arena.files(0)
        assert record.parent == tier.generation(1).folder and payload.stat().st_size >= NBYTES
        assert is_owned(tier.generation(1).owner(0)) and tier.generation(1).owner(0).exists()
        assert values(tier, SaveId(5, 1)) == wanted(SaveId(5, 1))
        arena.close(remove=True)
