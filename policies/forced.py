"""A save that somebody asked for: everything is saved, whatever the policy says, but what is not finite. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from policies.base import Choice, Decision, UnitStats
from store.names import RAW


def forced(decision: Decision, stats: Sequence[UnitStats], reason: str) -> Decision:
    """Every unit raw, for ``reason``; layers with NaN or infinity as ``decision`` has them, which the gate made."""
    sick = {one.unit.layer for one in stats if not one.finite}
    return Decision(
        {one.unit: decision.choices[one.unit] if one.unit.layer in sick else Choice(RAW, reason) for one in stats}
    )
