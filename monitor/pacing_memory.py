"""How often a version is kept in memory: every so many steps, or as often as copying allows.

``auto``: so seldom that what training waits for it, copies and all, stays below a share of its time, and that the
background thread has most of it to itself. Each rank finds its own and the longest holds, so all come to the same
steps. Training thread.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Literal

FIRST = 10
"""Steps between versions until it is known what they cost."""

_BUSY = 0.25
"""Share of the time that the background thread may take: it uses memory bandwidth and a core."""

_SENDING = 0.5
"""Share of the time that a version may be on its way to a peer."""

_LONGEST = 100_000


class MemoryPace:
    """every: steps, or ``auto`` under ``stall_share``. clock: seconds, never going back."""

    def __init__(
        self, every: int | Literal["auto"], stall_share: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._every = every
        self._share = stall_share
        self._clock = clock
        self._next: int | None = None
        self._interval = every if isinstance(every, int) else FIRST
        self._before: tuple[int, float] | None = None
        self._steps: deque[float] = deque(maxlen=9)
        self._stalls: deque[float] = deque(maxlen=5)
        self._works: deque[float] = deque(maxlen=5)
        self._sends: deque[float] = deque(maxlen=5)
        self._stall = 0.0

    def due(self, step: int) -> bool:
        """Whether a version is due. Alike on all ranks."""
        if self._next is None:
            self._next = step + (self._interval - step % self._interval) % self._interval
        return step >= self._next

    def wanted(self) -> int:
        """Steps that this rank wants between two versions."""
        if isinstance(self._every, int):
            return self._every
        if not (self._steps and self._stalls and self._works):
            return FIRST
        needed = max(median(self._stalls) / self._share, median(self._works) / _BUSY)
        needed = max(needed, median(self._sends) / _SENDING if self._sends else 0.0)
        return max(1, min(_LONGEST, math.ceil(needed / max(median(self._steps), 1e-6))))

    def agreed(self, step: int, interval: int) -> None:
        """A version is due at ``step``; the next one so many steps later. Alike on all ranks."""
        now = self._clock()
        if self._before is not None and step > self._before[0]:
            self._steps.append((now - self._before[1]) / (step - self._before[0]))
        self._before = (step, now)
        if self._stall:
            self._stalls.append(self._stall)
            self._stall = 0.0
        self._interval = interval
        self._next = step + interval

    def put_off(self, step: int) -> None:
        """No version at ``step``, but at the next one. Alike on all ranks."""
        self._next = step + 1

    def restart(self) -> None:
        """The job stands at another step than its own steps brought it to."""
        self._next = self._before = None

    def stalled(self, seconds: float) -> None:
        """Training waited for the version under way."""
        self._stall += seconds

    def took(self, seconds: float) -> None:
        """The background thread worked on a version for so long."""
        self._works.append(seconds)

    def sent(self, seconds: float) -> None:
        """A version was on its way to a peer for so long."""
        self._sends.append(seconds)
