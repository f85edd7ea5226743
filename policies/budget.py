"""Rate-distortion policy: expected damage per byte.

What the versions of a unit cost a failure, and how much of that a save takes away.

The unit of damage is the squared relative distance of a layer's weights to what a resume would give back. Other
slots are brought to the same scale by the pace of their layer: moments that are wholly out of date spoil the next
few updates, so they count as weights that are some steps old, whatever the learning rate is. docs/budget.md.

The line in which options wait to be bought: damage taken away, a byte; most first.

A multiple-choice knapsack by efficiency: of each unit only the options on the upper convex hull of (bytes, gain)
stand in line, each with what it costs and gains beyond the one before (Sinha and Zoltners 1979). It does not know
what gain is.

Policy ``budget``: the bytes at hand go where they take away the most expected damage.

docs/budget.md derives what is done here and says what is assumed. It knows neither the clock nor how bytes come to
be at hand (that is the caller's token bucket), nor what a unit will pack to but by its newest version.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class Candidate:
    """A step up for a unit: from what its bid before gives, or from nothing, to ``option``.

    cost: bytes. worth: gain a byte. first: it is the step from nothing."""

    unit: Unit
    option: Option
    cost: float
    worth: float
    first: bool


def candidates(unit: Unit, gains: Sequence[tuple[Option, float]]) -> list[Candidate]:
    """The steps of a unit along the hull, steepest first. Empty where no option gains anything."""
    found: list[Candidate] = []
    paid = gained = 0.0
    while True:
        ahead = [(option, gain) for option, gain in gains if option.nbytes > paid and gain > gained]
        if not ahead:
            return found
        steps = [((gain - gained) / (option.nbytes - paid), option, gain) for option, gain in ahead]
        worth, option, gain = max(steps, key=lambda step: (step[0], -step[1].nbytes))
        found.append(Candidate(unit, option, option.nbytes - paid, worth, not found))
        paid, gained = option.nbytes, gain


def select_within(line: Iterable[Candidate], purse: float) -> Mapping[Unit, Choice]:
    """A choice for each unit in line: what ``purse`` bytes buy from the head of it.

    A unit's first step that cannot be paid ends it: what stands behind would use up what that unit waits for.
    Equal worth goes by name, so that the order of units says nothing."""
    ordered = sorted(line, key=lambda bid: (-bid.worth, bid.unit))
    choices: dict[Unit, Choice] = {}
    waiting: Candidate | None = None
    closed: set[Unit] = set()
    for bid in ordered:
        if waiting is not None:
            choices.setdefault(bid.unit, Choice(None, f"in line behind {waiting.unit}, which waits for bytes"))
        elif bid.unit in closed:
            continue
        elif bid.cost <= purse:
            purse -= bid.cost
            choices[bid.unit] = Choice(bid.option.encoding, f"worth {bid.worth:.3g} a byte at {bid.option.nbytes:.0f}")
        elif bid.first:
            waiting = bid
            at_hand = "earlier saves are not paid for yet" if purse < 0 else f"{math.floor(purse)} are at hand"
            choices[bid.unit] = Choice(None, f"next in line, needs {math.ceil(bid.cost)} bytes; {at_hand}")
        else:
            closed.add(bid.unit)
    return choices


_NO_GAIN = Choice(None, "saving it would take no damage away")


@dataclass(frozen=True)
class BudgetPolicy:
    """Saves what stands first in line, until the bytes at hand are spent.

    A unit's place in line is the damage that saving it takes away, times its staleness, a byte. Where the first in
    line cannot be paid, nothing behind it is saved either, so that a large unit does not starve.

    lags: for slots other than the weights, how many steps of the weights being wholly out of date counts as, > 0;
    see :data:`policies.budget.LAG`, which holds for slots that are not named. encodings: the coarsest encoding that
    each slot may have, raw where it has none; no setting of the policy, but the job's ``encoding``.
    """

    lags: Mapping[str, float] = field(default_factory=dict, hash=False)
    encodings: Mapping[str, str] = field(default_factory=dict, hash=False, metadata={"setting": False})

    spends: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_lags(self.lags)
        object.__setattr__(self, "lags", dict(self.lags))  # copies: the caller may change theirs
        object.__setattr__(self, "encodings", dict(self.encodings))

    @property
    def name(self) -> str:
        """``budget``."""
        return "budget"

    @property
    def needs_drift(self) -> bool:
        """True."""
        return True

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        """From the head of the line, what the bytes at hand pay. What has no version is saved whatever it costs."""
        del history
        fixed, costs = self._fixed(stats, budget)
        worth, scale = worth_saving(stats), scales(stats, self.lags)
        line = [
            bid
            for one in stats
            if one.unit in worth and one.unit not in fixed
            for bid in candidates(
                one.unit,
                [
                    (option, gain(one, option.error, scale[one.unit.layer][one.unit.slot]))
                    for option in options(one, self._coarsest(one))
                ],
            )
        ]
        purse = math.inf if budget.bytes is None else budget.bytes
        paid = select_within(line, purse - costs)
        return Decision({one.unit: fixed.get(one.unit) or paid.get(one.unit) or _NO_GAIN for one in stats})

    def _fixed(self, stats: Sequence[UnitStats], budget: Budget) -> tuple[Mapping[Unit, Choice], float]:
        """What is saved without asking for its worth, in the coarsest way; and its bytes."""
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
    """Whether the policy, or the one that it observes, asks what bytes are at hand and keeps to them.

    It says so by an attribute ``spends`` that is True."""
    return getattr(policy.inner if isinstance(policy, Observe) else policy, "spends", False) is True


def _check_lags(lags: object) -> None:
    if not isinstance(lags, Mapping):
        raise ConfigError(
            f"policy budget: lags must map names of slots to steps, such as {{exp_avg: 3}}, not {described(lags)}"
        )
    for slot, steps in lags.items():
        if not isinstance(slot, str) or slot == WEIGHTS:
            raise ConfigError(
                f"policy budget: lags must have names of slots other than {WEIGHTS} for keys, not {described(slot)}: "
                "they say how many steps of the weights another slot counts as"
            )
        check_number("policy budget", f"lags.{slot}", steps)
        if not 1e-6 <= steps <= 1e6:
            raise ConfigError(f"policy budget: lags.{slot} must lie between 1e-6 and 1e6, not {described(steps)}")
