"""Under torchrun, 4 ranks: FSDP2 in all its ways through its adapter. Prints one RESULT line a check."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from adapter_model import ACCUMULATION, CLIP, Tiny, batches, param_groups
from adapter_state import leave, round_trip
from fsdp2_jobs import shard
from torch import nn
from torch.distributed.tensor import DTensor

from monitor.adapters.base import Adapter
from monitor.adapters.select import adapter_for

WIDE = 151
"""Wide enough that the replicas of hybrid sharding share out matrices in slices."""
CASES: dict[str, dict[str, Any]] = {
    "sharded": {},
    "hybrid": {"hybrid": 2, "width": WIDE},
    "bf16": {"bf16": True},
    "offload": {"offload": True, "optimizer": "sgd"},
    "gathered": {"reshard": False, "looked": True},
    "half-gathered": {"reshard": 2, "looked": True},
    "checkpointed": {"checkpointed": True, "bf16": True},
    "compiled": {"compiled": True},
    "mixed": {"ignored": ["gain"]},
    "adafactor": {"optimizer": "adafactor"},
}
SLOTS: dict[str, tuple[str, ...]] = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def optimizer_of(model: nn.Module, case: Mapping[str, Any]) -> torch.optim.Optimizer:
    groups = param_groups(model)
    kind = case.get("optimizer", "adamw")
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    if kind == "adafactor":
        return torch.optim.Adafactor(groups, lr=1e-2)
    return torch.optim.AdamW(groups, lr=1e-2, foreach=True)


def build(case: Mapping[str, Any], seed: int) -> tuple[Adapter, Callable[[range], list[float]]]:
    torch.manual_seed(seed)
    model: Any = shard(Tiny(case["width"]) if "width" in case else Tiny(), case)
    optimizer = optimizer_of(model, case)

    def train(steps: range) -> list[float]:
        losses = []
        for step in steps:
            for number, tokens in enumerate(batches(step, dist.get_rank())):
                model.set_requires_gradient_sync(number == ACCUMULATION - 1)
                loss = model(tokens)
                (loss / ACCUMULATION).backward()
                losses.append(loss.item())
            for name in case.get("ignored", ()):
                dist.all_reduce(getattr(model, name).grad)
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if isinstance(p, DTensor)], CLIP)
            optimizer.step()
            optimizer.zero_grad()
            if case.get("looked"):  # leaves what was gathered registered in place of the shards
                with torch.no_grad():
                    model(batches(step, 0)[0])
        return losses

    return adapter_for((model, optimizer)), train


def main() -> None:
    dist.init_process_group("gloo")
    wanted = sys.argv[1:] or list(CASES)
    for name in wanted:
        case = CASES[name]
        slots = SLOTS.get(case.get("optimizer", "adamw"))
        round_trip(name, lambda seed, case=case: build(case, seed), slots)  # type: ignore[misc]
    leave()


if __name__ == "__main__":
    main()
