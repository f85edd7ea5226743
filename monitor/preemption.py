"""When the end of a job is announced: at which step boundary all ranks stop, and how long they may take over it.

Ranks hear of it at different moments, or only one of them does. Each tells the others at its step boundaries, in a
reduction that it begins at one boundary and looks at in the next, so that nothing waits for it: what any rank had heard
at boundary n, all of them know at boundary n + 1. That is a step later, and costs no step a wait; but no rank can be
two boundaries ahead of another. A rank that ends waits in its exit until the others have come to its last boundary.

Training thread, collective, but for :meth:`Preemption.preempt`. It does not know what is saved.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from monitor.announced import Announced
from monitor.group import Group, Relay
from monitor.settings import PreemptionSettings
from store.errors import PREEMPTED, ConfigError

_log = logging.getLogger("driftpoint")

_MARGIN = 0.05
"""Share of the grace that is kept for leaving."""

_LEAST = 0.2
"""Seconds that are kept for it in any case."""

_TOO_LATE = b"driftpoint: preempted: not done when the time was over; the commit before is intact\n"


@dataclass(frozen=True)
class Deadline:
    """Moments of this process's monotonic clock. heard: of the first signal, on whichever rank. at: when whatever is
    saved has to be durable. end: when the process has to be gone."""

    heard: float
    at: float
    end: float

    @property
    def left(self) -> float:
        """Seconds until then, >= 0."""
        return max(0.0, self.at - time.monotonic())

    @property
    def passed(self) -> float:
        """Seconds since the signal."""
        return time.monotonic() - self.heard

    @property
    def to_leave(self) -> float:
        """Seconds for what remains to be done when everything is saved, or cannot be."""
        return max(self.left, (self.end - self.at) / 4)

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """Within, the process ends in time, whatever it waits for."""
        timer = threading.Timer(self.left + (self.end - self.at) / 2, _leave)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def deadline(grace: float, passed: float) -> Deadline:
    """The signal came ``passed`` seconds ago."""
    now = time.monotonic()
    end = now - passed + grace
    return Deadline(now - passed, end - max(_LEAST, _MARGIN * grace), end)


class Preemption:
    """Listens, and brings the ranks together. Making one is collective. active: False where nothing is to be saved."""

    def __init__(self, settings: PreemptionSettings, group: Group, active: bool = True) -> None:
        self._settings = settings
        self._group = group
        self._active = active and bool(settings.signals)
        self._relay: Relay | None = group.relay() if self._active else None
        self._announced = Announced(settings.signals if self._active else ())

    def preempt(self) -> None:
        """See :meth:`monitor.Checkpointer.preempt`."""
        if not self._active:
            raise ConfigError(
                "preempt(): preemption is off (`preemption: {signals: []}`, or policy observe, which saves nothing): "
                "name a signal that announces the end of a job"
            )
        self._announced.note()

    def agreed(self) -> bool:
        """At every step boundary: whether the job stops at this one, alike on all ranks. True once at most."""
        if self._relay is None:
            return False
        try:
            found = self._relay.swap(self._announced.first is not None)
        except RuntimeError as error:  # what torch raises where another rank is gone
            self._relay = None
            _log.warning("preemption: the ranks cannot agree any more, signals are not heeded from now on: %s", error)
            return False
        if found:
            self._relay = None
        return found

    def deadline(self) -> Deadline:
        """By the earliest signal. Collective."""
        first = self._announced.first
        passed = 0.0 if first is None else time.monotonic() - first
        with suppress(RuntimeError):  # another rank is gone; whoever needs it will find out
            passed = self._group.largest([int(1e6 * passed)])[0] / 1e6
        return deadline(self._settings.grace_seconds, passed)

    def close(self, leaving: bool) -> None:
        """Signals do again what they did before. leaving: but for echoes, since the process ends as it was told to."""
        self._relay = None
        if not leaving:
            self._announced.close()


def _leave() -> None:
    os.write(2, _TOO_LATE)
    os._exit(PREEMPTED)
