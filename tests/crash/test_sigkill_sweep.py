"""L1: the real code, a real process, killed at every system call that changes something, and refused others.

A kill leaves all that the kernel was given, so this finds crash paths that break the store or the next job. It
can never find a missing fsync: that is L0 and L2. Runs on memory where there is some, because syncing means nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from store.catalog import open_catalog
from store.storage.local import LocalFiles
from store.weights import verify_all, weights_only_saves
from tests.crash.checker import check, promised, read_newest
from tests.crash.runs import EXIT_TYPED_ERROR, Outcome, Zygote
from tests.support.mounts import shared_memory

pytestmark = pytest.mark.slow

CHANGES = ("write", "pwrite64", "fsync", "link", "linkat", "unlink", "unlinkat", "rename", "renameat", "renameat2",
           "mkdir", "mkdirat", "rmdir")  # fmt: skip
TRACE = f"trace={','.join(f'?{name}' for name in CHANGES)}"


@dataclass
class Place:
    """Where runs happen: a base store after several saves, and a fresh copy of it for each run."""

    zygote: Zygote
    folder: Path
    base_events: Sequence[Mapping[str, Any]] = ()

    def fresh(self, scenario: str) -> Path:
        shutil.rmtree(self.folder / "store", ignore_errors=True)
        (self.folder / "journal").unlink(missing_ok=True)
        if scenario in ("save", "aged"):
            shutil.copytree(self.folder / "base", self.folder / "store")
        return self.folder / "store"

    def run(self, scenario: str, *inject: str) -> Outcome:
        store = self.fresh(scenario)
        trace = self.folder / "trace"
        options = ["-f", "-o", str(trace), "-e", TRACE, *(word for rule in inject for word in ("-e", f"inject={rule}"))]
        return self.zygote.traced(scenario, store, self.folder / "journal", options)

    def calls(self, scenario: str) -> Counter[str]:
        """How often an undisturbed run makes each call."""
        outcome = self.run(scenario)
        assert outcome.code == 0, outcome
        return Counter(re.findall(r"^\d+ +(\w+)\(", (self.folder / "trace").read_text(), re.MULTILINE))

    def check(self, scenario: str, outcome: Outcome) -> None:
        base = self.base_events if scenario in ("save", "aged") else ()
        if scenario == "aged":
            catalog = open_catalog(LocalFiles(self.folder / "store"))
            there = {*catalog.saves(), *weights_only_saves(catalog.files)}
            assert set(open_catalog(LocalFiles(self.folder / "base")).saves()) <= there, "neither commit nor weights"
            assert verify_all(catalog).ok
        if (self.folder / "store").exists():
            check(LocalFiles(self.folder / "store"), promised([*base, *outcome.events]))


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: kills at system calls are NOT tested (apt-get install strace)")
    with shared_memory("driftpoint-sweep-") as folder, Zygote() as zygote:
        place = Place(zygote, folder)
        try:
            place.base_events = place.run("several").events
        except OSError as error:
            pytest.skip(f"strace may not attach: kills at system calls are NOT tested ({error})")
        shutil.copytree(folder / "store", folder / "base")
        yield place


@pytest.mark.parametrize(
    ("scenario", "stride"),
    [pytest.param("save", 1, marks=pytest.mark.core), ("aged", 3), ("several", 9), ("varied", 9)],
)
def test_killed_at_every_system_call(place: Place, scenario: str, stride: int) -> None:
    calls = place.calls(scenario)
    assert {"write", "fsync", "rename"} <= set(calls)
    deleted = {"save": 1, "aged": 1, "several": 0, "varied": 1}
    assert calls["rmdir"] == deleted[scenario], "the prune of that save deletes groups"
    assert (calls["pwrite64"] > 0) == (scenario == "varied"), "headers are written last where sizes are not known"
    assert calls["link"] + calls["linkat"] > 5
    assert calls["unlink"] + calls["unlinkat"] > 5
    for name, count in calls.items():
        for nth in range(1, count + 1, stride):
            outcome = place.run(scenario, f"{name}:signal=SIGKILL:when={nth}")
            assert outcome.code == -9, (name, nth, outcome)
            place.check(scenario, outcome)


FAULTS = [
    ("write", "error=ENOSPC:when={}"),
    ("write", "error=ENOSPC:when={}+"),
    ("write", "error=EIO:when={}"),
    ("write", "error=EFBIG:when={}"),
    ("write", "retval=16:when={}"),
    ("write", "retval=1000000:when={}"),
    ("write", "retval=0:when={}"),
    ("fsync", "error=EIO:when={}"),
    ("fsync", "error=EIO:when={}+"),
    ("fsync", "error=ENOSPC:when={}"),
    ("mkdir", "error=ENOSPC:when={}"),
    ("link", "error=EIO:when={}"),
    ("rename", "error=EROFS:when={}"),
    ("pwrite64", "error=EIO:when={}"),
    ("pwrite64", "error=ENOSPC:when={}+"),
    ("pwrite64", "retval=0:when={}"),
]


@pytest.mark.parametrize(("name", "rule"), FAULTS, ids=[f"{name}:{rule.format('n')}" for name, rule in FAULTS])
def test_a_refused_system_call_is_a_typed_error(place: Place, name: str, rule: str) -> None:
    """EIO, a full disk, the size limit, a write that did nothing: typed, and the older commits stay as they are."""
    scenario = "varied" if name == "pwrite64" else "save"
    calls = place.calls(scenario)
    made = name if calls[name] else f"{name}at"
    stride = max(1, calls[made] // 6)
    for nth in range(1, calls[made] + 1, stride):
        outcome = place.run(scenario, f"{made}:{rule.format(nth)}")
        assert outcome.code == EXIT_TYPED_ERROR, (name, rule, nth, outcome)
        assert outcome.events[-1]["kind"] in ("StorageError", "NoSpaceError", "DamagedError"), outcome.events[-1]
        place.check(scenario, outcome)


def test_an_unlink_that_fails(place: Place) -> None:
    """Temporary files may stay; what a prune could not delete is an error. Nothing is lost either way."""
    calls = place.calls("save")
    name = "unlink" if calls["unlink"] else "unlinkat"
    codes = set()
    for nth in range(1, calls[name] + 1):
        outcome = place.run("save", f"{name}:error=EIO:when={nth}")
        codes.add(outcome.code)
        place.check("save", outcome)
    assert codes == {0, EXIT_TYPED_ERROR}


def test_a_full_disk_can_still_be_pruned(place: Place) -> None:
    """Nothing that prune does needs space."""
    store = place.fresh("save")
    before = read_newest(open_catalog(LocalFiles(store))).save
    script = (
        "import sys, resource\n"
        "from store.catalog import open_catalog\n"
        "from store.storage.local import LocalFiles\n"
        "from store.retention import execute, plan_prune\n"
        "from store.retention import Retention\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "files = LocalFiles(sys.argv[1])\n"
        "plan = plan_prune(open_catalog(files), Retention(keep_last=1, log_spaced=False))\n"
        "assert plan.manifests, plan\n"
        "execute(files, plan)\n"
    )
    subprocess.run([os.path.realpath(sys.executable), "-c", script, str(store)], check=True, env=_environment())
    assert read_newest(open_catalog(LocalFiles(store))).save == before


def _environment() -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
