"""Ranks that take their steps at different speeds under ``every: auto``; each records what it decided, and when.

Usage: adaptive_interval.py SPEC.json. ``phase`` 0 trains and is killed, 1 goes on from there.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapter_model import ACCUMULATION
from resume_jobs import Results, Trainee, build, leave, rank, start_group

import monitor


class Case:
    """One job and its records."""

    def __init__(self, case: Mapping[str, Any], spec: Mapping[str, Any], results: Results) -> None:
        self.case, self.spec, self.results = case, spec, results
        self.phase = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self.chance = random.Random(7 + rank())
        self.trainee: Trainee = build(case, seed=1)
        settings = {
            "store": str(Path(spec["directory"]) / case["name"]),
            "every": "auto",
            "metrics": {"enabled": False},
            **case["settings"],
        }
        self.ckpt = monitor.attach(self.trainee.target, settings, state=self.trainee.state)

    def run(self) -> None:
        first = self.ckpt.resume()
        interruptions = self.ckpt.metrics.registry.get_sample_value("driftpoint_interruptions")
        self.tell("resumed", step=first, interruptions=interruptions)
        for step in range(first + 1, first + self.spec["steps"] + 1):
            self.trainee.step()
            time.sleep(self.chance.random() * 0.02 * (1 + rank()))
            self.decide(step)
            if step == first + self.spec["steps"] // 2:
                asked = self.ckpt.save(wait=True)
                self.tell("asked", step=asked.step, skipped=asked.skipped, interval=asked.interval)

    def decide(self, step: int) -> None:
        report = self.ckpt.step()
        if self.case["kind"] == "zero":  # called as after each micro step: nothing happens but at the first call
            for _ in range(ACCUMULATION - 1):
                assert self.ckpt.step() is None
        if report is not None:
            self.tell("decided", step=report.step, at=step, skipped=report.skipped, interval=report.interval)

    def tell(self, kind: str, **fields: Any) -> None:
        self.results.tell(kind, case=self.case["name"], phase=self.phase, **fields)


def main(spec: Mapping[str, Any]) -> None:
    start_group(spec["zero"])
    for case in spec["cases"]:
        one = Case(case, spec, Results(spec["results"]))
        one.run()
        if one.phase == 0 and case is spec["cases"][-1]:
            os.kill(os.getpid(), signal.SIGKILL) if rank() == 1 else time.sleep(60)
        one.ckpt.close(save=False)
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
