"""What the versions of a unit cost a failure, and how much of that a save takes away.

The unit of damage is the squared relative distance of a layer's weights to what a resume would give back. Other
slots are brought to the same scale by the pace of their layer: moments that are wholly out of date spoil the next
few updates, so they count as weights that are some steps old, whatever the learning rate is. docs/budget.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from policies.base import UnitStats
from store.names import WEIGHTS

LAG = 3.0
"""Steps of its layer's weights that a slot with drift 1 counts as. Measured between -4 and 21 with intervals of 3 to 20
(docs/benchmarks/quality.md): no value is well supported, and runs with 0.3, 3 and 30 could not be told apart."""

GROWTH = 1.5
"""Exponent p of damage ~ t^p between linear drift (2) and a random walk (1)."""

_EARNED = GROWTH / (GROWTH + 1)
"""Share of (damage now x staleness) by which damage now exceeds its mean since the save."""


def gain(one: UnitStats, error: float, scale: float) -> float:
    """Damage times steps that saving the unit now, with relative ``error``, takes away. Below 0: it adds some.

    Infinite where the drift is not known: nothing speaks for the version that there is."""
    drift = math.inf if one.drift is None or math.isnan(one.drift) else one.drift
    moved = max(0.0, drift * drift - one.error * one.error)
    age = max(1, one.staleness or 0)
    return scale * age * (_EARNED * moved + one.error * one.error - error * error)


def scales(stats: Sequence[UnitStats], lags: Mapping[str, float]) -> Mapping[str, Mapping[str, float]]:
    """What a squared drift of 1 costs, for each layer and slot; above 0.

    Weights: 1. Other slots: (lag x pace)^2, the pace being the drift of the layer's weights a step since their
    version. A layer whose weights have none (not measured, not moved) has the root mean square of the others'."""
    paces = {one.unit.layer: found for one in stats if one.unit.slot == WEIGHTS and (found := _pace_squared(one)) > 0}
    usual = math.fsum(paces.values()) / len(paces) if paces else 1.0
    made: dict[str, dict[str, float]] = {}
    for one in stats:
        pace = paces.get(one.unit.layer, usual)
        lag = lags.get(one.unit.slot, LAG)
        made.setdefault(one.unit.layer, {})[one.unit.slot] = 1.0 if one.unit.slot == WEIGHTS else lag * lag * pace
    return MappingProxyType(made)


def _pace_squared(one: UnitStats) -> float:
    if one.drift is None or not one.drift < 1e100 or not one.finite:
        return 0.0
    moved = max(0.0, one.drift * one.drift - one.error * one.error)
    return moved / max(1, one.staleness or 0) ** 2
