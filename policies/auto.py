"""Implement policy ``auto``: compare two plans by the steps of training that a failure costs, and follow the cheaper.

The plans: everything at once, as often as the bytes allow; or the weights more often, with the moments of some layers
in turn. docs/budget.md states the model. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.base import Budget, Choice, Decision, History, UnitStats, worth_saving
from policies.budget import LAG, BudgetPolicy
from policies.encodings import options
from store.names import BUFFER, WEIGHTS, Unit, group_by_key

PARTS = (1, 2, 4, 8, 16)  # into how many parts the moments may be divided, of which each save stores one
LEAST = 0.05  # correlation below which moments have nothing in common with their version


@dataclass(frozen=True)
class Plan:
    """A way of spending the bytes. ``period``: steps between two saves. ``cost``: steps that a failure costs."""

    text: str
    units: frozenset[Unit]  # of one save
    nbytes: float  # of one save, including the units that bounds demand
    period: float
    cost: float


@dataclass(frozen=True)
class AutoPolicy(BudgetPolicy):
    """Policy ``auto``: the cheaper of two plans, compared anew at each decision. Parameters as of ``budget``;
    ``lags``: steps that a failure costs for each squared drift of 1 of a slot of moments.

    It chooses as ``budget`` does until the rate of the budget is known; if the save of no plan can ever be paid; and
    after a resume, until the process has run for two periods: one that never runs so long would never pay for a plan.
    When the budget is full, it saves everything: more income would be lost."""

    name: ClassVar[str] = "auto"

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        plans = self._plans(stats, budget, history.interval or 1) if budget.per_step else []
        at_hand = math.inf if budget.bytes is None else budget.bytes
        full = budget.most is not None and at_hand >= budget.most
        best = plans[0] if full and plans else min(plans, key=lambda plan: plan.cost, default=None)
        if best is None or (not full and budget.resumed_for is not None and budget.resumed_for < 2 * best.period):
            return super().select(stats, budget, history)
        others = "".join(f"; {plan.text} {plan.cost:.3g}" for plan in plans if plan is not best)
        why = f"{best.text}, every {best.period:.3g} steps, costs a failure {best.cost:.3g} steps{others}"
        why = f"a full budget would earn nothing more; {why}" if full else why
        (fixed, _), chosen = self._fixed(stats, budget), best.units
        if best.nbytes > at_hand:
            chosen, why = frozenset(), f"{best.nbytes:.0f} bytes are needed, {at_hand:.0f} are at hand; {why}"
        return Decision({one.unit: fixed.get(one.unit) or self._choice(one, chosen, why) for one in stats})

    def _choice(self, one: UnitStats, chosen: frozenset[Unit], why: str) -> Choice:
        if one.unit in chosen:
            return Choice(options(one, self._coarsest(one))[0].encoding, why)
        return Choice(None, f"not its turn; {why}" if chosen else why)

    def _plans(self, stats: Sequence[UnitStats], budget: Budget, interval: int) -> list[Plan]:
        """Return the plans that can be paid, at most two: everything at once, and the best with moments in turn."""
        worth, (fixed, costs) = worth_saving(stats), self._fixed(stats, budget)
        moving = [one for one in stats if one.unit in worth]
        sizes = {one.unit: options(one, self._coarsest(one))[0].nbytes for one in moving}
        shares, plans = _shares(moving), dict[frozenset[Unit], Plan]()
        moments = [one for one in moving if not _is_weight(one)]
        aging = [
            (2 * self.lags.get(one.unit.slot, LAG) * shares.get(one.unit.layer, 0.0), _kept(one)) for one in moments
        ]
        for units, taken in _sets(moving, sizes):
            nbytes = costs + math.fsum(sizes[unit] for unit in units if unit not in fixed)
            period = max(interval, nbytes / (budget.per_step or math.inf))
            age = period * (1.0 / taken - 1.0) / 2
            cost = period / 2 + math.fsum(twice * (1.0 - kept**age) for twice, kept in aging)
            part = f"weights and {min(99.0, 100 * taken):.0f} % of the moments"
            text = "everything" if len(units) == len(moving) else part
            if units and (budget.most is None or nbytes <= budget.most):
                plans.setdefault(units, Plan(text, units, nbytes, period, cost))
        return sorted(plans.values(), key=lambda plan: (plan.text != "everything", plan.cost))[:2]


def _sets(moving: Sequence[UnitStats], sizes: Mapping[Unit, float]) -> Iterator[tuple[frozenset[Unit], float]]:
    """Yield for each of :data:`PARTS` a set of units, and its share of the bytes of all moments.

    The set has all weights, and the moments of the layers where they are oldest, until those make up one part."""
    ordered = sorted(moving, key=lambda one: (one.position, one.unit))
    moments = group_by_key((one.unit.layer, one) for one in ordered if not _is_weight(one))
    layers = sorted(moments.values(), key=lambda units: -max(one.staleness or 0 for one in units))
    nbytes = [math.fsum(sizes[one.unit] for one in units) for units in layers]
    weights, everything = [one.unit for one in moving if _is_weight(one)], math.fsum(nbytes)
    for parts in PARTS:
        taken, count = 0.0, 0
        while count < len(layers) and taken < everything / parts:
            taken, count = taken + nbytes[count], count + 1
        chosen = frozenset([*weights, *(one.unit for units in layers[:count] for one in units)])
        yield chosen, taken / everything if everything else 1.0


def _is_weight(one: UnitStats) -> bool:
    return one.unit.slot in (WEIGHTS, BUFFER)


def _shares(moving: Sequence[UnitStats]) -> Mapping[str, float]:
    """Return each layer's share of the progress: number of weights times their pace, as for the effective step."""
    weights = [one for one in moving if one.unit.slot == WEIGHTS]
    known = [pace for one in weights if 0.0 < (pace := _pace(one)) < math.inf]
    usual = math.fsum(known) / len(known) if known else 1.0
    parts = {
        one.unit.layer: max(1, one.numel) * (pace if 0.0 < (pace := _pace(one)) < math.inf else usual)
        for one in weights
    }
    total = math.fsum(parts.values())
    return {layer: part / total for layer, part in parts.items()}


def _kept(one: UnitStats) -> float:
    """Return the share of the correlation with the version that is left after each step.

    Values of equal length with correlation c have a squared drift of 2 * (1 - c)."""
    pace, steps = _pace(one), max(1, one.staleness or 0)
    return math.pow(max(LEAST, 1.0 - (pace * steps) ** 2 / 2), 1.0 / steps)


def _pace(one: UnitStats) -> float:
    """Return the drift per step since the version, without the error of its encoding; infinite if unknown."""
    if one.drift is None or not one.drift < 1e100:
        return math.inf
    return math.sqrt(max(0.0, one.drift * one.drift - one.error * one.error)) / max(1, one.staleness or 0)
