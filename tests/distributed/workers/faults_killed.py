"""Two ranks that save in every step. Each incarnation is killed in another phase of a save, by SIGKILL from within;
the last one runs to the end. What each resumed, saved and saw acknowledged is recorded.

Usage: faults_killed.py SPEC.json
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from resume_jobs import Results, leave, rank, start_group

from monitor.adapters.module_tensors import as_bytes
from tests.support.jobs import Job

SAVES_BEFORE = 2
"""Commits that an incarnation makes before it is killed."""


class Killer:
    """Dies at an operation on a path, or when the state is captured. Given as state, too: it notices the staging."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self.at: tuple[str, str] | None = None

    def operation(self, name: str, path: str) -> None:
        if self.at is not None and name == self.at[0] and self.at[1] in path:
            self._results.tell("dies", at=self.at)
            os.kill(os.getpid(), signal.SIGKILL)

    def state_dict(self) -> dict[str, Any]:
        self.operation("capture", "")
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert state == {}


def digest(job: Job) -> str:
    """Of the whole state."""
    weights = job.weights()
    return xxhash.xxh3_128(b"".join(bytes(as_bytes(weights[key].reshape(-1))) for key in sorted(weights))).hexdigest()


def main(spec: Mapping[str, Any]) -> None:
    incarnation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    results, phases = Results(spec["results"]), spec["phases"]
    start_group(zero=False)
    killer = Killer(results)
    torch.manual_seed(incarnation)
    job = Job(Path(spec["directory"]) / "store", state=[killer], retention={"keep_last": 2, "log_spaced": False})
    files = job.hook()
    first = job.ckpt.resume()
    results.tell("resumed", incarnation=incarnation, step=first, digest=digest(job))
    for step in range(first + 1, first + SAVES_BEFORE + 3):
        job.update()
        results.tell("state", incarnation=incarnation, step=step, digest=digest(job))
        if step == first + SAVES_BEFORE + 1 and incarnation < len(phases):
            victim, when, operation, path = phases[incarnation]
            if victim == rank():
                killer.at = (operation, path)
                setattr(files, when, killer.operation)
        report = job.ckpt.step()
        assert report is not None and report.skipped is None, report
        if rank() == 0:
            results.tell("acknowledged", step=int(job.metric("driftpoint_last_commit_step")))
        job.ckpt.flush()
    job.ckpt.close(save=False)
    results.tell("finished", incarnation=incarnation)
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
