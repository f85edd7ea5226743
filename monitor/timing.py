"""What a job has shown of itself: seconds a step, seconds that a decision costs training, seconds to a commit.

Medians of the last few, so that an evaluation between two steps, or the first save, which is slower than those that
follow, is no measure of what comes. Told by the training thread of its rank; it knows neither saves nor the clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from policies.interval import Measured

_STEPS = 51
_SAVES = 5


class Timing:
    """All moments are seconds on one clock that never goes back."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._costs: deque[float] = deque(maxlen=_SAVES)
        self._durable: deque[float] = deque(maxlen=_SAVES)
        self._last: float | None = None
        self._held_up = 0.0
        self._cost: float | None = None

    @property
    def step(self) -> float | None:
        """Seconds that a step takes; None where that is not known yet."""
        return _median(self._steps)

    def restart(self) -> None:
        """What comes between the step before and the next one is no step (a resume, say)."""
        self._last = None
        self._held_up = 0.0
        self._cost = None

    def stepped(self, at: float) -> None:
        """An optimizer step was taken; before anything is decided on it."""
        if self._last is not None:
            self._steps.append(max(0.0, at - self._last - self._held_up))
        self._last, self._held_up = at, 0.0

    def stalled(self, seconds: float, counts: bool) -> None:
        """Training waited for a decision. counts: for one that is like those to come, not one that was asked for by
        hand, or that came to nothing because a save was under way."""
        self._held_up += seconds
        self._settle()
        self._cost = seconds if counts else None

    def waited(self, seconds: float) -> None:
        """An optimizer step waited for copies of the save that the last decision began."""
        self._held_up += seconds
        if self._cost is not None:
            self._cost += seconds

    def committed(self, seconds: float) -> None:
        """A save became durable, so long after it began."""
        self._durable.append(seconds)

    def measured(self) -> Measured:
        """As of now, the last decision with all that it cost."""
        self._settle()
        # The slowest commit, not the median: a decision that comes too early begins no save at all.
        slowest = max(self._durable) if self._durable else None
        return Measured(_median(self._steps), _median(self._costs), slowest)

    def _settle(self) -> None:
        if self._cost is not None:
            self._costs.append(self._cost)
        self._cost = None


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None
