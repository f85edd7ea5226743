"""What the checks of layouts at other stages and world sizes train, in processes with driftpoint and without.

A family is a model with options of DeepSpeed's that every stage takes; a source is a family that was trained at one
stage and world size; a target is a source, written for another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from adapter_model import VOCABULARY, Tiny, config, param_groups
from torch import nn

SAVED, LAST = 2, 4
WORLDS = (1, 2, 3, 4)
WIDTH = 5


class LowRank(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, width))
        self.b = nn.Parameter(torch.zeros(width, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.base(x) + x @ self.a.T @ self.b.T


class Adapted(nn.Module):
    """Nearly all frozen; three param groups, one of them a single element; a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.embed.requires_grad_(False)
        self.layers = nn.ModuleList([LowRank(WIDTH) for _ in range(3)])
        self.register_buffer("scale", torch.full((WIDTH,), 1.5))
        self.spare = nn.Linear(3, 0, bias=False)  # never called: DeepSpeed cannot gather it at stage 3
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = (self.embed(tokens) * self.scale).to(self.embed.weight.dtype)
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(x, self.embed.weight) * self.temperature
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY).float(), tokens[:, 1:].reshape(-1))


def adapted_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Three groups, each with a weight decay and a rate of its own."""
    named = dict(model.named_parameters())
    first = [p for name, p in named.items() if name.endswith((".a", "embed.weight"))]
    second = [p for name, p in named.items() if name.endswith((".b", "base.weight", "spare.weight"))]
    return [
        {"params": first, "weight_decay": 0.1},
        {"params": second, "weight_decay": 0.01, "lr": 3e-3},
        {"params": [named["temperature"]], "weight_decay": 0.0, "lr": 1e-3},
    ]


@dataclass(frozen=True)
class Family:
    """precision: ``bf16``, ``fp32`` or ``fp16``. zero: options beside the stage, for every stage."""

    precision: str
    zero: dict[str, Any]
    adapters: bool = False


FAMILIES = {
    "fp32": Family("fp32", {}),
    "bf16-sub-groups": Family("bf16", {"sub_group_size": 300, "stage3_param_persistence_threshold": 50}),
    "bf16-round-robin": Family("bf16", {"round_robin_gradients": True, "sub_group_size": 1}),
    "fp32-aligned-round-robin": Family("fp32", {"round_robin_gradients": True, "parameter_alignment": True}),
    "bf16-aligned": Family("bf16", {"parameter_alignment": True}),
    "bf16-fp32-accumulation": Family("bf16", {"data_types": {"grad_accum_dtype": "fp32"}}),
    "fp16": Family("fp16", {}),
    "bf16-offload": Family("bf16", {"offload_optimizer": {"device": "cpu"}, "sub_group_size": 600}),
    "adapters": Family("bf16", {}, adapters=True),
    "adapters-round-robin": Family("bf16", {"round_robin_gradients": True, "sub_group_size": 7}, adapters=True),
}


@dataclass(frozen=True)
class Source:
    """A family at a stage on ``world`` ranks."""

    family: str
    stage: int
    world: int

    @property
    def name(self) -> str:
        """Of its directory."""
        return f"{self.family}-zero{self.stage}-on{self.world}"


@dataclass(frozen=True)
class Target:
    """A source, written for ``stage`` on ``world`` ranks."""

    source: Source
    stage: int
    world: int

    @property
    def name(self) -> str:
        """Of its directory."""
        return f"{self.source.name}-to-zero{self.stage}-on{self.world}"


SOURCES = {
    source.name: source
    for source in (
        Source("fp32", 2, 2),
        Source("fp32", 0, 2),
        Source("bf16-sub-groups", 3, 2),
        Source("bf16-round-robin", 2, 2),
        Source("fp32-aligned-round-robin", 1, 2),
        Source("bf16-fp32-accumulation", 1, 2),
        Source("fp16", 2, 2),
        Source("adapters", 2, 2),
        Source("adapters-round-robin", 3, 2),
        Source("bf16-round-robin", 2, 3),
        Source("bf16-aligned", 3, 3),
    )
}

_WANTED: dict[str, tuple[tuple[int, int], ...]] = {
    "fp32-zero2-on2": ((3, 2), (3, 1), (2, 1), (1, 4), (3, 3)),
    "fp32-zero0-on2": ((2, 2), (3, 1)),
    "bf16-sub-groups-zero3-on2": ((2, 2), (2, 1), (3, 1), (3, 3), (3, 4), (1, 3)),
    "bf16-round-robin-zero2-on2": ((2, 1), (2, 3), (1, 4), (3, 2)),
    "fp32-aligned-round-robin-zero1-on2": ((2, 3), (1, 4), (3, 2), (2, 1)),
    "bf16-fp32-accumulation-zero1-on2": ((2, 2), (1, 3), (1, 4), (3, 1)),
    "fp16-zero2-on2": ((3, 3), (1, 1)),
    "adapters-zero2-on2": ((3, 2), (2, 4), (1, 1), (3, 4)),
    "adapters-round-robin-zero3-on2": ((2, 3), (1, 2), (3, 4)),
    "bf16-round-robin-zero2-on3": ((2, 2), (3, 1)),
    "bf16-aligned-zero3-on3": ((2, 2), (1, 4)),
}

TARGETS = {
    target.name: target
    for name, wanted in _WANTED.items()
    for target in (Target(SOURCES[name], stage, world) for stage, world in wanted)
}


def universal_settings(family: str, stage: int) -> dict[str, Any]:
    """The configuration of an engine that loads a universal checkpoint: never with gradients dealt out in turn."""
    out = settings(family, stage)
    if not out["zero_optimization"].get("parameter_alignment"):
        out["zero_optimization"].pop("round_robin_gradients", None)
    return {**out, "checkpoint": {"load_universal": True}}


def loads_universally(target: Target) -> bool:
    """DeepSpeed's ZeRO-1/2 cannot where a rank holds nothing of a param group, here of the one with one element."""
    return target.stage == 3 or target.world == 1 or not FAMILIES[target.source.family].adapters


def settings(family: str, stage: int) -> dict[str, Any]:
    """The configuration of an engine."""
    one = FAMILIES[family]
    out = config(stage, "bf16" if one.precision == "bf16" else "fp32", **one.zero)
    if one.precision == "fp16":
        out["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 3}
    if one.adapters:
        scheduler = out["scheduler"]["params"]
        scheduler["warmup_min_lr"], scheduler["warmup_max_lr"] = [1e-4, 2e-4, 3e-4], [1e-2, 3e-3, 1e-3]
    return out


def engine_of(
    family: str, seed: int, configuration: dict[str, Any], prepare: Callable[[nn.Module], None] = lambda _: None
) -> Any:
    """A fresh engine; other seeds give other weights. prepare: called with the model before DeepSpeed has it."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    # torch computes in fp16 on the CPU; DeepSpeed believes it does not, for its speed.
    get_accelerator().is_fp16_supported = lambda: True
    torch.manual_seed(seed)
    model = Adapted() if FAMILIES[family].adapters else Tiny()
    prepare(model)
    groups = adapted_groups(model) if FAMILIES[family].adapters else param_groups(model)
    return deepspeed.initialize(model=model, model_parameters=groups, config=configuration)[0]
