"""A training run without training: units drift, decisions are taken, saves take effect at once.

It knows nothing of files or time; bytes come to be at hand by the decision.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from policies.base import Budget, Decision, History, Policy, UnitStats
from policies.bounds import incomplete
from policies.made_up import SLOTS, unversioned, usual_units
from policies.options import expected_bytes, expected_error
from store.names import FROZEN, WEIGHTS, Unit

_SHARE = 0.15
"""Of a full save in bytes that come to be at hand from one decision to the next, where the policy spends."""


@dataclass
class SimulatedRun:
    """AdamW on 7 layers, one of them frozen; weights drift 0.0003 to 0.01 a step, moments ten times as fast.

    spends: bytes are limited. sick: between these steps layer 2 has NaN."""

    policy: Policy
    interval: int
    spends: bool = False
    sick: range = range(0)
    seed: int = 0
    step: int = 0
    commits: int = 0
    units: dict[Unit, UnitStats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._chance = random.Random(f"run {self.seed}")
        for one in unversioned(usual_units(7)):
            if one.position == 1 and one.unit.slot == WEIGHTS:
                unit = Unit(one.unit.layer, FROZEN)
                self.units[unit] = replace(one, unit=unit, moving=False)
            elif one.position != 1:
                self.units[one.unit] = one
        self._rates = {
            unit: (1 if unit.slot == WEIGHTS else 10) * 10 ** self._chance.uniform(-3.5, -2)
            for unit in self.units
            if unit.slot in SLOTS
        }
        self._purse = 0.0

    @property
    def full(self) -> int:
        """Bytes of a full save, raw."""
        return sum(one.nbytes for one in self.units.values())

    def decide(self) -> Decision:
        """Train ``interval`` steps, ask the policy, and commit what it saves."""
        for unit, one in self.units.items():
            self.units[unit] = self._trained(one)
        self.step += self.interval
        shown = tuple(self._shown(one) for one in self.units.values())
        self._purse = min(self._purse + _SHARE * self.full, float(self.full))
        budget = Budget(self._purse) if self.spends else Budget()
        decision = self.policy.select(shown, budget, History(self.step, self.commits))
        if decision.saved and not incomplete(shown, decision):
            self._commit(decision)
        return decision

    def is_sick(self, one: UnitStats) -> bool:
        """Whether its layer holds NaN now."""
        return one.position == 2 and self.step in self.sick

    def _trained(self, one: UnitStats) -> UnitStats:
        if one.staleness is None:
            return one
        moved = sum(self._chance.random() for _ in range(self.interval)) * 2 * self._rates.get(one.unit, 0.0)
        return replace(one, staleness=one.staleness + self.interval, drift=(one.drift or 0.0) + moved)

    def _shown(self, one: UnitStats) -> UnitStats:
        if self.is_sick(one):
            return replace(one, finite=False, drift=None)
        return one if self.policy.needs_drift or not one.moving else replace(one, drift=None)

    def _commit(self, decision: Decision) -> None:
        first = self.commits == 0
        self.commits += 1
        for unit in decision.saved:
            one, encoding = self.units[unit], decision.choices[unit].encoding or ""
            cost, error = expected_bytes(one, encoding), expected_error(one, encoding)
            self._purse -= 0 if first else cost
            self.units[unit] = replace(
                one, staleness=0, drift=error, error=error, encoding=encoding, stored_bytes=int(cost)
            )
