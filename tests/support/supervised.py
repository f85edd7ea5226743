"""``driftpoint run`` as a process of its own, what it tells and what its jobs record; nothing of it outlives it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support.cli import ROOT, environment

TRAINER = ROOT / "tests" / "distributed" / "workers" / "supervised_train.py"
PYTHON = [sys.executable]


@dataclass
class Supervised:
    """A run in progress or over."""

    process: subprocess.Popen[bytes]
    folder: Path

    def ends(self, timeout: float = 300) -> int:
        """Its exit code."""
        return self.process.wait(timeout)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    @property
    def said(self) -> str:
        return (self.folder / "output.txt").read_text()

    @property
    def records(self) -> list[dict[str, Any]]:
        return _lines(self.folder / "results.jsonl")

    @property
    def events(self) -> list[dict[str, Any]]:
        return _lines(self.folder / "events.jsonl")

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.records if one["kind"] == kind]

    @property
    def starts(self) -> list[int]:
        """The steps that attempts resumed at."""
        return [one["start"] for one in self.of("resumed")]

    def until(self, holds: Callable[[], Any], timeout: float = 300) -> Any:
        """Wait for a condition; what it gave."""
        deadline = time.monotonic() + timeout
        while not (found := holds()):
            assert self.process.poll() is None or holds(), f"it ended with {self.process.returncode}:\n{self.said}"
            assert time.monotonic() < deadline, self.said
            time.sleep(0.02)
        return found


@contextmanager
def supervised(
    folder: Path, command: Sequence[object], *options: object, store: Path | None = None
) -> Iterator[Supervised]:
    """``driftpoint run OPTIONS -- COMMAND`` on ``folder/store``."""
    given = ["--store", store or folder / "store", "--events", folder / "events.jsonl", "--backoff", "0.05", *options]
    with (folder / "output.txt").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", "run", *map(str, given), "--", *map(str, command)],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**environment(), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )
    found = Supervised(process, folder)
    try:
        yield found
    finally:
        _end(found)


def training(folder: Path, **spec: Any) -> list[object]:
    """The command of the trainer in ``workers/supervised_train.py``, without what starts python."""
    spec = {"store": str(folder / "store"), "results": str(folder / "results.jsonl"), "every": 2, "total": 12, **spec}
    (folder / "spec.json").write_text(json.dumps(spec))
    return [TRAINER, folder / "spec.json"]


def alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _end(run: Supervised) -> None:
    mine = []
    if run.process.poll() is None:
        mine = psutil.Process(run.process.pid).children(recursive=True)
        run.process.kill()
        run.process.wait()
    for pid in {one["pid"] for one in run.records}:  # of a supervisor that a test killed
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.cwd() == str(run.folder):
                mine.append(process)
    for process in mine:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]
