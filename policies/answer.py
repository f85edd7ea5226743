"""Checks what a policy answered before anything acts on it.

A policy may come from a user. A unit it forgot would silently grow stale, and an encoding that loses bits
would break a promise of exactness: both are refused here, by name, not found at the resume.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.base import Decision, UnitStats
from store.errors import UsageError
from store.names import Unit


class PolicyError(UsageError):
    """A policy broke its contract, or was shown what it cannot decide on."""

    def __init__(self, policy: str, unit: Unit, what: str) -> None:
        super().__init__(f"policy {policy}: {unit}: {what}")
        self.policy = policy
        self.unit = unit


def check_shown(policy: str, stats: Sequence[UnitStats]) -> None:
    """Raises PolicyError where a unit is shown twice."""
    seen: set[Unit] = set()
    for one in stats:
        if one.unit in seen:
            raise PolicyError(policy, one.unit, "shown twice in one decision; sum it over ranks before deciding")
        seen.add(one.unit)


def check_answer(policy: str, stats: Sequence[UnitStats], decision: Decision, allowed: frozenset[str] | None) -> None:
    """Raises PolicyError unless every unit shown, and no other, has a choice with a reason and an encoding
    that is ``allowed`` (None: any name)."""
    for one in stats:
        if one.unit not in decision.choices:
            raise PolicyError(policy, one.unit, "shown but not decided on; give it a choice, a skip at least")
    shown = {one.unit for one in stats}
    for unit, choice in decision.choices.items():
        if unit not in shown:
            raise PolicyError(policy, unit, "decided on but never shown; choose among the units given to select")
        if not choice.reason:
            raise PolicyError(policy, unit, "its choice has no reason; say why it is saved or skipped")
        if choice.encoding == "" or (allowed is not None and choice.saved and choice.encoding not in allowed):
            raise PolicyError(policy, unit, _refusal(choice.encoding, allowed))


def _refusal(encoding: str | None, allowed: frozenset[str] | None) -> str:
    if allowed is None:
        return f"encoding {encoding!r} is no name; use None to skip the unit"
    names = ", ".join(sorted(allowed))
    return f"encoding {encoding!r} may lose bits and precision is 'exact'; use {names}, or set precision 'any'"
