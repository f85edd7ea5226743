"""Trains every case of its spec without interruption; then again with the memory tier, killed twice at moments that a
seeded generator chooses, by SIGKILL of one rank or of both, and brought back by torchrun; then to the end.

Usage: memory_kills.py SPEC.json
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from resume_jobs import Results, Trainee, build, leave, rank, start_group
from resume_train import hashes

import monitor
from tests.support.internals import memory_of

KILLS = 2
"""Incarnations of each case that are killed."""


def state(trainee: Trainee) -> str:
    """One digest of all that this rank owns."""
    return xxhash.xxh3_128_hexdigest(json.dumps(hashes(trainee), sort_keys=True).encode())


class Run:
    """One process of the spec."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.spec = spec
        self.results = Results(spec["results"])
        self.steps = spec["steps"]
        self.incarnation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def straight(self, case: Mapping[str, Any]) -> None:
        trainee = build(case, seed=1)
        for step in range(1, self.steps + 1):
            losses = trainee.step()
            self.results.tell("straight", case=case["name"], step=step, losses=losses, state=state(trainee))

    def train(self, case: Mapping[str, Any], life: int) -> None:
        """life: how often the case was killed before."""
        trainee = build(case, seed=1 + life)
        ckpt = monitor.attach(trainee.target, self.settings(case), state=trainee.state)
        first = ckpt.resume()
        found = ckpt.certificate
        self.results.tell(
            "resumed", case=case["name"], life=life, step=first, state=state(trainee),
            exact=found is None or found.exact, sources=sorted({unit.source for unit in found.units}) if found else [],
        )  # fmt: skip
        chance = random.Random(f"{self.spec['seed']} {case['name']} {life}")
        victims, after = chance.choice([[0], [1], [0, 1]]), first + chance.randrange(7, 10)
        moment = [chance.uniform(0, 0.08) for _ in range(2)]
        for step in range(first + 1, self.steps + 1):
            if life < KILLS and step == after and rank() in victims:
                threading.Thread(target=self.die, args=(moment[rank()],), daemon=True).start()
            losses = trainee.step()
            ckpt.step()
            if step == 4:  # so that there is a commit before the first death, however slow the disk is
                ckpt.flush()
            memory = memory_of(ckpt)
            newest = None if memory is None or memory.newest is None else memory.newest.step
            self.results.tell(
                "trained", case=case["name"], life=life, step=step, losses=losses, newest=newest,
                committed=ckpt.metrics.registry.get_sample_value("driftpoint_last_commit_step") or 0,
            )  # fmt: skip
        while life < KILLS and dist.is_initialized():
            dist.barrier()  # the moment comes later than the last step
        ckpt.close()
        self.results.tell("end", case=case["name"], state=state(trainee))

    def die(self, seconds: float) -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    def settings(self, case: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "store": str(Path(self.spec["directory"]) / case["name"]),
            "every": 3,
            "staging": case.get("staging", "auto"),
            "metrics": {"enabled": False},
            "memory": {"enabled": True, "every": case.get("kept", 1), "path": self.spec["shared"]},
        }


def main(spec: Mapping[str, Any]) -> None:
    run, cases = Run(spec), spec["cases"]
    start_group(any(case["kind"] == "zero" for case in cases))
    torch.use_deterministic_algorithms(True)
    if run.incarnation == 0:
        for case in cases:
            run.straight(case)
    for life in range(run.incarnation, len(cases) * (KILLS + 1)):
        case, lives = life // KILLS, life % KILLS
        if case == len(cases):
            break
        # The incarnation that follows a case's last death brings it to its end, and goes on with the next.
        if lives == 0 and case > 0:
            run.train(cases[case - 1], KILLS)
        run.train(cases[case], lives)
    else:
        raise AssertionError("not reached")
    run.train(cases[-1], KILLS)
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
