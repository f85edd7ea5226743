"""Launching real jobs: torchrun on gloo, or one process, with results read from a file of JSON lines.

The file outlives a worker that was killed, so what it recorded before counts. A launch owns its process group
and ends it, whatever happens. Its processes are forked from one that has imported torch and DeepSpeed already (see
:mod:`tests.support.preloaded`): importing them would take most of a launch's time, in every rank.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[2]
WORKERS = ROOT / "tests" / "distributed" / "workers"
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    # Otherwise a restarted worker finds the addresses of the dead ones in torchrun's store, and cannot connect.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}

_K, _T = TypeVar("_K"), TypeVar("_T")


@dataclass(frozen=True)
class Launched:
    """What became of a launch: its exit code, what it printed, and the records of its workers, in order."""

    code: int
    output: str
    records: list[dict[str, Any]]

    def of(self, kind: str, **wanted: Any) -> list[dict[str, Any]]:
        """The records of a kind whose fields are as wanted."""
        wanted["kind"] = kind
        return [one for one in self.records if all(one.get(key) == value for key, value in wanted.items())]

    def one(self, kind: str, **wanted: Any) -> dict[str, Any]:
        """The only such record."""
        found = self.of(kind, **wanted)
        assert len(found) == 1, f"{len(found)} records of {kind} {wanted}\n{self.output[-6000:]}"
        return found[0]


def torchrun(
    worker: str, ranks: int, spec: Mapping[str, Any], directory: Path, *, restarts: int = 0, timeout: float = 900
) -> Launched:
    """Run a worker on ``ranks`` ranks of this machine. It gets the path of a JSON file with the spec."""
    return _run(
        [*launcher(ranks), f"--max-restarts={restarts}", "--monitor-interval=0.1"], worker, spec, directory, timeout
    )


def alone(worker: str, spec: Mapping[str, Any], directory: Path, *, timeout: float = 600) -> Launched:
    """Run a worker in one process without torchrun."""
    return _run([], worker, spec, directory, timeout)


def launcher(ranks: int) -> list[str]:
    """What comes before a script that is to run on so many ranks."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]


def python(
    words: Sequence[object], directory: Path, *, fresh: bool = False, timeout: float = 900, **environment: str
) -> subprocess.CompletedProcess[str]:
    """``python WORDS`` to its end, a script or torchrun with one, in a directory. Its code is -1 where time was up.

    fresh: in processes that nothing was imported in before."""
    known, said = {**os.environ, **ENVIRONMENT, **environment}, list(map(str, words))
    if fresh:
        return subprocess.run(
            [sys.executable, *said],
            capture_output=True,
            text=True,
            env=known,
            cwd=directory,
            timeout=timeout,
            check=False,
        )
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        code = _preloaded().run(said, directory, (out, err), known, timeout)
        return subprocess.CompletedProcess(said, code, out.read_text(errors="replace"), err.read_text(errors="replace"))


class Started:
    """A launch that goes on beside the test, as much of :class:`subprocess.Popen` as it takes to kill one. There is one
    at a time: until it has ended, nothing else can be launched.

    words: What follows ``python``. output: A file for all that it prints."""

    def __init__(self, words: Sequence[str], directory: Path, output: Path, **environment: str) -> None:
        known = {**os.environ, **ENVIRONMENT, **environment}
        self.args = list(words)
        self.pid = _preloaded().start(self.args, directory, (output, output), known)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, None as long as it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float) -> int:
        """The exit code. TimeoutExpired."""
        if self.returncode is None:
            self.returncode = _preloaded().code(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def kill(self) -> None:
        """SIGKILL, where it still lives."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def once(make: Callable[[_K], _T]) -> Callable[[_K], _T]:
    """Have ``make`` called once for each argument: from then on it gives the same result, or the same error."""
    made: dict[_K, tuple[_T] | Exception] = {}

    def get(argument: _K) -> _T:
        if argument not in made:
            try:
                made[argument] = (make(argument),)
            except Exception as error:  # noqa: BLE001 - raised below, now and for every test that asks later
                made[argument] = error
        result = made[argument]
        if isinstance(result, Exception):
            raise result
        return result[0]

    return get


def _run(words: list[str], worker: str, spec: Mapping[str, Any], directory: Path, timeout: float) -> Launched:
    number = len(list(directory.glob("launch-*.json")))
    results, described = directory / f"results-{number}.jsonl", directory / f"launch-{number}.json"
    described.write_text(json.dumps({**spec, "results": str(results), "directory": str(directory)}))
    words = [*words, str(WORKERS / worker), str(described)]
    output = directory / f"output-{number}.txt"
    code = _preloaded().run(words, directory, (output, output), {**os.environ, **ENVIRONMENT}, timeout)
    lines = results.read_text().splitlines() if results.exists() else []
    return Launched(code, output.read_text(errors="replace"), [json.loads(line) for line in lines])


@cache
def _preloaded() -> _Preloaded:
    return _Preloaded()


class _Preloaded:
    """The process that launches are forked from, from the first one to the end of this process."""

    def __init__(self) -> None:
        environment = {key: value for key, value in {**os.environ, **ENVIRONMENT}.items() if key != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("preloaded.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )

    def run(
        self,
        words: list[str],
        directory: Path,
        streams: tuple[Path, Path],
        environment: Mapping[str, str],
        timeout: float,
    ) -> int:
        """One launch, to its end: its exit code, -1 where time was up. streams: stdout and stderr."""
        pid = self.start(words, directory, streams, environment)
        ended = False
        try:
            ended = self._answers(timeout)
        finally:
            if not ended:
                self._end(pid)
            code = self._answer()
        return code if ended else -1

    def start(
        self, words: list[str], directory: Path, streams: tuple[Path, Path], environment: Mapping[str, str]
    ) -> int:
        """One launch: its process id."""
        asked = {"words": words, "directory": str(directory), "environment": environment}
        asked["streams"] = list(map(str, streams))
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        return self._answer()

    def code(self, seconds: float) -> int | None:
        """The exit code of what was started, None where it did not end in time."""
        return self._answer() if self._answers(seconds) else None

    def _end(self, pid: int) -> None:
        # torchrun gives its workers sessions of their own; it ends them itself when it is asked to.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        if not self._answers(60):
            os.killpg(pid, signal.SIGKILL)

    def _answers(self, seconds: float) -> bool:
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def _answer(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process that launches are forked from ended: {self._process.wait()}"
        return int(line)
