"""Choose the adapter for a training framework. DeepSpeed and DTensor are imported only when they are used."""

from typing import Any

import torch
from torch import nn

from monitor.adapters.base import Adapter
from monitor.adapters.pytorch import PyTorchAdapter, unwrap
from store.errors import UnsupportedError

_ACCEPTED = (
    "pass a DeepSpeed engine (ZeRO stage 1, 2, 3, or stage 0 in fp32), or one tuple, attach((model, optimizer)), of a "
    "torch module, possibly in DistributedDataParallel or made of DTensors (fully_shard, parallelize_module), and a "
    "torch optimizer"
)


def adapter_for(target: Any) -> Adapter:
    """Return the adapter of a DeepSpeed engine or a ``(model, optimizer)`` tuple.

    Raise UnsupportedError for anything else."""
    if isinstance(target, tuple | list) and len(target) == 2:
        model, optimizer = target
        return adapter_for(model) if _is_engine(model) else _module_adapter(model, optimizer)
    if _is_engine(target):
        from monitor.adapters.deepspeed import engine_adapter

        return engine_adapter(target)
    raise UnsupportedError(f"cannot attach to a {type(target).__name__}; {_ACCEPTED}")


def _is_engine(target: Any) -> bool:
    return any(
        base.__name__ == "DeepSpeedEngine" and base.__module__.startswith("deepspeed.") for base in type(target).__mro__
    )


def _module_adapter(model: Any, optimizer: Any) -> Adapter:
    wrappers = []  # a launcher's (such as Accelerate's) have no state but the inner optimizer's
    while isinstance(base := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        wrappers.append(optimizer)
        optimizer = base
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        target = f"({type(model).__name__}, {type(optimizer).__name__})"
        raise UnsupportedError(f"cannot attach to {target}; {_ACCEPTED}")
    inner = unwrap(model)
    module = inner.module
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules()):
        raise UnsupportedError(
            "FullyShardedDataParallel (FSDP1) is not supported: use fully_shard of torch.distributed.fsdp (with "
            f"Accelerate and the Trainer fsdp_version: 2); {_ACCEPTED}"
        )
    if inner.group is None and _is_sharded(module):
        from monitor.adapters.dtensor import DTensorAdapter

        return DTensorAdapter(module, optimizer, wrappers)
    return PyTorchAdapter(module, optimizer, inner.group, wrappers, buffers_follow_rank0=inner.buffers_follow_rank0)


def _is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to the module or a part of it, or a parameter is a DTensor.

    Class names are compared so that neither has to be imported."""
    return any(
        base.__name__ == "FSDPModule" and base.__module__.startswith("torch.")
        for part in module.modules()
        for base in type(part).__mro__
    ) or any(type(parameter.data).__name__ == "DTensor" for parameter in module.parameters())
