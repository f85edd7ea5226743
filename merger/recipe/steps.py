"""Steps as users name them: one of its own, or the newest within a bound; and what of a source they mean."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence

from store.errors import UsageError
from store.names import SaveId
from store.text import listed

_BOUND = re.compile(r"(?P<sign><=|<|>=|>|==|=)\s*(?P<step>.*)\Z")
_HOLDS: dict[str, Callable[[int, int], bool]] = {"<=": operator.le, "<": operator.lt}


def check_step(step: int | str | None) -> None:
    """UsageError for a bound that is none."""
    if isinstance(step, str):
        _bound(step)


def is_bound(step: int | str | None) -> bool:
    """Whether it names no checkpoint, but those up to a step."""
    return isinstance(step, str) and _bound(step) is not None


def candidates(step: int | str | None, steps: Sequence[int], origin: str) -> list[int | str | None]:
    """What to ask a source for, best first; where one cannot be rebuilt the next one stands in.

    steps: of all checkpoints of the source, newest first (a later epoch outranks a later step). A step that is
    named exactly, or by a tag, has no stand-in. UsageError, naming those that are there, for a bound that none keeps.
    """
    bound = _bound(step) if isinstance(step, str) else None
    if bound is None:
        return [step]
    found: list[int | str | None] = [one for one in steps if bound(one)]
    if not found:
        raise UsageError(f"{origin} has no checkpoint at a step {step}; {there(steps)}")
    return found


def require_step(step: int | str | None, steps: Sequence[int], origin: str) -> None:
    """UsageError, naming the steps that are there, for the number (or a save's name) of one that is not."""
    if step is not None and _step_of(step) not in (None, *steps):
        raise UsageError(f"{origin} has no checkpoint {step}; {there(steps)}")


def _bound(text: str) -> Callable[[int], bool] | None:
    match = _BOUND.match(text.strip())
    if match is None:
        return None
    sign, limit = match["sign"], match["step"].strip()
    if sign not in _HOLDS or not (limit.isascii() and limit.isdigit()):
        raise UsageError(f"{text!r} is no bound on a step; write '<= 120' or '< 120'")
    return lambda step: _HOLDS[sign](step, int(limit))


def _step_of(step: int | str) -> int | None:
    """The number in a step or a save's name; None for a tag, which only its source understands."""
    if isinstance(step, int):
        return step
    try:
        return SaveId.parse(step).step
    except ValueError:
        return None


def there(steps: Sequence[int]) -> str:
    """The newest steps, for people."""
    if not steps:
        return "there is none with a step in its name"
    return f"there are steps {listed(steps, 5, rest='older ones')}" if steps[1:] else f"there is step {steps[0]}"
