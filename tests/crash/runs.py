"""Runs the small job in a process of its own, under strace or on a filesystem that is about to lose power."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from tests.crash.workload import Paper

HERE = Path(__file__).parent
EXIT_TYPED_ERROR = 3


@dataclass(frozen=True)
class Outcome:
    """How a run ended. ``code``: 0 done, 3 a typed error, 4 any other error, negative a signal."""

    code: int
    events: Sequence[Mapping[str, Any]]


class Zygote:
    """The process that forks a child for each run. A context manager. environment: that it gets besides."""

    def __init__(self, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        self._environment = environment

    def __enter__(self) -> Zygote:
        site = [path for path in sys.path if path.endswith("site-packages")]
        # The real interpreter: a shim would be what gets traced.
        self._process = subprocess.Popen(
            [os.path.realpath(sys.executable), str(HERE / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *site]),
                "OMP_NUM_THREADS": "1",
                **self._environment,
            },
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=180)
        self._process.stdout.close()

    def doomed(self, scenario: str, store: Path, journal: Path, k: int) -> Outcome:
        """Run until the power goes before the k-th change."""
        self._start(scenario, store, journal, str(k))
        return self._outcome(journal)

    def begun(self, scenario: str, url: str, journal: Path, request: float, retry: float) -> int:
        """Begin a run on an object store. Its process; :meth:`ended` waits for it. request, retry: seconds."""
        return self._start(scenario, url, journal, f"objects:{request}:{retry}")

    def ended(self, journal: Path) -> Outcome:
        """What became of what was begun."""
        return self._outcome(journal)

    def traced(self, scenario: str, store: Path, journal: Path, strace: Sequence[str]) -> Outcome:
        """Run under strace with these options. OSError where it cannot attach."""
        pid = self._start(scenario, store, journal, "trace")
        tracer = subprocess.Popen(["strace", "-qq", *strace, "-p", str(pid)], stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 180
        while tracer.poll() is None and not _is_traced(pid) and time.monotonic() < deadline:
            time.sleep(0.001)
        outcome = self._outcome(journal, pid if tracer.poll() not in (None, 0) else None)
        _, said = tracer.communicate(timeout=180)
        if tracer.returncode != 0 and "attach" in said:
            raise OSError(said)
        return outcome

    def _start(self, *words: object) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        return int(self._process.stdout.readline())

    def _outcome(self, journal: Path, kill: int | None = None) -> Outcome:
        if kill is not None:
            os.kill(kill, signal.SIGKILL)
        assert self._process.stdout is not None
        return Outcome(int(self._process.stdout.readline()), Paper.read(journal))


def _is_traced(pid: int) -> bool:
    try:
        return "TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True  # it has run to its end already
