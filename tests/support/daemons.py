"""Real daemons and real trainers beside them, each a process; all ended with the test."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from store.catalog import Catalog, open_catalog
from store.daemon_protocol import AskStatus, Report, query_daemon
from store.errors import DriftpointError
from store.storage.local import LocalFiles
from tests.support.cli import environment
from tests.support.jobs import Job
from tests.support.launch import ENVIRONMENT, WORKERS

PATIENCE = 300.0


def until(true: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """Wait for a condition; its value."""
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, f"{what} did not come about within {seconds:g} s"
        time.sleep(0.02)
    return found


def report(base: Path) -> Report | None:
    """What the daemon says, None where there is none."""
    try:
        found = query_daemon(base, AskStatus(), 10.0)
    except DriftpointError:
        return None
    return found if isinstance(found, Report) else None


def rescues(base: Path) -> list[str]:
    """Outcomes so far."""
    found = report(base)
    return [] if found is None else [one.outcome for one in found.rescues]


@dataclass
class Running:
    """A daemon that the test started."""

    base: Path
    process: subprocess.Popen[bytes]
    log: Path

    def said(self) -> str:
        return self.log.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(120)

    def rescued(self, count: int = 1) -> str:
        """The outcome of the newest of at least so many rescues."""
        until(lambda: len(rescues(self.base)) >= count, f"rescue {count}: {self.said()}")
        return rescues(self.base)[-1]


def daemon_command(base: Path, *options: object) -> list[str]:
    """As a user runs it, but quiet."""
    words = ["--memory", base, "--port", 0, *options]
    return [sys.executable, "-m", "deploy.cli", "daemon", "run", *map(str, words)]


@contextmanager
def daemon(base: Path, *options: object, prefix: tuple[str, ...] = ()) -> Iterator[Running]:
    """Running, and answering."""
    number = len(list(base.parent.glob("daemon-*.log")))
    log = base.parent / f"daemon-{number}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*prefix, *daemon_command(base, *options)], stdout=output, stderr=output, env=environment(), cwd=base.parent
        )
    running, pid = Running(base, process, log), process.pid
    try:
        found = until(lambda: report(base) or process.poll() is not None, "a daemon")
        pid = found.pid if isinstance(found, Report) else process.pid
        yield running
    finally:
        if process.poll() is None and pid != process.pid:  # under a tracer, which would let it go
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            process.wait(180)
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(180)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(120)


@dataclass
class Trainer:
    """A process that trains to a step, keeps it, and then waits for lines to its stdin: what to do next."""

    process: subprocess.Popen[str]
    folder: Path

    def says(self, word: str) -> None:
        """Wait until it says a word."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            ready, _, _ = select.select([self.process.stdout], [], [], 1.0)
            if ready:
                line = self.process.stdout.readline()
                assert line, f"the trainer ended: {(self.folder / 'trainer.err').read_text()[-3000:]}"
                if line.strip() == word:
                    return
        raise AssertionError(f"the trainer did not say {word!r}")

    def told(self, word: str) -> None:
        """Tell it, and wait until it is done."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        self.says("done")

    def kill(self) -> None:
        """Without a word."""
        self.process.kill()
        self.process.wait(120)

    def stop(self, number: int = signal.SIGSTOP) -> None:
        """A signal."""
        self.process.send_signal(number)

    def state(self) -> Mapping[str, torch.Tensor]:
        """Weights, moments and torch's random state when it was last told or ready."""
        found = torch.load(self.folder / "state.pt")
        assert isinstance(found, dict)
        return found

    def said(self) -> str:
        """Its log."""
        return (self.folder / "trainer.err").read_text()


@contextmanager
def trainer(store: Path, base: Path, steps: int, width: int = 8, **settings: Any) -> Iterator[Trainer]:
    """Ready: ``steps`` steps are done, the last one is whole in memory, and its state written down."""
    folder = store.parent / f"trainer-{len(list(store.parent.glob('trainer-*')))}"
    folder.mkdir()
    spec = {"store": str(store), "folder": str(folder), "steps": steps, "width": width}
    spec["settings"] = settings_of(base, settings)
    (folder / "spec.json").write_text(json.dumps(spec))
    with (folder / "trainer.err").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, str(WORKERS / "daemon_train.py"), str(folder / "spec.json")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )
    made = Trainer(process, folder)
    try:
        made.says("ready")
        yield made
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(120)
        assert process.stdin is not None and process.stdout is not None
        with suppress(OSError):
            process.stdin.close()
        process.stdout.close()


def settings_of(base: Path, more: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {"every": 4, "daemon": {"enabled": True, "start": False, "port": 0}, **more}
    values["memory"] = {"enabled": True, "every": 1, "path": str(base), **more.get("memory", {})}
    return values


def catalog_of(store: Path) -> Catalog:
    return open_catalog(LocalFiles(store))


def steps(store: Path) -> list[int]:
    return [save.step for save in catalog_of(store).saves()]


def known(base: Path, ranks: int = 1) -> None:
    """Until the daemon knows so many living processes."""
    until(lambda: (found := report(base)) and sum(len(job.alive) for job in found.jobs) == ranks, f"{ranks} trainers")


def alone(base: Path) -> None:
    """Until the daemon knows of no job."""
    until(lambda: (found := report(base)) and not found.jobs, "no job")


def resumed(store: Path, tmp_path: Path, **settings: Any) -> dict[str, torch.Tensor]:
    """What a job on another node goes on from."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    one = Job(store, every=4, memory={"enabled": True, "path": str(elsewhere)}, **settings)
    step = one.ckpt.resume()
    found = {**one.weights(), "random": torch.get_rng_state(), "step": torch.tensor(step)}
    one.ckpt.close()
    return found


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
