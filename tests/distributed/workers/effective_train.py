"""Trains with a policy that leaves layers out, then resumes what that left: and tells, at each step and at the resume,
all that a job goes on with besides its weights.

Usage: effective_train.py SPEC.json, once for each incarnation
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from resume_jobs import Results, Trainee, build, leave, start_group
from resume_train import hashes

import monitor


def standing(case: Mapping[str, Any], trainee: Trainee) -> dict[str, Any]:
    """Counters, schedule and hyperparameters of all ranks; loader and generators of this one."""
    if case["kind"] == "zero":
        engine = trainee.target
        optimizer, scheduler, loader = engine.optimizer.optimizer, engine.lr_scheduler, trainee.state[0]
        names = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
        counters = {name: int(getattr(engine, name)) for name in names}
    else:
        optimizer, (scheduler, loader), counters = trainee.target[1], trainee.state, {}
    steps = {float(state["step"]) for state in optimizer.state.values() if "step" in state}
    return {
        "all": {
            **counters,
            "lr": [group["lr"] for group in optimizer.param_groups],
            "steps": sorted(steps),
            "last_epoch": getattr(scheduler, "last_epoch", None) or scheduler.last_batch_iteration,
        },
        "mine": {
            "position": loader.state_dict()["position"],
            "torch": xxhash.xxh3_64_hexdigest(torch.get_rng_state().numpy().tobytes()),
            "numpy": xxhash.xxh3_64_hexdigest(np.random.get_state()[1].tobytes()),
            "python": xxhash.xxh3_64_hexdigest(repr(random.getstate()).encode()),
        },
    }


def main(spec: Mapping[str, Any]) -> None:
    cases = spec["cases"]
    start_group(zero=any(case["kind"] == "zero" for case in cases))
    results = Results(spec["results"])
    for case in cases:
        trainee = build(case, seed=spec["seed"])
        settings = {
            "store": str(Path(spec["directory"]) / case["name"]), "every": 1, "policy": {"name": "parity", "k": 4},
            "metrics": {"enabled": False}, **spec.get("settings", {}),
        }  # fmt: skip
        with monitor.attach(trainee.target, settings, state=trainee.state) as ckpt:
            first, found = ckpt.resume(), ckpt.certificate
            results.tell(
                "resumed", case=case["name"], step=first, life=spec["life"], hashes=hashes(trainee),
                effective=found and found.effective_step, newest=found and found.step, exact=found and found.exact,
                units=found and [(unit.layer, unit.slot, unit.step) for unit in found.units],
                **(standing(case, trainee) if found else {}),
            )  # fmt: skip
            for step in range(first, first + spec["steps"]):
                losses = trainee.step()
                ckpt.flush()
                report = ckpt.step()
                assert report is not None and report.skipped is None, report
                results.tell(
                    "trained", case=case["name"], step=step + 1, life=spec["life"], losses=losses,
                    hashes=hashes(trainee), **standing(case, trainee),
                )  # fmt: skip
            ckpt.close(save=False)
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
