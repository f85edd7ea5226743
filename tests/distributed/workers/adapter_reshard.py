"""Under torchrun with another world size: the state that adapter_zero.py left, loaded in fresh processes.

Usage: adapter_reshard.py DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import adapter_ddp
import deepspeed
import torch
import torch.distributed as dist
from adapter_model import ACCUMULATION, BATCH, WIDTH, batches
from adapter_state import Saved, all_owned, coverage, differences, leave, put, report, take, unequal
from adapter_zero import build

MOMENTS = ("exp_avg", "exp_avg_sq")


def without_layout(run_state: dict[str, Any]) -> dict[str, Any]:
    """What of a run state does not depend on the order in which a stage lays parameters out."""
    groups = run_state["param_groups"]
    hyper = {fqn: group["hyper"] for group in groups for fqn in group["params"]}
    return {**run_state, "param_groups": hyper}


def zero(case: str, name: str, saved: Saved, expected: list[float]) -> None:
    """Into a ZeRO stage over these ranks; all equal, and so is the forward pass of working weights."""
    adapter, _ = build(name, 1)
    unplaced = put(adapter, saved)
    report(case, "cover", *coverage(adapter, all_owned(adapter), MOMENTS))
    there = take(adapter)
    mine, theirs = without_layout(there.run_state), without_layout(saved.run_state)
    report(case, "state", *unplaced, *differences(saved, there), *unequal(theirs, mine))
    report(case, "losses", *forward(adapter, saved, expected))


def forward(adapter: Any, saved: Saved, expected: list[float]) -> list[str]:
    torch.set_rng_state(saved.rng)
    with torch.no_grad():
        losses = [adapter.engine(tokens).item() for tokens in batches(3, 0)]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, losses)
    return [] if all(one == expected for one in every) else [f"{every} instead of {expected}"]


def main(directory: Path) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    tensors, run_state, rng, expected = torch.load(directory / "state.pt", weights_only=True)
    saved = Saved(tensors, run_state, rng)
    world = dist.get_world_size()
    zero("zero2-to-zero3", "zero3-bf16-sub-groups", saved, expected)
    zero("zero2-to-zero1", "zero1-bf16", saved, expected)

    plain, _ = adapter_ddp.build(1, WIDTH)
    unplaced = put(plain, saved)
    whole = take(plain)
    # Frozen weights were saved in bf16 and are fp32 here: back in bf16 they are the same.
    report("zero2-to-ddp", "state", *unplaced, *differences(whole, saved, cast=True))
    back, _ = build("zero3-bf16-sub-groups", 2)
    unplaced = put(back, Saved(whole.tensors, whole.run_state, rng))
    again = take(back)
    counters = again.run_state["counters"]
    steps = {"global_steps": 3, "global_samples": 3 * BATCH * ACCUMULATION * world, "micro_steps": 3 * ACCUMULATION}
    report("ddp-to-zero3", "state", *unplaced, *differences(whole, again, cast=True), *differences(saved, again))
    report("ddp-to-zero3", "counters", *unequal({**counters, **steps}, counters))
    report("ddp-to-zero3", "losses", *forward(back, saved, expected))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
