"""At which recorded decisions another configuration would decide. Pure."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence

from policies.recorded import Moment


def chosen(moments: Sequence[Moment], every: int | None) -> list[Moment]:
    """The moments nearest to the multiples of ``every``, the later of two equally near, and those that were forced.

    None: all of them. Where the trace is coarser than ``every``, all of them too."""
    if every is None or not moments:
        return list(moments)
    steps = [moment.line.step for moment in moments]
    first = -(-steps[0] // every) * every
    nearest = {_nearest(steps, step) for step in range(first, steps[-1] + 1, every)}
    return [moment for i, moment in enumerate(moments) if i in nearest or moment.line.forced]


def widest(moments: Sequence[Moment]) -> int | None:
    """The most steps between two of them; None where there are fewer than two."""
    steps = [moment.line.step for moment in moments]
    return max((later - step for step, later in itertools.pairwise(steps)), default=None)


def _nearest(steps: Sequence[int], step: int) -> int:
    after = bisect_left(steps, step)
    if after == len(steps):
        return after - 1
    return after if after == 0 or steps[after] - step <= step - steps[after - 1] else after - 1
