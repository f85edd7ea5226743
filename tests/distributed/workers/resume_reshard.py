"""One link of a chain: resume whatever is in the store with this world size and ZeRO stage, compare the whole state
by parameter name with what the link before left, train on, save, and leave the state for the next link.

Usage: resume_reshard.py SPEC.json
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from resume_jobs import Results, Trainee, build, leave, rank, start_group

import monitor
from monitor.adapters import adapter_for
from store.names import Fragment

STEPS = 3


def whole(trainee: Trainee) -> dict[str, torch.Tensor]:
    """Every (fqn, slot) of all ranks, whole, on every rank."""
    return gathered([(p.fragment, p.tensor.detach().clone()) for p in adapter_for(trainee.target).owned()])


def gathered(mine: list[tuple[Fragment, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The fragments of all ranks put together, by (fqn, slot), on every rank."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [(f.fqn, f.slot, f.start, tensor) for f, tensor in mine])
    pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for fqn, slot, start, tensor in (piece for one in every for piece in one):
        pieces.setdefault(f"{fqn}/{slot}", []).append((start, tensor))
    return {name: torch.cat([t for _, t in sorted(found, key=lambda pair: pair[0])]) for name, found in pieces.items()}


def differences(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Where two states differ by a bit."""
    names = sorted(one.keys() ^ other.keys())
    return names + [
        name
        for name in one.keys() & other.keys()
        if one[name].dtype != other[name].dtype
        or not torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8))
    ]


def main(spec: Mapping[str, Any]) -> None:
    start_group(zero=spec["case"]["kind"] == "zero")
    results, left = Results(spec["results"]), Path(spec["directory"]) / "state.pt"
    trainee = build(spec["case"], seed=spec["seed"])
    settings = {"store": str(Path(spec["directory"]) / "store"), "every": STEPS, "metrics": {"enabled": False}}
    loader = trainee.state[-1:]  # an engine has the scheduler itself
    with monitor.attach(trainee.target, settings, state=loader) as ckpt:
        fresh = whole(trainee)
        first = ckpt.resume()
        if left.exists():
            before, now = torch.load(left, weights_only=True), whole(trainee)
            results.tell(
                "resumed",
                step=first,
                exact=ckpt.certificate is not None and ckpt.certificate.exact,
                differences=differences(before, now),
                unlike_fresh=len(differences(before, fresh)),
                slots=sorted({name.rpartition("/")[2] for name in now}),
            )
        losses = [loss for _ in range(first, first + STEPS) for loss in _trained(trainee, ckpt)]
        results.tell("trained", finite=all(math.isfinite(loss) for loss in losses))
    state = whole(trainee)
    if rank() == 0:
        torch.save(state, left)
    leave()


def _trained(trainee: Trainee, ckpt: monitor.Checkpointer) -> list[float]:
    losses = trainee.step()
    ckpt.step()
    return losses


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
