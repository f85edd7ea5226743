"""Implement policy ``budget``: spend the available bytes where they remove the most expected damage.

Damage is the squared relative distance of a layer's weights to what a resume would load. Other slots are converted to
that scale by the pace of their layer: fully outdated moments spoil the next few updates, so they count as weights that
are some steps old, independent of the learning rate. docs/budget.md derives the formulas and lists the assumptions.
Pure; the bytes available come from the caller's token bucket."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

from policies.base import Budget, Choice, Decision, History, Policy, UnitStats, worth_saving
from policies.builtin import Observe
from policies.encodings import Option, options
from policies.validation import check_number, described
from store.errors import ConfigError
from store.names import RAW, WEIGHTS, Unit

LAG = 3.0
"""Steps of its layer's weights that a slot with drift 1 counts as. Measured between -4 and 21 with intervals of 3 to 20
(docs/benchmarks/quality.md): no value is well supported, and runs with 0.3, 3 and 30 were indistinguishable."""

GROWTH = 1.5  # exponent p of damage ~ t^p between linear drift (2) and a random walk (1)

HARMLESS = 0.01
"""For slots other than the weights, a larger error of an encoding counts as this. Moments with errors of 0.1 to 0.2
could not be told from exact ones (docs/benchmarks/precision.md), so raw ones are not worth four bytes a value."""

_EARNED = GROWTH / (GROWTH + 1)  # share of (damage now x staleness) by which damage now exceeds its mean since the save


def gain(one: UnitStats, error: float, scale: float) -> float:
    """Return the damage times steps that saving the unit now, with relative ``error``, removes.

    Below 0 if it adds damage. Infinite if the drift is unknown."""
    drift = math.inf if one.drift is None or math.isnan(one.drift) else one.drift
    moved = max(0.0, drift * drift - one.error * one.error)
    age = max(1, one.staleness or 0)
    cap = math.inf if one.unit.slot == WEIGHTS else HARMLESS
    before, after = min(one.error, cap), min(error, cap)
    return scale * age * (_EARNED * moved + before * before - after * after)


def scales(stats: Sequence[UnitStats], lags: Mapping[str, float]) -> Mapping[str, Mapping[str, float]]:
    """Return the damage of a squared drift of 1, for each layer and slot; above 0.

    Weights: 1. Other slots: (lag x pace)^2, where pace is the drift per step of the layer's weights since their
    version. A layer whose weights have no pace (not measured, not moved) gets the root mean square of the others."""
    paces = {one.unit.layer: pace for one in stats if one.unit.slot == WEIGHTS and (pace := _pace_squared(one)) > 0}
    usual = math.fsum(paces.values()) / len(paces) if paces else 1.0
    found: dict[str, dict[str, float]] = {}
    for one in stats:
        pace, lag = paces.get(one.unit.layer, usual), lags.get(one.unit.slot, LAG)
        found.setdefault(one.unit.layer, {})[one.unit.slot] = 1.0 if one.unit.slot == WEIGHTS else lag * lag * pace
    return MappingProxyType(found)


def _pace_squared(one: UnitStats) -> float:
    if one.drift is None or not one.drift < 1e100 or not one.finite:
        return 0.0
    return max(0.0, one.drift * one.drift - one.error * one.error) / max(1, one.staleness or 0) ** 2


@dataclass(frozen=True)
class Candidate:
    """An upgrade of a unit to ``option``, from its previous candidate or from being skipped."""

    unit: Unit
    option: Option
    cost: float  # additional bytes
    worth: float  # gain per byte
    first: bool  # whether it is the upgrade from being skipped


def candidates(unit: Unit, gains: Sequence[tuple[Option, float]]) -> list[Candidate]:
    """Return the upgrades of a unit, steepest first; empty if no option gains anything.

    Only options on the upper convex hull of (bytes, gain) count (multiple-choice knapsack, Sinha and Zoltners 1979)."""
    upgrades: list[Candidate] = []
    paid = gained = 0.0
    while True:
        better = [(option, gain) for option, gain in gains if option.nbytes > paid and gain > gained]
        if not better:
            return upgrades
        steps = [((gain - gained) / (option.nbytes - paid), option, gain) for option, gain in better]
        worth, option, gain = max(steps, key=lambda step: (step[0], -step[1].nbytes))
        upgrades.append(Candidate(unit, option, option.nbytes - paid, worth, not upgrades))
        paid, gained = option.nbytes, gain


def select_within(queue: Iterable[Candidate], budget_bytes: float) -> Mapping[Unit, Choice]:
    """Choose greedily by gain per byte, within ``budget_bytes``.

    The first unit that cannot be paid ends the selection: units after it would use the bytes that it waits for. Equal
    worth is ordered by name, so that the order of units does not matter."""
    ordered = sorted(queue, key=lambda candidate: (-candidate.worth, candidate.unit))
    choices: dict[Unit, Choice] = {}
    waiting: Candidate | None = None
    closed: set[Unit] = set()
    for candidate in ordered:
        if waiting is not None:
            choices.setdefault(candidate.unit, Choice(None, f"in line behind {waiting.unit}, which waits for bytes"))
        elif candidate.unit in closed:
            continue
        elif candidate.cost <= budget_bytes:
            budget_bytes -= candidate.cost
            why = f"worth {candidate.worth:.3g} a byte at {candidate.option.nbytes:.0f}"
            choices[candidate.unit] = Choice(candidate.option.encoding, why)
        elif candidate.first:
            waiting = candidate
            debt = "earlier saves are not paid for yet"
            at_hand = debt if budget_bytes < 0 else f"{math.floor(budget_bytes)} are at hand"
            choices[candidate.unit] = Choice(None, f"next in line, needs {math.ceil(candidate.cost)} bytes; {at_hand}")
        else:
            closed.add(candidate.unit)
    return choices


_NO_GAIN = Choice(None, "saving it would take no damage away")


@dataclass(frozen=True)
class BudgetPolicy:
    """Policy ``budget``: saves the units for which removed damage times staleness is largest per byte.

    If the next unit cannot be paid, no unit after it is saved either, so that a large unit does not starve.

    Args:
        lags: For slots other than the weights: the steps of the weights that a fully outdated slot counts as, > 0;
            :data:`policies.budget.LAG` for slots that are not named.
        encodings: Coarsest encoding of each slot; raw by default. Set from the job's ``encoding``."""

    lags: Mapping[str, float] = field(default_factory=dict, hash=False)
    encodings: Mapping[str, str] = field(default_factory=dict, hash=False, metadata={"setting": False})

    name: ClassVar[str] = "budget"
    needs_drift: ClassVar[bool] = True
    spends: ClassVar[bool] = True

    def __post_init__(self) -> None:
        whose = f"policy {self.name}"
        if not isinstance(self.lags, Mapping):
            raise ConfigError(
                f"{whose}: lags must map names of slots to steps, such as {{exp_avg: 3}}, not {described(self.lags)}"
            )
        for slot, steps in self.lags.items():
            if not isinstance(slot, str) or slot == WEIGHTS:
                raise ConfigError(
                    f"{whose}: the keys of lags must be names of slots other than {WEIGHTS}, not {described(slot)}: "
                    "each value is the number of weight steps that the slot counts as"
                )
            check_number(whose, f"lags.{slot}", steps)
            if not 1e-6 <= steps <= 1e6:
                raise ConfigError(f"{whose}: lags.{slot} must lie between 1e-6 and 1e6, not {described(steps)}")
        object.__setattr__(self, "lags", dict(self.lags))  # copies, since the caller may change its own
        object.__setattr__(self, "encodings", dict(self.encodings))

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        fixed, costs = self._fixed(stats, budget)
        worth, scale = worth_saving(stats), scales(stats, self.lags)
        queue = [
            candidate
            for one in stats
            if one.unit in worth and one.unit not in fixed
            for candidate in candidates(
                one.unit,
                [
                    (option, gain(one, option.error, scale[one.unit.layer][one.unit.slot]))
                    for option in options(one, self._coarsest(one))
                ],
            )
        ]
        budget_bytes = math.inf if budget.bytes is None else budget.bytes
        paid = select_within(queue, budget_bytes - costs)
        return Decision({one.unit: fixed.get(one.unit) or paid.get(one.unit) or _NO_GAIN for one in stats})

    def _fixed(self, stats: Sequence[UnitStats], budget: Budget) -> tuple[Mapping[Unit, Choice], float]:
        """Return the choices for units that are saved in any case, in the coarsest encoding, and their bytes."""
        fixed: dict[Unit, Choice] = {}
        costs = 0.0
        for one in stats:
            if one.unit in budget.demanded or one.staleness is None:
                option = options(one, self._coarsest(one))[0]
                why = "no version yet" if one.staleness is None else "saved whatever this policy says"
                fixed[one.unit] = Choice(option.encoding, why)
                costs += option.nbytes
        return fixed, costs

    def _coarsest(self, one: UnitStats) -> str:
        return self.encodings.get(one.unit.slot, RAW)


def spends(policy: Policy) -> bool:
    """Return whether the policy, or the one that it observes, keeps to ``budget.bytes`` (``spends = True``)."""
    return getattr(policy.inner if isinstance(policy, Observe) else policy, "spends", False) is True
