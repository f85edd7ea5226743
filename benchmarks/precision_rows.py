"""Rows of the precision benchmark: each is a configuration, and perhaps a change of the state that a resume gives.

A change stands for an encoding or for a noise that the product does not have. To add a row, add it here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.learner import Learner
from benchmarks.turns import TurnsConfig
from monitor.config.load import Config
from store.encoding import BLOCK

EVERY = 10
EXACT = "exact"
COMPACT = "compact"


@dataclass(frozen=True)
class Row:
    """settings: what differs from a configuration that saves everything, exactly, every 10 steps. ``turns`` among
    them takes :class:`TurnsConfig`. change: done to the learner after each resume."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[Learner], None] | None = None

    def config(self, store: Path) -> Config:
        """For ``monitor.attach``."""
        values = {
            "store": str(store),
            "every": EVERY,
            "staging": "eager",
            "metrics": {"enabled": False},
            "retention": {"keep_last": 1, "log_spaced": False},
            **self.settings,
        }
        return (TurnsConfig if "turns" in values else Config).model_validate(values)


@torch.no_grad()
def nudge(learner: Learner) -> None:
    """Every weight by one unit in the last of its 24 places, up or down: the least change that there is."""
    generator = torch.Generator().manual_seed(0)
    for parameter in learner.model.parameters():
        signs = torch.randint(0, 2, parameter.shape, generator=generator, dtype=torch.int32) * 2 - 1
        parameter.view(torch.int32).add_(signs)


@torch.no_grad()
def four_bits(learner: Learner) -> None:
    """Weights as bfloat16, moments in 4 bits and one scale for 64: the analogues of the 8-bit encodings."""
    for parameter in learner.model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))
        state = learner.optimizer.state[parameter]
        state["exp_avg"].copy_(_signed(state["exp_avg"]))
        state["exp_avg_sq"].copy_(_rounded_up(state["exp_avg_sq"]))


@torch.no_grad()
def nearest(learner: Learner) -> None:
    """Second moments in 8 bits by their square roots, to the nearest code, and 1 at least where they are not 0."""
    for parameter in learner.model.parameters():
        values = learner.optimizer.state[parameter]["exp_avg_sq"]
        roots = _rows(values).sqrt()
        scales = (roots.amax(1, keepdim=True) / 255).clamp(min=torch.finfo(torch.float32).tiny)
        codes = (roots / scales).round().clamp(min=1) * (roots > 0)
        values.copy_(_as((codes * scales).square(), values))


def _signed(values: torch.Tensor) -> torch.Tensor:
    rows = _rows(values)
    scales = (rows.abs().amax(1, keepdim=True) / 7).clamp(min=torch.finfo(torch.float32).tiny)
    return _as((rows / scales).round() * scales, values)


def _rounded_up(values: torch.Tensor) -> torch.Tensor:
    """Of square roots, so that no second moment is taken for less than it is."""
    roots = _rows(values).sqrt()
    scales = (roots.amax(1, keepdim=True) / 15).clamp(min=torch.finfo(torch.float32).tiny)
    return _as(((roots / scales).ceil() * scales).square(), values)


def _rows(values: torch.Tensor) -> torch.Tensor:
    flat = values.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def _as(rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return rows.view(-1)[: values.numel()].view(values.shape)


_WEIGHTS = {"fp32": "int16-shared-exponent"}
_FIRST = {"exp_avg": "int8-shared-exponent-128"}
_SECOND = {"exp_avg_sq": "int8-log2"}

# The bytes of rows with a change are those that were saved, not what their encoding would take.
ROWS = (
    Row(EXACT),
    Row("exact, nudged", change=nudge),
    Row(COMPACT, {"encoding": "compact"}),
    Row("compact, eighth", {"encoding": "compact", "turns": 8}),
    Row("4-bit moments", change=four_bits),
)

PARTS = (
    Row("careful", {"encoding": "careful"}),
    Row("weights only", {"encoding": _WEIGHTS}),
    Row("first moments only", {"encoding": _FIRST}),
    Row("second moments only", {"encoding": _SECOND}),
    Row("second moments to the nearest", change=nearest),
)
"""With 24 bits of the weights instead of 16; what makes up compact, one by one; and second moments in 8 bits that are
not rounded up, tried outside the store. Run where asked for."""
