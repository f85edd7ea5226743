"""Launching real jobs: torchrun on gloo, or one process, with results read from a file of JSON lines.

The file outlives a worker that was killed, so what it recorded before counts. A launch owns its process group
and ends it, whatever happens.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WORKERS = ROOT / "tests" / "distributed" / "workers"
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    # Otherwise a restarted worker finds the addresses of the dead ones in torchrun's store, and cannot connect.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


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
    worker: str, ranks: int, spec: Mapping[str, Any], directory: Path, *, restarts: int = 0, timeout: float = 240
) -> Launched:
    """Run a worker on ``ranks`` ranks of this machine. It gets the path of a JSON file with the spec."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [f"--max-restarts={restarts}", "--monitor-interval=0.1"]
    return _run(command, worker, spec, directory, timeout)


def alone(worker: str, spec: Mapping[str, Any], directory: Path, *, timeout: float = 120) -> Launched:
    """Run a worker in one process without torchrun."""
    return _run([sys.executable], worker, spec, directory, timeout)


def _run(command: list[str], worker: str, spec: Mapping[str, Any], directory: Path, timeout: float) -> Launched:
    number = len(list(directory.glob("launch-*.json")))
    results, described = directory / f"results-{number}.jsonl", directory / f"launch-{number}.json"
    described.write_text(json.dumps({**spec, "results": str(results), "directory": str(directory)}))
    with (directory / f"output-{number}.txt").open("w+") as output:
        process = subprocess.Popen(
            [*command, str(WORKERS / worker), str(described)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT},
            cwd=directory,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            _end(process)
        output.seek(0)
        text = output.read()
    lines = results.read_text().splitlines() if results.exists() else []
    return Launched(code, text, [json.loads(line) for line in lines])


def _end(process: subprocess.Popen[bytes]) -> None:
    # torchrun gives its workers sessions of their own; it ends them itself when it is asked to.
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
