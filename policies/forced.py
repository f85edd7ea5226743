"""A save that somebody asked for: everything is saved, whatever the policy says, but what is not finite. Pure.

And one that the end of the job asked for, as a replay has it: how much time there was is no matter of policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policies.base import Choice, Decision, UnitStats
from store.names import RAW, Unit


def forced(decision: Decision, stats: Sequence[UnitStats], reason: str) -> Decision:
    """Every unit raw, for ``reason``; layers with NaN or infinity as ``decision`` has them, which the gate made."""
    sick = {one.unit.layer for one in stats if not one.finite}
    return Decision(
        {one.unit: decision.choices[one.unit] if one.unit.layer in sick else Choice(RAW, reason) for one in stats}
    )


def hurried(decision: Decision, stats: Sequence[UnitStats], saved: Mapping[Unit, str]) -> Decision:
    """What time allowed in the recorded run; and what no commit could do without, where other versions are held."""
    sick = {one.unit.layer for one in stats if not one.finite}
    return Decision({one.unit: _hurried(one, decision, saved, one.unit.layer in sick) for one in stats})


def _hurried(one: UnitStats, decision: Decision, saved: Mapping[Unit, str], sick: bool) -> Choice:
    if sick:
        return decision.choices[one.unit]
    if one.unit in saved:
        return Choice(saved[one.unit], "preempted: there was time for it")
    missing = one.staleness is None or one.changed_shape
    return Choice(RAW if missing else None, "preempted: no version yet" if missing else "preempted: there was no time")
