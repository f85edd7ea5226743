"""Ways to shard the small awkward model with FSDP2, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard


def mesh_of(case: Mapping[str, Any]) -> DeviceMesh:
    """``hybrid``: so many replicas of a sharded model. Otherwise it is sharded over all ranks."""
    world_size, replicas = dist.get_world_size(), case.get("hybrid", 1)
    if replicas == 1:
        return init_device_mesh("cpu", (world_size,))
    return init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, case: Mapping[str, Any]) -> nn.Module:
    """Block by block, then the rest, in place. Keys of ``case``: hybrid, bf16, offload, reshard, checkpointed, ignored,
    compiled."""
    blocks: Any = model.blocks
    for index, block in enumerate(blocks):
        if case.get("checkpointed"):
            blocks[index] = checkpoint_wrapper(block)
        elif case.get("compiled"):
            blocks[index] = torch.compile(block, backend="eager")
    options: dict[str, Any] = {"mesh": mesh_of(case), "reshard_after_forward": case.get("reshard", True)}
    if case.get("bf16"):
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if case.get("offload"):
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for block in blocks:
        fully_shard(block, **options)
    options["reshard_after_forward"] = case.get("reshard_root")
    ignored = {getattr(model, name) for name in case.get("ignored", ())}
    return fully_shard(model, ignored_params=ignored, **options)
