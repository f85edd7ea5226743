"""A rescue that is killed at every system call that changes something: the next one completes it.

Also the system refusing one of them: then nothing is left, or all of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from store.catalog import open_catalog
from store.errors import DriftpointError
from store.memory.layout import Tier
from store.memory.rescue import NOTHING, WRITTEN, rescue_newest
from store.names import SaveId, segment_dir
from store.retention import Retention, plan_prune
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.jobs import Job
from tests.support.kept import abandoned, kept_step, memory
from tests.support.mounts import shared_memory

pytestmark = pytest.mark.slow

CHANGES = ("write", "pwrite64", "fsync", "link", "linkat", "unlink", "unlinkat", "rename", "renameat", "renameat2",
           "mkdir", "mkdirat", "rmdir")  # fmt: skip
TRACE = f"trace={','.join(f'?{name}' for name in CHANGES)}"
SAVE = SaveId(7, 1)
TYPED = 3


@dataclass
class Place:
    """A dead job's store and memory, and a fresh copy of both for each run."""

    folder: Path

    @property
    def store(self) -> Path:
        return self.folder / "run" / "store"

    def fresh(self) -> None:
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        shutil.copytree(self.folder / "base", self.folder / "run")

    def rescue(self) -> str:
        catalog = open_catalog(LocalFiles(self.store))
        return rescue_newest(Tier(self.folder / "run" / "shm", catalog.store_id), catalog).outcome

    def traced(self, *inject: str) -> int:
        """The rescue in a process of its own under strace; its exit code, negative for a signal."""
        self.fresh()
        waiting, go = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.read(waiting, 1)
            try:
                os._exit(0 if self.rescue() == WRITTEN else 4)
            except DriftpointError:
                os._exit(TYPED)
            finally:
                os._exit(5)
        rules = [word for rule in inject for word in ("-e", f"inject={rule}")]
        command = ["strace", "-qq", "-f", "-o", str(self.folder / "trace"), "-e", TRACE, *rules, "-p", str(pid)]
        tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        while tracer.poll() is None and "TracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_text():
            time.sleep(0.001)
        os.write(go, b"x")
        os.close(go)
        os.close(waiting)
        _, status = os.waitpid(pid, 0)
        _, said = tracer.communicate(timeout=180)
        if tracer.returncode and "attach" in said:
            pytest.skip(f"strace may not attach: kills at system calls are NOT tested ({said})")
        return os.waitstatus_to_exitcode(status)

    def completed(self) -> None:
        """What a killed rescue left is whole without it, and the next one makes it a commit."""
        catalog = open_catalog(LocalFiles(self.store))
        there = SAVE in catalog.saves()
        assert verify(catalog).ok
        assert self.rescue() == (NOTHING if there else WRITTEN)
        catalog = open_catalog(LocalFiles(self.store))
        assert [save.step for save in catalog.saves()] == [7, 4]
        assert verify(catalog).ok
        assert catalog.files.list_dir(segment_dir(SAVE)) == ["rank-00000.json", "rank-00000.safetensors"]
        plan = plan_prune(catalog, Retention())
        assert not plan.unrecognised and plan.blocked is None


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: kills at system calls are NOT tested (apt-get install strace)")
    with shared_memory("dp-sweep-") as folder:
        (folder / "base").mkdir()
        store = folder / "base" / "store"
        one = Job(store, every=4, memory=memory(store), trace={"enabled": False})
        one.ckpt.resume()
        for _ in range(7):
            kept_step(one)
        abandoned(one)
        yield Place(folder)


@pytest.fixture(scope="module")
def calls(place: Place) -> Counter[str]:
    """How often an undisturbed rescue makes each call."""
    assert place.traced() == 0
    return Counter(re.findall(r"^\d+ +(\w+)\(", (place.folder / "trace").read_text(), re.MULTILINE))


def test_killed_at_every_system_call(place: Place, calls: Counter[str]) -> None:
    assert calls["fsync"] >= 8 and calls["link"] + calls["linkat"] == 3
    for name, count in calls.items():
        for nth in range(1, count + 1):
            assert place.traced(f"{name}:signal=SIGKILL:when={nth}") == -9, (name, nth)
            place.completed()


FAULTS: Sequence[tuple[str, str]] = [
    ("write", "error=ENOSPC"), ("fsync", "error=EIO"), ("link", "error=EIO"), ("rename", "error=EROFS"),
    ("unlink", "error=EIO"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_refused_at_every_system_call(place: Place, calls: Counter[str], name: str, fault: str) -> None:
    for nth in range(1, calls[name] + 1):
        code = place.traced(f"{name}:{fault}:when={nth}")
        assert code in (0, TYPED), (name, nth, code)
        place.completed()
