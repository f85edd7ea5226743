"""What the merge checks train, before and after: shared by the process that saves and the one without driftpoint."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from adapter_model import Tiny, batches, config, engine, param_groups

CPU = {"device": "cpu"}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "zero0-fp32": (0, "fp32", {}),
    "zero1-bf16": (1, "bf16", {}),
    "zero1-fp32-round-robin": (1, "fp32", {"round_robin_gradients": True}),
    "zero1-bf16-fp32-accumulation": (1, "bf16", {"data_types": {"grad_accum_dtype": "fp32"}}),
    "zero2-bf16-round-robin": (2, "bf16", {"round_robin_gradients": True}),
    "zero2-bf16-aligned-round-robin": (2, "bf16", {"parameter_alignment": True, "round_robin_gradients": True}),
    "zero2-fp32": (2, "fp32", {}),
    "zero3-bf16-sub-groups": (3, "bf16", {"sub_group_size": 300, "stage3_param_persistence_threshold": 50}),
    "zero3-fp32": (3, "fp32", {}),
    "zero1-bf16-elastic": (1, "bf16", {"elastic_checkpoint": True}),
    "zero2-fp16": (2, "fp16", {}),
    "zero3-fp16": (3, "fp16", {}),
    "zero3-bf16-offload": (3, "bf16", {"offload_optimizer": CPU, "offload_param": CPU, "sub_group_size": 600}),
}
COMPOSITES = ("zero1-bf16", "zero2-fp32", "zero3-bf16-sub-groups")
EARLIER, SAVED, LAST = 2, 4, 7
SLOTS = ("fp32", "exp_avg", "exp_avg_sq")


def build(case: str, seed: int) -> Any:
    """A fresh engine; other seeds give other weights."""
    stage, precision, zero = CASES[case]
    return _half(seed, stage) if precision == "fp16" else engine(seed, stage, precision, **zero)


def _half(seed: int, stage: int) -> Any:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    # torch computes in fp16 on the CPU; DeepSpeed believes it does not, for its speed.
    get_accelerator().is_fp16_supported = lambda: True
    torch.manual_seed(seed)
    model = Tiny()
    scaling = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 3}
    settings = {**config(stage, "fp32"), "fp16": scaling}
    return deepspeed.initialize(model=model, model_parameters=param_groups(model), config=settings)[0]


def train(built: Any, steps: range) -> list[str]:
    """Train optimizer steps ``steps`` and return each micro-batch's loss to the last bit, in hex."""
    losses = []
    for step in steps:
        torch.manual_seed(1000 * step + dist.get_rank())  # DeepSpeed saves no random-number state
        for tokens in batches(step, dist.get_rank()):
            loss = built(tokens)
            built.backward(loss)
            built.step()
            losses.append(loss.item().hex())
    return losses


def leave() -> None:
    """End without tearing down: gloo's threads can abort the process when many engines lived in it."""
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def whole_state(built: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Every trained parameter's fp32 weights and moments, whole, as DeepSpeed's own functions give them."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    link = getattr(built.optimizer, "_lazy_init_hp_params_optimizer_state", None)
    if link is not None:  # DeepSpeed links too early, before there are moments, and not at all after a load
        built.optimizer._hp_optimizer_states_linked = False
        link()
    out = {}
    for name, parameter in built.module.named_parameters():
        if parameter.requires_grad:
            moments = {slot: safe_get_full_optimizer_state(parameter, slot) for slot in SLOTS[1:]}
            found = {"fp32": safe_get_full_fp32_param(parameter), **moments}
            out[name] = {slot: tensor.detach().clone() for slot, tensor in found.items()}
    return out
