"""Enforce bounds on drift, staleness and precision around a policy; hold back layers with NaN or infinity.

Pure, like all policies. A save that fails, or a commit that is late, is the caller's to report."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from policies.base import Budget, Choice, Decision, History, Policy, UnitStats, compared, nonfinite_slots, version
from policies.budget import BudgetPolicy
from policies.builtin import Observe
from policies.encodings import explosive
from policies.validation import check_integer, check_number, check_one_of, check_shown, checked_answer
from store.encoding import ENCODINGS, WRITABLE
from store.errors import ConfigError
from store.names import RAW, Unit


@dataclass(frozen=True)
class Bounds:
    """Limits that hold regardless of the policy. None: no limit.

    ``max_staleness``: largest age in steps of the newest committed version of a moving, finite unit, at every step up
    to and including the next decision; late commits add their delay. ``interval``: most steps between two decisions,
    required with ``max_staleness``, which must not be smaller. ``History.interval``, if given, takes precedence."""

    max_staleness: int | None = None
    max_drift: float | None = None  # of a unit that a decision leaves unsaved; it keeps growing until the next one
    precision: Literal["exact", "any"] = "exact"  # exact: lossless encodings only
    interval: int | None = None
    whole_layers: bool = False  # all moving slots of a layer or none: the journal needs them to be of one step

    def __post_init__(self) -> None:
        check_one_of("bounds", "precision", self.precision, ("exact", "any"))
        if self.max_drift is not None:
            check_number("bounds", "max_drift", self.max_drift)
        for name, steps in (("max_staleness", self.max_staleness), ("interval", self.interval)):
            if steps is not None:
                check_integer("bounds", name, steps, least=1)
        if self.max_staleness is not None and self.interval is None:
            raise ConfigError("bounds: max_staleness needs interval, the most steps between two decisions")
        if self.max_staleness is not None and self.interval is not None and self.max_staleness < self.interval:
            raise ConfigError(
                f"bounds: max_staleness {self.max_staleness} cannot hold with interval {self.interval}: even units "
                f"saved every time become {self.interval} steps old; set max_staleness >= {self.interval}, "
                "or decide more often (a smaller `every`)"
            )

    def refusal(self, slot: str, encoding: str) -> str | None:
        """Return why the slot may not be stored in this encoding, and an alternative; None if it may."""
        known = ENCODINGS.get(encoding)
        if known is None:
            return f"encoding {encoding!r} is unknown; there is {', '.join(WRITABLE)}"
        if known.lossless:
            return None
        if self.precision == "exact":
            return f"encoding {encoding!r} may lose bits and precision is 'exact'; use {RAW}, or set precision 'any'"
        if self.max_drift is not None and known.relative_bound > self.max_drift:
            return (
                f"encoding {encoding!r} may be off by {known.relative_bound:.2g}, and max_drift is {self.max_drift!r}; "
                f"use {RAW}, or raise max_drift"
            )
        problem = explosive(slot, encoding)
        return None if problem is None else f"encoding {encoding!r}: {problem}"


@dataclass(frozen=True)
class Bounded:
    """A policy inside bounds; a policy itself. The first row of docs/policies.md#bounds that applies to a unit decides.

    ``encodings``, by slot: a moving unit that would be stored raw gets its slot's, except by policy ``budget``, which
    weighs encodings itself. One that max_staleness demands and the inner policy saves keeps its encoding.

    The inner policy sees every unit, even those whose choice it cannot change; ``budget.demanded`` names those that
    rows 2 to 4 save. Its whole answer is checked. Raises PolicyError if it breaks its contract."""

    policy: Policy
    bounds: Bounds = field(default_factory=Bounds)
    encodings: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if isinstance(self.policy, Observe):
            raise ConfigError("bounds go inside observe, or they would write: use bound(policy, bounds)")

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def needs_drift(self) -> bool:
        return self.policy.needs_drift or self.bounds.max_drift is not None

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        check_shown(self.name, stats)
        rows = self._rows(stats, history.step)
        ages = stats if self.bounds.max_staleness is not None else ()
        stale = self._encoded((one, self._stale(one, history.interval)) for one in ages)
        demanded = {unit for unit in (*rows, *stale) if (rows.get(unit) or stale[unit]).saved}
        told = replace(history, interval=history.interval or self.bounds.interval)
        answer = self.policy.select(stats, replace(budget, demanded=frozenset(demanded)), told)
        inner = checked_answer(self.name, stats, answer, self.bounds.refusal)
        chosen = dict(inner.choices)
        for unit, choice in stale.items():  # the inner policy's encoding stands if it saves the unit anyway
            chosen[unit] = replace(choice, encoding=chosen[unit].encoding or choice.encoding)
        if self.encodings and not isinstance(self.policy, BudgetPolicy):
            chosen = dict(self._encoded((one, chosen[one.unit]) for one in stats))
        chosen |= rows
        return Decision(dict(_with_layers(stats, chosen)) if self.bounds.whole_layers else chosen)

    def _rows(self, stats: Sequence[UnitStats], step: int) -> Mapping[Unit, Choice]:
        """Return the choices of the table that do not depend on the inner policy, except for max_staleness."""
        sick = nonfinite_slots(stats)
        first, limited = all(one.staleness is None for one in stats), self.bounds.max_drift is not None
        return self._encoded(
            (one, _gated(one, sick, step) or _unversioned(one, first) or _frozen(one, step) or self._drifted(one))
            for one in stats  # only units that a row may apply to: usually none
            if limited or one.staleness is None or one.changed_shape or not one.moving or one.unit.layer in sick
        )

    def _encoded(self, choices: Iterable[tuple[UnitStats, Choice | None]]) -> Mapping[Unit, Choice]:
        """Return the choices that are not None. Moving units to be stored raw get the encoding of their slot."""
        return {
            one.unit: replace(choice, encoding=self.encodings[one.unit.slot])
            if choice.encoding == RAW and one.moving and one.unit.slot in self.encodings
            else choice
            for one, choice in choices
            if choice is not None
        }

    def _drifted(self, one: UnitStats) -> Choice | None:
        limit = self.bounds.max_drift
        if limit is None:
            return None
        if one.drift is None or math.isnan(one.drift):
            return Choice(RAW, f"drift is not known; max_drift {limit!r} could not be kept")
        return Choice(RAW, compared("drift", one.drift, ">", "max_drift", limit)) if one.drift > limit else None

    def _stale(self, one: UnitStats, interval: int | None) -> Choice | None:
        """Return the choice to save if max_staleness would be exceeded by the next decision, ``interval`` steps on."""
        most, steps = self.bounds.max_staleness, self.bounds.interval if interval is None else interval
        if one.staleness is None or most is None or steps is None or one.staleness + steps <= most:
            return None
        return Choice(RAW, f"staleness {one.staleness} + interval {steps} > max_staleness {most}")


def _with_layers(stats: Sequence[UnitStats], choices: Mapping[Unit, Choice]) -> Iterator[tuple[Unit, Choice]]:
    """Yield the choices; where a moving slot of a layer is saved, so are the others."""
    sick = nonfinite_slots(stats)
    layers = {one.unit.layer for one in stats if one.moving and choices[one.unit].saved}
    for one in stats:
        added = one.moving and one.unit.layer in layers and one.unit.layer not in sick and not choices[one.unit].saved
        yield one.unit, Choice(RAW, "another slot of its layer is saved") if added else choices[one.unit]


def bound(policy: Policy, bounds: Bounds) -> Policy:
    """Put a policy inside bounds. Observe stays outermost and reports what the bounded policy would do."""
    return Observe(Bounded(policy.inner, bounds)) if isinstance(policy, Observe) else Bounded(policy, bounds)


def incomplete(stats: Sequence[UnitStats], decision: Decision) -> tuple[Unit, ...]:
    """Return the units that a commit of this decision would lack, in the order shown.

    They are not saved and have no older version with the same parameters. The caller must not commit if any is left."""
    return tuple(
        one.unit
        for one in stats
        if (one.staleness is None or one.changed_shape) and not decision.choices[one.unit].saved
    )


def _gated(one: UnitStats, slots: Mapping[str, tuple[str, ...]], step: int) -> Choice | None:
    sick = slots.get(one.unit.layer)
    if not sick:
        return None
    verb = "has" if len(sick) == 1 else "have"
    stays = version(step, one.staleness) + (" stays" if one.staleness is not None else "")
    return Choice(None, f"health gate: {', '.join(sick)} of {one.unit.layer} {verb} NaN or Inf; {stays}")


def _unversioned(one: UnitStats, first: bool) -> Choice | None:
    if first:
        return Choice(RAW, "first save is full")
    if one.staleness is None:
        return Choice(RAW, "no version yet")
    return Choice(RAW, "its set of parameters changed") if one.changed_shape else None


def _frozen(one: UnitStats, step: int) -> Choice | None:
    if one.moving:
        return None
    if one.drift is None or one.drift == 0.0:
        return Choice(None, f"does not move; {version(step, one.staleness)} holds")
    return Choice(RAW, f"does not move, yet its drift is {one.drift:.3g}: it was changed")


def forced(decision: Decision, stats: Sequence[UnitStats], reason: str) -> Decision:
    """Save every unit raw, for ``reason``, except layers that the health gate held back in ``decision``."""
    sick = {one.unit.layer for one in stats if not one.finite}
    choices = decision.choices
    return Decision({one.unit: choices[one.unit] if one.unit.layer in sick else Choice(RAW, reason) for one in stats})


def hurried(decision: Decision, stats: Sequence[UnitStats], saved: Mapping[Unit, str]) -> Decision:
    """Return the decision to save what a recorded run ``saved`` before a deadline, and what a commit would lack."""
    sick = {one.unit.layer for one in stats if not one.finite}
    return Decision({one.unit: _hurried(one, decision, saved, one.unit.layer in sick) for one in stats})


def _hurried(one: UnitStats, decision: Decision, saved: Mapping[Unit, str], sick: bool) -> Choice:
    if sick:
        return decision.choices[one.unit]
    if one.unit in saved:
        return Choice(saved[one.unit], "preempted: there was time for it")
    missing = one.staleness is None or one.changed_shape
    return Choice(RAW if missing else None, "preempted: no version yet" if missing else "preempted: there was no time")
