"""A token bucket: fills with time, holds so much at most, and may go into debt.

Spending only what is in it keeps what is spent in any ``t`` seconds within ``rate * t + capacity``. It starts empty,
so that a job that restarts over and over is not given a full bucket each time; a debt does not outlive the process.
It does not know what it holds (bytes, or seconds of work), nor how time passes: the clock is given. One thread.
"""

from __future__ import annotations

from collections.abc import Callable


class TokenBucket:
    """rate: tokens a second, > 0. capacity: tokens, > 0. clock: seconds, never going back."""

    def __init__(self, rate: float, capacity: float, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._capacity = capacity
        self._clock = clock
        self._level = 0.0
        self._at = clock()

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self._rate

    @property
    def capacity(self) -> float:
        """The most that it holds."""
        return self._capacity

    def available(self) -> float:
        """Tokens in it now; below 0: what is owed."""
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._at) * self._rate)
        self._at = now
        return self._level

    def charge(self, tokens: float) -> None:
        """Take tokens out, even where there are not so many; below 0: give back, as far as there is room."""
        self._level = min(self._capacity, self.available() - tokens)

    def widen(self, capacity: float) -> None:
        """Hold at least so many."""
        self.available()  # what overflowed until now is gone
        self._capacity = max(self._capacity, capacity)
