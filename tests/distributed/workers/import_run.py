"""One job around an import: trains and is saved by stock DeepSpeed, or resumes from what was imported of it.

Usage: import_run.py SPEC.json. ``role`` is ``save`` (writes ``saved`` by ``engine.save_checkpoint`` and the whole
state, by name, to ``state.pt``) or ``resume`` (from ``store``; compares with ``state``). Both then go on for some steps
with random states of their own making, so that losses are comparable.
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
from adapter_model import batches, engine
from resume_jobs import ZERO, Results, Shuffled, Trainee, leave, rank, start_group
from resume_reshard import differences, whole

import monitor

SAVED, LAST = 3, 6


def train(built: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        for batch in batches(step, rank()):
            loss = built(batch)
            built.backward(loss)
            built.step()
            losses.append(loss.item())
    return losses


def go_on(built: Any) -> list[float]:
    torch.manual_seed(100 + rank())
    random.seed(100 + rank())
    np.random.seed(100 + rank())
    return train(built, range(SAVED, LAST))


def save(spec: Mapping[str, Any], results: Results, built: Any) -> None:
    train(built, range(SAVED))
    built.save_checkpoint(str(Path(spec["directory"]) / "saved"), client_state={"mine": {"list": [1, 2.5, "three"]}})
    state = whole(Trainee(built, [], list))
    if rank() == 0:
        torch.save(state, Path(spec["directory"]) / "state.pt")
    results.tell("saved", losses=go_on(built))


def resume(spec: Mapping[str, Any], results: Results, built: Any) -> None:
    settings = {"store": spec["store"], "every": 1, "metrics": {"enabled": False}}
    with monitor.attach(built, settings, state=[Shuffled(1)] if spec["objects"] else []) as ckpt:
        fresh = whole(Trainee(built, [], list))
        before = torch.get_rng_state()
        step = ckpt.resume()
        expected, found = torch.load(spec["state"], weights_only=True), whole(Trainee(built, [], list))
        results.tell(
            "resumed",
            step=step,
            as_found=ckpt.certificate is not None and ckpt.certificate.as_found,
            differences=differences(expected, found),
            unlike_fresh=len(differences(expected, fresh)),
            rng_kept=torch.equal(before, torch.get_rng_state()),
            global_steps=built.global_steps,
        )
        losses = go_on(built)
        ckpt.step()
        results.tell("continued", losses=losses)


def main(spec: Mapping[str, Any]) -> None:
    start_group(zero=True)
    results = Results(spec["results"])
    built = engine(spec["seed"], spec["stage"], spec["precision"], **{**ZERO, **spec.get("zero", {})})
    {"save": save, "resume": resume}[spec["role"]](spec, results, built)
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
