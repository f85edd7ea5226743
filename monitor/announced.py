"""Signals that announce the end of the job: notes when the first one came, and does nothing else.

Handlers are Python's, so they run in the main thread, between two of its bytecodes: a signal that comes while that
thread waits in C is noted when it comes back. They are installed where a signal does what it does by default; a handler
of the user's own stays, and so does a signal that is ignored. A second signal, unless it is an echo of the first, does
what it would have done without this module: by default it ends the process. So does any signal in a forked child.

It knows neither ranks nor saves.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

_log = logging.getLogger("driftpoint")

ECHO = 1.0
"""Seconds in which the same signal again is the same announcement: schedulers signal a process and its parents, which
pass it on."""

_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class Announced:
    """Listens for these signals until it is closed. ``clock``: seconds, never going back."""

    def __init__(self, names: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._owner = os.getpid()
        self._heard: dict[int, float] = {}
        self._handlers: list[_Handler] = []
        self.first: float | None = None
        """When the first one came; None as long as none did."""
        if threading.current_thread() is threading.main_thread():
            for name in names:
                self._listen(signal.Signals[name])
        elif names:
            _log.warning(
                "preemption: attach was not called in the main thread, so that signals cannot be heeded: call "
                "ckpt.preempt() when the end is announced"
            )

    def note(self) -> None:
        """The end is announced now."""
        if self.first is None:
            self.first = self._clock()

    def close(self) -> None:
        """Listen no more: signals do what they did before."""
        handlers, self._handlers = self._handlers, []
        for handler in reversed(handlers):
            handler.remove()

    def heard(self, number: int) -> bool:
        """A signal came. False where it is not to be noted, but to do what it did before."""
        if os.getpid() != self._owner or not self._handlers:
            return False
        now = self._clock()
        if now - self._heard.setdefault(number, now) > ECHO:
            return False
        self.note()
        return True

    def _listen(self, number: signal.Signals) -> None:
        previous = signal.getsignal(number)
        if previous in _DEFAULTS or isinstance(previous, _Handler):
            self._handlers.append(_Handler(self, number, previous))
        else:
            _log.warning(
                "preemption: %s has a handler already, which stays: call ckpt.preempt() in it, or name another signal "
                "in `preemption: {signals: [...]}`",
                number.name,
            )


class _Handler:
    """One signal's. It holds no more than a weak reference: a checkpointer that was dropped listens no more."""

    def __init__(self, owner: Announced, number: signal.Signals, previous: Any) -> None:
        self._owner = weakref.ref(owner)
        self._number = number
        self._previous = previous
        signal.signal(number, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self._heard(number):
            self._pass_on(number, frame)

    def _heard(self, number: int) -> bool:
        """Whether anybody noted it: there may be more checkpointers in this process, whose handlers lie below."""
        owner = self._owner()
        mine = owner is not None and owner.heard(number)
        below = isinstance(self._previous, _Handler) and self._previous._heard(number)
        return mine or below

    def remove(self) -> None:
        """Put back what was there before, unless another handler came on top: then this one only passes on."""
        present: object = signal.getsignal(self._number)
        if present is self and threading.current_thread() is threading.main_thread():
            signal.signal(self._number, self._previous)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if callable(self._previous):
            self._previous(number, frame)
            return
        signal.signal(number, self._previous)
        os.kill(os.getpid(), number)
