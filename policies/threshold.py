"""Policy ``threshold``: what has moved far enough.

Drift is relative to what a resume would give back, so one threshold serves layers of any size. Slots differ
in how fast they move by nature (first moments turn over within a few steps), hence a threshold for each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from policies.base import Budget, Choice, Decision, History, UnitStats
from policies.reason import compared
from policies.setting import check_number, described
from store.errors import ConfigError
from store.names import RAW


@dataclass(frozen=True)
class Threshold:
    """Saves the units whose drift is at least ``threshold``.

    threshold: relative, >= 0; at 0 everything is saved. slots: other thresholds for the slots it names.
    A unit whose drift is not known, or is not a number though its values are finite, is saved.
    """

    threshold: float
    slots: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_number("policy threshold", "threshold", self.threshold)
        if not isinstance(self.slots, Mapping):
            raise ConfigError(
                "policy threshold: slots must map names of slots to thresholds, such as {exp_avg: 0.1}, "
                f"not {described(self.slots)}"
            )
        for slot, limit in self.slots.items():
            if not isinstance(slot, str):
                raise ConfigError(f"policy threshold: slots must have names for keys, not {described(slot)}")
            check_number("policy threshold", f"slots.{slot}", limit)
        object.__setattr__(self, "slots", dict(self.slots))  # a copy: the caller may change theirs

    @property
    def name(self) -> str:
        """``threshold``."""
        return "threshold"

    @property
    def needs_drift(self) -> bool:
        """True."""
        return True

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        """The units at or above their threshold."""
        del budget, history
        return Decision({one.unit: self._choice(one) for one in stats})

    def _choice(self, one: UnitStats) -> Choice:
        limit = self.slots.get(one.unit.slot, self.threshold)
        if one.drift is None:
            return Choice(RAW, "no version yet" if one.staleness is None else "drift not measured")
        if math.isnan(one.drift):
            return Choice(RAW, "drift is not a number")
        if one.drift >= limit:
            return Choice(RAW, compared("drift", one.drift, ">=", "threshold", limit))
        return Choice(None, compared("drift", one.drift, "<", "threshold", limit))
