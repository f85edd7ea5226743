"""A job under `driftpoint run`, as a process that others may watch, lose a rank of, and wait for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import psutil

_SCRIPT = "examples.train_llama"
_RANKS = 2


class JobError(Exception):
    """The job did not do what it was started for."""


class Job:
    """``examples.train_llama`` on two CPU ranks under torchrun, which ``driftpoint run`` starts again when it dies.

    config: the YAML that both read. Output goes to ``log``. As a context manager it ends whatever of the job is still
    there.
    """

    def __init__(self, config: Path, arguments: Sequence[str], log: Path) -> None:
        self.log = log
        command = [sys.executable, "-m", "deploy.cli", "run", "--config", str(config), "--backoff", "0.5", "--"]
        command += [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(_RANKS)]
        command += ["-m", _SCRIPT, "--config", str(config), *arguments]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=_environment(), start_new_session=True
            )

    @property
    def running(self) -> bool:
        """Whether the supervisor is still there."""
        return self._process.poll() is None

    def kill_rank(self, rank: int) -> int:
        """SIGKILL to the process of one rank, the signal that nothing can catch. Returns its process id."""
        for child in psutil.Process(self._process.pid).children(recursive=True):
            try:
                mine = child.environ().get("RANK") == str(rank)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            if mine:
                child.send_signal(signal.SIGKILL)
                return child.pid
        raise JobError(f"there is no process of rank {rank} to kill; see {self.log}")

    def require_success(self) -> None:
        """Wait for the end. JobError, with the last lines of the log, unless it ended well."""
        code = self._process.wait()
        if code != 0:
            tail = self.log.read_text(errors="replace").splitlines()[-20:]
            raise JobError(f"the job ended with code {code}; the end of {self.log}:\n" + "\n".join(tail))

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.running:
            self._process.terminate()  # passed on to the ranks, which save and leave
            deadline = time.monotonic() + 60
            while self.running and time.monotonic() < deadline:
                time.sleep(0.1)
        if self.running:
            os.killpg(self._process.pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    """DeepSpeed on the CPU, one thread a rank."""
    ours = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **ours, "PYTHONUNBUFFERED": "1"}
