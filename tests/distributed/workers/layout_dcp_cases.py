"""What the checks of the DCP layout train, plain or with DeepSpeed, and what FSDP2 is built around."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from adapter_model import Tiny, batches, param_groups

DEEPSPEED = ("zero1-bf16", "zero3-bf16-sub-groups")
CASES = ("plain", "fsdp2", *DEEPSPEED)
STEPS = 3


def plain(seed: int) -> tuple[Tiny, torch.optim.AdamW]:
    """Model and optimizer, frozen parameters left in its groups."""
    torch.manual_seed(seed)
    model = Tiny()
    return model, torch.optim.AdamW(param_groups(model), lr=1e-2)


def train_plain(model: Tiny, optimizer: torch.optim.AdamW) -> None:
    """All steps, the same on all ranks."""
    for step in range(STEPS):
        torch.manual_seed(step)
        for tokens in batches(step, 0):
            model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(seed: int) -> tuple[Any, torch.optim.AdamW]:
    """The same under FSDP2, over all ranks, the optimizer made after sharding as it has to be."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = Tiny()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(param_groups(model), lr=0.5)
