"""Choose the adapter for a training framework. DeepSpeed and DTensor are imported only when they are used."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from monitor.adapters.base import Adapter
from monitor.adapters.optimizer_state import JointOptimizer
from monitor.adapters.pytorch import PyTorchAdapter
from store.errors import UnsupportedError
from store.text import listed

_ACCEPTED = (
    "pass a DeepSpeed engine (ZeRO stage 1, 2, 3, or stage 0 in fp32), or one tuple, attach((model, optimizer)), of a "
    "torch module, possibly in DistributedDataParallel or made of DTensors (fully_shard, parallelize_module), and a "
    'torch optimizer or a list of them; of several models a mapping, attach({"generator": (model, optimizer), ...})'
)


@dataclass(frozen=True)
class Unwrapped:
    """The module inside DistributedDataParallel and torch.compile.

    group: ranks that hold replicas, None for all. replica: what averages gradients. broadcasting: the same if it
    overwrites all buffers with those of rank 0."""

    module: nn.Module
    group: dist.ProcessGroup | None = None
    broadcasting: nn.parallel.DistributedDataParallel | None = None
    replica: nn.parallel.DistributedDataParallel | None = None


def adapter_for(target: Any) -> Adapter:
    """Return the adapter of a DeepSpeed engine, a ``(model, optimizer)`` tuple, or a mapping of names to such tuples.

    Raise UnsupportedError for anything else."""
    if isinstance(target, Mapping):
        return _named_adapter(target)
    if isinstance(target, tuple | list) and len(target) == 2:
        return adapter_for(target[0]) if _is_engine(target[0]) else _module_adapter({"": target})
    if _is_engine(target):
        from monitor.adapters.deepspeed import engine_adapter

        return engine_adapter(target)
    raise UnsupportedError(f"cannot attach to a {type(target).__name__}; {_ACCEPTED}")


def _is_engine(target: Any) -> bool:
    kinds = type(target).__mro__
    return any(kind.__name__ == "DeepSpeedEngine" and kind.__module__.startswith("deepspeed.") for kind in kinds)


def _named_adapter(targets: Mapping[Any, Any]) -> Adapter:
    for name, target in targets.items():
        if type(name) is not str or not name or "." in name or hasattr(nn.Module(), name):
            raise UnsupportedError(f"{name!r} cannot name a model: use a string without dots, such as 'generator'")
        if not isinstance(target, tuple | list) or len(target) != 2 or _is_engine(target[0]):
            raise UnsupportedError(f"{name!r} is a {type(target).__name__} and no (model, optimizer); {_ACCEPTED}")
    return _module_adapter(targets)


def _module_adapter(targets: Mapping[str, Any]) -> Adapter:
    """Return the adapter of (model, optimizer) tuples by name. One model without a name keeps its parameters' names."""
    found: dict[int, torch.optim.Optimizer] = {}
    wrappers, parts, root = list[tuple[Any, torch.optim.Optimizer]](), list[Unwrapped](), nn.Module()
    for name, (model, own) in targets.items():
        for optimizer in own if isinstance(own, tuple | list) else (own,):
            inner, outer = _without_wrappers(optimizer)
            if not isinstance(model, nn.Module) or not isinstance(inner, torch.optim.Optimizer):
                given = f"({type(model).__name__}, {type(inner).__name__})"
                raise UnsupportedError(f"cannot attach to {given}; {_ACCEPTED}")
            found[id(inner)] = inner  # models may share one
            wrappers += [(wrapper, inner) for wrapper in outer]
        parts.append(unwrap(model))
        if name:
            root.add_module(name, parts[-1].module)
    module, optimizers = parts[0].module if "" in targets else root, list(found.values())
    if not optimizers:
        raise UnsupportedError(f"there is no optimizer; {_ACCEPTED}")
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules()):
        raise UnsupportedError(
            "FullyShardedDataParallel (FSDP1) is not supported: use fully_shard of torch.distributed.fsdp (with "
            f"Accelerate and the Trainer fsdp_version: 2); {_ACCEPTED}"
        )
    optimizer = optimizers[0] if len(optimizers) == 1 else JointOptimizer(optimizers)
    group = _common_group(parts)
    if group is None and _is_sharded(module):
        from monitor.adapters.dtensor import DTensorAdapter

        return DTensorAdapter(module, optimizer, wrappers)
    broadcasting = {name: part.broadcasting for name, part in zip(targets, parts, strict=True)}
    replicas = [part.replica for part in parts if part.replica is not None]
    return PyTorchAdapter(module, optimizer, group, wrappers, broadcasting=broadcasting, replicas=replicas)


def _without_wrappers(optimizer: Any) -> tuple[Any, list[Any]]:
    """Return the inner optimizer, and a launcher's wrappers, such as Accelerate's, which have no state of their own."""
    wrappers = []
    while isinstance(base := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        wrappers.append(optimizer)
        optimizer = base
    return optimizer, wrappers


def _common_group(parts: Sequence[Unwrapped]) -> dist.ProcessGroup | None:
    """Return the ranks that hold replicas of the models, None for all. Raise UnsupportedError if they differ."""
    groups = [part.group for part in parts]
    if len({None if group is None else tuple(dist.get_process_group_ranks(group)) for group in groups}) > 1 and any(
        dist.get_world_size(group) < dist.get_world_size() for group in groups
    ):
        raise UnsupportedError("the models are replicated over different ranks: use one process group for all of them")
    return next((group for group in groups if group is not None), None)


def _is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to the module or a part of it, or a parameter is a DTensor.

    Class names are compared so that neither has to be imported."""
    return any(
        base.__name__ == "FSDPModule" and base.__module__.startswith("torch.")
        for part in module.modules()
        for base in type(part).__mro__
    ) or any(type(parameter.data).__name__ == "DTensor" for parameter in module.parameters())


def unwrap(model: nn.Module) -> Unwrapped:
    """Return the module inside its wrappers. Raise UnsupportedError if DDP leaves parameters unsynchronized."""
    found = Unwrapped(model)
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            ignored = set(model.parameters_to_ignore)
            local = sorted(fqn for fqn, one in model.module.named_parameters() if fqn in ignored and one.requires_grad)
            if local:
                raise UnsupportedError(
                    f"DistributedDataParallel does not synchronize {listed(local)}, so every rank has values of its "
                    "own, and a store holds one: let it synchronize them, or make them buffers"
                )
            follow = model.broadcast_buffers and not ignored and not hasattr(model, "buffer_hook")
            found = Unwrapped(model.module, model.process_group, model if follow else None, model)
        elif isinstance(model, nn.parallel.DataParallel):
            found = replace(found, module=model.module)
        elif "_orig_mod" in model._modules:
            found = replace(found, module=model.get_submodule("_orig_mod"))
        else:
            return found
        model = found.module
