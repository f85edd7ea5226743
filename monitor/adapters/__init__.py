"""adapter_for(): choose the adapter.

One file per training framework, behind the protocol in ``base``.

Choosing the adapter for what the user trains with. Nothing of DeepSpeed is imported for anything else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from monitor.adapters.base import Adapter
from monitor.adapters.pytorch import PyTorchAdapter, unwrap
from store.errors import UnsupportedError

_ACCEPTED = (
    "accepted: a DeepSpeed engine (ZeRO stage 1, 2, 3, or stage 0 in fp32), or a tuple (model, optimizer) of a "
    "torch module, possibly in DistributedDataParallel or sharded by fully_shard (FSDP2), and a torch optimizer"
)


def adapter_for(target: Any) -> Adapter:
    """The adapter for a DeepSpeed engine or a ``(model, optimizer)`` tuple.

    Raises UnsupportedError, saying what is accepted, for anything else.
    """
    if isinstance(target, tuple | list) and len(target) == 2:
        model, optimizer = target
        if _is_engine(model):
            return adapter_for(model)
        return _module_adapter(model, *_wrappers(optimizer))
    if _is_engine(target):
        from monitor.adapters.deepspeed import engine_adapter

        return engine_adapter(target)
    raise UnsupportedError(f"cannot attach to a {type(target).__name__}; {_ACCEPTED}")


def _is_engine(target: Any) -> bool:
    return any(
        base.__name__ == "DeepSpeedEngine" and base.__module__.startswith("deepspeed.") for base in type(target).__mro__
    )


def _module_adapter(model: Any, *optimizers: Any) -> Adapter:
    *around, optimizer = optimizers
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        found = f"({type(model).__name__}, {type(optimizer).__name__})"
        raise UnsupportedError(f"cannot attach to {found}; {_ACCEPTED}")
    module, group = unwrap(model)
    for part in module.modules():
        if type(part).__name__ == "FullyShardedDataParallel":
            raise UnsupportedError(
                "FullyShardedDataParallel (FSDP1) is not handled: use fully_shard of torch.distributed.fsdp (with "
                f"Accelerate and the Trainer fsdp_version: 2); {_ACCEPTED}"
            )
    if group is None and _is_sharded(module):
        from monitor.adapters.fsdp2 import Fsdp2Adapter

        return Fsdp2Adapter(module, optimizer, around)
    return PyTorchAdapter(module, optimizer, group, around)


def _is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to the module or a part of it, or a parameter is a DTensor.

    Told by names: neither need be imported for anything else."""
    return any(
        base.__name__ == "FSDPModule" and base.__module__.startswith("torch.")
        for part in module.modules()
        for base in type(part).__mro__
    ) or any(type(parameter.data).__name__ == "DTensor" for parameter in module.parameters())


def _wrappers(optimizer: Any) -> list[Any]:
    """An optimizer behind the wrappers around it, outermost first. A launcher's (such as Accelerate's) has no state but
    the inner optimizer's."""
    inner = getattr(optimizer, "optimizer", None)
    return [optimizer, *_wrappers(inner)] if isinstance(inner, torch.optim.Optimizer) else [optimizer]
