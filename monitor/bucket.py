"""A token bucket of bytes: fills with time, holds so many at most, and may go into debt.

Spending only what is in it keeps what is spent in any ``t`` seconds within ``rate * t + capacity``. It starts empty,
so that a job that restarts over and over is not given a full bucket each time; a debt does not outlive the process.
It does not know what bytes are for. One thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class TokenBucket:
    """rate: bytes a second, > 0. capacity: bytes, > 0. clock: seconds, never going back."""

    def __init__(self, rate: float, capacity: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._capacity = capacity
        self._clock = clock
        self._level = 0.0
        self._at = clock()

    @property
    def capacity(self) -> float:
        """The most that it holds."""
        return self._capacity

    def available(self) -> float:
        """Bytes in it now; below 0: what is owed."""
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._at) * self._rate)
        self._at = now
        return self._level

    def charge(self, nbytes: float) -> None:
        """Take bytes out, even where there are not so many; below 0: give back, as far as there is room."""
        self._level = min(self._capacity, self.available() - nbytes)

    def widen(self, capacity: float) -> None:
        """Hold at least so many."""
        self.available()  # what overflowed until now is gone
        self._capacity = max(self._capacity, capacity)
