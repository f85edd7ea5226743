"""Asks a policy about a made-up case, and tells what it did wrong in a way that its author can act on."""

from __future__ import annotations

from collections.abc import Sequence

from policies.answer import checked_answer
from policies.base import Decision, Policy, UnitStats
from policies.bounds import Bounds
from policies.failure import failure_of
from policies.made_up import Case

ANY = Bounds(precision="any")
"""Bounds that leave everything to the policy but what nobody may do."""


class BrokenError(Exception):
    """A promise that a policy does not keep; the message says on what, and what it did."""


def answered(policy: Policy, case: Case, bounds: Bounds = ANY, stats: Sequence[UnitStats] | None = None) -> Decision:
    """The policy's answer, found to be one. stats: instead of the case's own. Raises BrokenError."""
    shown = case.stats if stats is None else stats
    try:
        return checked_answer(policy.name, case.stats, policy.select(shown, case.budget, case.history), bounds.refusal)
    except (Exception, SystemExit) as error:
        failure = failure_of(error)
        at = f" at {failure.place}" if failure.place else ""
        raise BrokenError(f"{case}: it {failure.what}{at}") from error


def difference(one: Decision, other: Decision) -> str | None:
    """The first unit that two decisions on the same units differ in, and how; None where they are equal."""
    for unit, choice in one.choices.items():
        found = other.choices[unit]
        if found != choice:
            return f"{unit}: {_shown(choice.encoding, choice.reason)}, and then {_shown(found.encoding, found.reason)}"
    return None


def _shown(encoding: str | None, reason: str) -> str:
    return f"{encoding or 'skip'} ({reason[:80]})"
