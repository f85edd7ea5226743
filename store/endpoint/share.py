"""How much of a core clients may take from the process that serves them: a training, whose threads share one lock.

What is taken is counted as it is taken; beyond the share the next client waits. So whoever asks without end, or sends
what is dear to read, makes the metrics late and never the training. Any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SHARE = 0.1
"""Of one core, in the long run."""

BURST = 1.0
"""Seconds of a core that may be taken at once, after so long a time without."""


class Share:
    """clock: seconds, never going back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._left, self._as_of = BURST, clock()

    def took(self, seconds: float) -> None:
        """A thread worked for a client for so long."""
        with self._lock:
            self._refill()
            self._left -= seconds

    def wait(self) -> float:
        """Seconds until the next client may come; 0: now."""
        with self._lock:
            self._refill()
            return max(0.0, -self._left / SHARE)

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(BURST, self._left + (now - self._as_of) * SHARE)
        self._as_of = now
