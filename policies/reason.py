"""Sentences that give the reason of a choice.

A reason has to stay true when it is read: a drift of 0.0099999 must not be printed as "0.01 < threshold
0.01". So a measured value gets as many digits as it takes to stand on the right side of its limit.
"""

from __future__ import annotations


def compared(name: str, value: float, sign: str, limit_name: str, limit: float) -> str:
    """For instance ``drift 0.0123 >= threshold 0.01``; the limit is written as it was set."""
    return f"{name} {digits(value, limit)} {sign} {limit_name} {limit!r}"


def digits(value: float, limit: float) -> str:
    """``value`` with three significant digits, or more where rounding would change how it compares."""
    for count in range(3, 17):
        text = f"{value:.{count}g}"
        if _order(float(text), limit) == _order(value, limit):
            return text
    return repr(value)


def version(step: int, staleness: int | None) -> str:
    """What a resume would give back of a unit: ``the version of step 110``, or that there is none."""
    return "there is no version yet" if staleness is None else f"the version of step {step - staleness}"


def _order(value: float, limit: float) -> int:
    return (value > limit) - (value < limit)
