"""SIGKILL at every system call of keeping a version in memory, of taking memory over and of giving it back.

Afterwards the newest version that all ranks were known to have is still found, or a newer one is, and every version
that is found reads back bit for bit; and the next incarnation goes on and leaves nothing behind.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from store.memory.index import scan_node
from store.memory.layout import Tier
from store.names import SaveId
from store.storage.local import LocalFiles
from tests.crash.memory_workload import Keeper, prepared
from tests.crash.runs import EXIT_TYPED_ERROR, Outcome, Zygote
from tests.support.made_versions import STORE, wanted, whole
from tests.support.mounts import shared_memory

pytestmark = pytest.mark.slow

CALLS = ("openat", "mkdir", "mkdirat", "ftruncate", "truncate", "fallocate", "mmap", "write", "rename", "renameat",
         "renameat2", "unlink", "unlinkat", "rmdir", "fcntl", "close")  # fmt: skip
TRACE = f"trace={','.join(f'?{name}' for name in CALLS)}"


@dataclass
class Place:
    """Where runs happen, on a fresh copy of what a dead job left."""

    zygote: Zygote
    folder: Path

    @property
    def tier(self) -> Tier:
        return Tier(self.folder / "store", STORE)

    def run(self, scenario: str, *inject: str) -> Outcome:
        shutil.rmtree(self.folder / "store", ignore_errors=True)
        (self.folder / "journal").unlink(missing_ok=True)
        if scenario != "memory-keeps":
            shutil.copytree(self.folder / "base", self.folder / "store")
        options = ["-f", "-o", str(self.folder / "trace"), "-e", TRACE]
        options += [word for rule in inject for word in ("-e", f"inject={rule}")]
        return self.zygote.traced(scenario, self.folder / "store", self.folder / "journal", options)

    def calls(self, scenario: str) -> Counter[str]:
        outcome = self.run(scenario)
        assert outcome.code == 0, outcome
        return self.made()

    def made(self) -> Counter[str]:
        """System calls of the last run."""
        return Counter(re.findall(r"^\d+ +(\w+)\(", (self.folder / "trace").read_text(), re.MULTILINE))

    def check(self, scenario: str, outcome: Outcome) -> None:
        found = whole(self.tier)
        for save, value in found.items():
            world = {"memory-shrinks": 1, "memory-grows": 3}.get(scenario, 2) if save.epoch > 1 else 2
            assert value == wanted(save, world), save
        # Hashes would find a payload that is overwritten while its record stands; that it never is, is the arena's.
        told = scan_node(self.tier).versions.items()
        assert {save for save, held in told if len(held) == held[min(held)].record.part.world_size} == set(found)
        closing = any(event["event"] == "closing" for event in outcome.events)
        promised = [SaveId.parse(event["save"]) for event in outcome.events if event["event"] == "whole"]
        if scenario != "memory-keeps":
            promised.insert(0, SaveId(4, 1))
        if promised and not closing:
            assert found and max(found) >= promised[-1], (promised[-1], sorted(found), scan_node(self.tier).problems)
        self.goes_on(max(found, default=None))

    def goes_on(self, newest: SaveId | None) -> None:
        """The next incarnation stands on what was found, keeps versions, and gives everything back."""
        tier = prepared(LocalFiles(self.folder / "store"))
        job = Keeper(tier, 20, None)
        assert job.stands == newest
        assert newest is None or newest in whole(tier)
        for step in (60, 61, 62):
            save = job.keep(step)
            assert whole(tier)[save] == wanted(save, 2)
        job.close()
        assert [path.name for path in tier.base.rglob("*") if path != tier.home] == ["piece"]


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: kills at system calls are NOT tested (apt-get install strace)")
    with shared_memory("driftpoint-memory-sweep-") as folder, Zygote() as zygote:
        place = Place(zygote, folder)
        try:
            assert place.run("memory-keeps").code == 0
        except OSError as error:
            pytest.skip(f"strace may not attach: kills at system calls are NOT tested ({error})")
        shutil.copytree(folder / "store", folder / "base")
        yield place


SCENARIOS = {"memory-keeps": 1, "memory-takes": 1, "memory-shrinks": 3, "memory-grows": 5, "memory-closes": 1}
NEEDED = {
    "memory-keeps": {"ftruncate", "fallocate", "rename", "truncate"},
    "memory-takes": {"rename", "unlink", "rmdir", "truncate"},
    "memory-shrinks": {"rename", "unlink", "rmdir"},
    "memory-grows": {"rename", "unlink", "rmdir"},
    "memory-closes": {"unlink", "rmdir"},
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_every_system_call(place: Place, scenario: str) -> None:
    calls = place.calls(scenario)
    assert {name if calls[name] else f"{name}at" for name in NEEDED[scenario]} <= set(calls), calls
    survived = 0
    for name, count in calls.items():
        for nth in range(1, count + 1, SCENARIOS[scenario]):
            outcome = place.run(scenario, f"{name}:signal=SIGKILL:when={nth}")
            if outcome.code == 0 and place.made()[name] < nth:
                survived += 1  # how often memory is looked at before it is taken differs by a call or two
            else:
                assert outcome.code == -9, (name, nth, outcome)
            place.check(scenario, outcome)
    assert survived <= 0.05 * calls.total()


FAULTS = ["fallocate:error=ENOSPC", "ftruncate:error=ENOSPC", "write:error=ENOSPC", "rename:error=EIO",
          "unlink:error=EROFS", "mmap:error=ENOMEM", "fcntl:error=ENOLCK"]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("scenario", ["memory-keeps", "memory-takes"])
def test_a_refused_system_call_is_a_typed_error(place: Place, scenario: str, fault: str) -> None:
    """No room, no memory, a broken or read-only filesystem: typed, and what was whole stays."""
    name, _, rule = fault.partition(":")
    calls = place.calls(scenario)
    made = name if calls[name] else f"{name}at"
    codes = set()
    for nth in range(1, calls[made] + 1, max(1, calls[made] // 8)):
        outcome = place.run(scenario, f"{made}:{rule}:when={nth}")
        codes.add(outcome.code)
        if outcome.code == EXIT_TYPED_ERROR:
            assert outcome.events[-1]["kind"] == "StorageError", (nth, outcome.events[-1])
        else:
            assert outcome.code == 0, (nth, outcome)
        place.check(scenario, outcome)
    assert codes <= {0, EXIT_TYPED_ERROR}
