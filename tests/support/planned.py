"""Checkpoints without bytes, for layouts: names, shapes, and optimizer state by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from merger.checkpoint import SLOT_OF_KIND, Checkpoint
from merger.io.blocks import Block, Extent, xxh3
from store.certificate import Certificate
from store.fragments import FragmentIndex
from store.schema import TensorRecord
from store.storage.local import LocalFiles

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Tensor:
    """A parameter or buffer. step: the optimizer's; None where it keeps nothing. scalars: what it keeps besides."""

    shape: tuple[int, ...]
    step: float | None = 10.0
    kind: str = "trainable"
    slots: Sequence[str] = MOMENTS
    scalars: Mapping[str, Any] | None = None


def planned(
    tensors: Mapping[str, Tensor],
    groups: Sequence[Sequence[str]],
    *,
    config: Mapping[str, Any] | None = None,
    stage: int = 2,
    world: int = 2,
    hyper: Sequence[Mapping[str, Any]] = (),
) -> Checkpoint:
    """A checkpoint of a DeepSpeed run in fp32. A tensor's layer is the first part of its name."""
    block = Block(LocalFiles(Path("nowhere")), "nothing", 0, 0, xxh3, "", "no block")
    extents, scalars, slots = [], {}, {}
    for fqn, one in tensors.items():
        kept = list(one.slots) if one.step is not None else []
        for slot in (SLOT_OF_KIND[one.kind], *kept):
            extents.append(Extent(fqn, slot, 0, math.prod(one.shape), "F32", block, 0))
        if one.kind == "trainable":
            slots[fqn] = kept
            step = {} if one.step is None else {"step": torch.tensor(one.step)}
            scalars[fqn] = {**step, **(one.scalars or {})}
    described = [
        {"params": list(fqns), "hyper": dict(hyper[i]) if hyper else {"lr": 0.1, "betas": [0.9, 0.99]}}
        for i, fqns in enumerate(groups)
    ]
    state = {
        "counters": {"global_steps": 10, "global_samples": 20, "micro_steps": 10, "skipped_steps": 0},
        "lr_scheduler": None,
        "loss_scaler": None,
        "optimizer": "AdamW",
        "param_groups": described,
        "scalars": scalars,
        "slots": slots,
    }
    facts = {
        "ds_version": "0.19.8",
        "zero_stage": stage,
        "world_size": world,
        "dtype": "fp32",
        "ds_config": {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, **(config or {})},
        "zero_optimizer": "DeepSpeedZeroOptimizer",
        "dynamic_loss_scale": False,
        "clip_grad": 1.0,
        "state_dict_names": list(tensors),
        "buffer_names": [fqn for fqn, one in tensors.items() if one.kind == "buffer"],
        "param_groups": [{"params": list(fqns)} for fqns in groups],
    }
    records = {
        fqn: TensorRecord(layer=fqn.partition(".")[0] or fqn or "none", shape=one.shape, dtype="F32", kind=one.kind)
        for fqn, one in tensors.items()
    }
    certificate = Certificate("0", "00000010-000001", 10, True, (), ())
    return Checkpoint("a run", "deepspeed", 10, records, (), FragmentIndex(extents), state, facts, {}, certificate)
