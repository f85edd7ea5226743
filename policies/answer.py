"""Checks what a policy answered before anything acts on it.

A policy may come from a user. A unit it forgot would silently grow stale, and an encoding that loses bits
would break a promise of exactness: both are refused here, by name, not found at the resume. What passes is taken over
as plain values, so that nothing of the user's own classes goes further.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from policies.base import Choice, Decision, UnitStats
from policies.setting import described
from store.errors import UsageError
from store.names import Unit

Refusal = Callable[[str, str], str | None]
"""(slot, encoding) -> why it may not be, or None."""

_LONGEST = 1000
"""Characters of a reason: every manifest carries one for each unit that its save wrote."""


class PolicyError(UsageError):
    """A policy broke its contract, or was shown what it cannot decide on. unit: None where it is about no single one.

    what: the message without policy and unit."""

    def __init__(self, policy: str, unit: Unit | None, what: str) -> None:
        super().__init__(f"policy {policy}: {what}" if unit is None else f"policy {policy}: {unit}: {what}")
        self.policy = policy
        self.unit = unit
        self.what = what


def check_shown(policy: str, stats: Sequence[UnitStats]) -> None:
    """Raises PolicyError where a unit is shown twice."""
    seen: set[Unit] = set()
    for one in stats:
        if one.unit in seen:
            raise PolicyError(policy, one.unit, "shown twice in one decision; sum it over ranks before deciding")
        seen.add(one.unit)


def checked_answer(policy: str, stats: Sequence[UnitStats], answer: object, refusal: Refusal | None) -> Decision:
    """The answer as a decision in the order shown.

    Raises PolicyError unless every unit shown, and no other, has a choice with a reason and an encoding that
    ``refusal`` (None: any name) does not refuse."""
    choices = _choices(policy, answer)
    for one in stats:
        if one.unit not in choices:
            raise PolicyError(policy, one.unit, "shown but not decided on; give it a choice, a skip at least")
    shown = {one.unit for one in stats}
    for unit in choices:
        if unit not in shown:
            raise _stranger(policy, unit)
    return Decision({one.unit: _checked(policy, one.unit, choices[one.unit], refusal) for one in stats})


def _choices(policy: str, answer: object) -> dict[object, object]:
    if not isinstance(answer, Decision):
        what = f"select returned {described(answer)[:80]}, not a Decision; return Decision({{unit: Choice(...), ...}})"
        raise PolicyError(policy, None, what)
    found: object = answer.choices
    if not isinstance(found, Mapping):
        raise PolicyError(policy, None, f"Decision.choices must map units to choices, not {described(found)[:80]}")
    return dict(found)


def _stranger(policy: str, unit: object) -> PolicyError:
    if isinstance(unit, Unit):
        return PolicyError(policy, unit, "decided on but never shown; choose among the units given to select")
    return PolicyError(policy, None, f"Decision.choices has the key {described(unit)[:80]}; keys are the units shown")


def _checked(policy: str, unit: Unit, choice: object, refusal: Refusal | None) -> Choice:
    if not isinstance(choice, Choice):
        raise PolicyError(policy, unit, f"its choice is {described(choice)[:80]}; make it Choice(encoding, reason)")
    reason, encoding = _text(choice.reason), _text(choice.encoding)
    if not reason:
        raise PolicyError(policy, unit, "its choice has no reason; say why it is saved or skipped")
    if len(reason) > _LONGEST:
        raise PolicyError(policy, unit, f"its reason has {len(reason)} characters; {_LONGEST} at most, please")
    if choice.encoding is not None and not encoding:
        raise PolicyError(policy, unit, f"encoding {choice.encoding!r} is no name; use None to skip the unit")
    told = None if encoding is None or refusal is None else refusal(unit.slot, encoding)
    if told is not None:
        raise PolicyError(policy, unit, told)
    return Choice(encoding, reason)


def _text(value: object) -> str | None:
    """A plain str of it that UTF-8 can hold; None where it is none."""
    if not isinstance(value, str):
        return None
    return str.__str__(value).encode("utf-8", "backslashreplace").decode("utf-8")
