"""A DeepSpeed engine's whole state by parameter name, collected with torch and DeepSpeed only.

It shares no code with what writes or reads driftpoint's files: parameters are found in the flat partitions by the
places that the engine itself slices its working weights with.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

MOMENTS = ("exp_avg", "exp_avg_sq")


def collect(engine: Any) -> dict[str, Any]:
    """Collective. Whole tensors by name, then by kind; steps by parameter, hyperparameters by group; counters."""
    stage = int(engine.zero_optimization_stage())
    trained = {0: _plain, 3: _sliced}.get(stage, _flat)(engine)
    return {
        "trained": {name: {key: tensor.clone() for key, tensor in state.items()} for name, state in trained.items()},
        "working": working_weights(engine),
        "buffers": {name: buffer.clone() for name, buffer in engine.module.named_buffers()},
        "steps": _steps(engine, stage),
        "hyper": [
            {key: value for key, value in group.items() if key != "params"} for group in _base(engine).param_groups
        ],
        "clip": float(getattr(engine.optimizer, "clip_grad", engine.gradient_clipping())),
        "scheduler": engine.lr_scheduler.state_dict(),
        "counters": [engine.global_steps, engine.global_samples, engine.skipped_steps],
        "scale": float(getattr(engine.optimizer, "loss_scale", 1.0)) if engine.fp16_enabled() else 1.0,
    }


def working_weights(engine: Any) -> dict[str, torch.Tensor]:
    """What forward passes compute with, frozen parameters included. Collective."""
    import deepspeed

    out = {}
    for name, parameter in engine.module.named_parameters():
        if getattr(parameter, "ds_numel", parameter.numel()) == 0:
            continue  # stage 3 cannot gather it
        if hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters([parameter]):
                out[name] = parameter.data.clone()
        else:
            out[name] = parameter.data.clone()
    return out


def _base(engine: Any) -> torch.optim.Optimizer:
    return getattr(engine.optimizer, "optimizer", engine.optimizer)  # type: ignore[no-any-return]


def _plain(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    state = engine.optimizer.state
    return {
        name: {"fp32": parameter.data, **{key: state[parameter][key] for key in MOMENTS}}
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad and parameter.numel()
    }


def _sliced(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    return {
        name: {
            "fp32": safe_get_full_fp32_param(parameter),
            **{key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS},
        }
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad and parameter.ds_numel
    }


def _flat(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    optimizer, names = engine.optimizer, engine.param_names
    out = {}
    for params, offsets, master in _groups(optimizer):
        state = optimizer.optimizer.state[master]
        whole = {"fp32": _gathered(master.data), **{key: _gathered(state[key]) for key in MOMENTS}}
        for parameter, offset in zip(params, offsets, strict=True):
            numel = parameter.numel()
            out[names[parameter]] = {
                key: tensor[offset : offset + numel].view(parameter.shape) for key, tensor in whole.items()
            }
    return out


def _groups(optimizer: Any) -> list[tuple[list[Any], list[int], torch.Tensor]]:
    if hasattr(optimizer, "bf16_groups"):
        out = []
        for params, master in zip(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, strict=True):
            ends = torch.tensor([parameter.numel() for parameter in params]).cumsum(0).tolist()
            out.append((params, [0, *ends[:-1]], master))
        return out
    return list(
        zip(
            optimizer.round_robin_bit16_groups,
            optimizer.round_robin_bit16_offsets,
            optimizer.single_partition_of_fp32_groups,
            strict=True,
        )
    )


def _gathered(part: torch.Tensor) -> torch.Tensor:
    every = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(every, part.contiguous())
    return torch.cat(every)


def _steps(engine: Any, stage: int) -> dict[str, float]:
    optimizer, names = engine.optimizer, engine.param_names
    if stage == 0:
        state = optimizer.state
        return {name: float(state[p]["step"]) for name, p in engine.module.named_parameters() if p in state}
    if stage == 3:
        flats = zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    else:
        flats = ((params, master) for params, _, master in _groups(optimizer))
    state = optimizer.optimizer.state
    return {names[p]: float(state[master]["step"]) for params, master in flats for p in params}
