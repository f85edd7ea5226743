"""The line in which options wait to be bought: damage taken away, a byte; most first.

A multiple-choice knapsack by efficiency: of each unit only the options on the upper convex hull of (bytes, gain)
stand in line, each with what it costs and gains beyond the one before (Sinha and Zoltners 1979). It does not know
what gain is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from policies.base import Choice
from policies.options import Option
from store.names import Unit


@dataclass(frozen=True)
class Bid:
    """A step up for a unit: from what its bid before gives, or from nothing, to ``option``.

    cost: bytes. worth: gain a byte. first: it is the step from nothing."""

    unit: Unit
    option: Option
    cost: float
    worth: float
    first: bool


def bids(unit: Unit, gains: Sequence[tuple[Option, float]]) -> list[Bid]:
    """The steps of a unit along the hull, steepest first. Empty where no option gains anything."""
    found: list[Bid] = []
    paid = gained = 0.0
    while True:
        ahead = [(option, gain) for option, gain in gains if option.nbytes > paid and gain > gained]
        if not ahead:
            return found
        steps = [((gain - gained) / (option.nbytes - paid), option, gain) for option, gain in ahead]
        worth, option, gain = max(steps, key=lambda step: (step[0], -step[1].nbytes))
        found.append(Bid(unit, option, option.nbytes - paid, worth, not found))
        paid, gained = option.nbytes, gain


def bought(line: Iterable[Bid], purse: float) -> Mapping[Unit, Choice]:
    """A choice for each unit in line: what ``purse`` bytes buy from the head of it.

    A unit's first step that cannot be paid ends it: what stands behind would use up what that unit waits for.
    Equal worth goes by name, so that the order of units says nothing."""
    ordered = sorted(line, key=lambda bid: (-bid.worth, bid.unit))
    choices: dict[Unit, Choice] = {}
    waiting: Bid | None = None
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
