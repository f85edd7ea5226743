"""Signals, rank agreement, deadline, final save.

Signals that announce the end of the job: notes when the first one came, and does nothing else.

Handlers are Python's, so they run in the main thread, between two of its bytecodes: a signal that comes while that
thread waits in C is noted when it comes back. They are installed where a signal does what it does by default; a handler
of the user's own stays, and so does a signal that is ignored. A second signal, unless it is an echo of the first, does
what it would have done without this module: by default it ends the process. So does any signal in a forked child.

It knows neither ranks nor saves.

When the end of a job is announced: at which step boundary all ranks stop, and how long they may take over it.

Ranks hear of it at different moments, or only one of them does. Each tells the others at its step boundaries, in a
reduction that it begins at one boundary and looks at in the next, so that nothing waits for it: what any rank had heard
at boundary n, all of them know at boundary n + 1. That is a step later, and costs no step a wait; but no rank can be
two boundaries ahead of another. A rank that ends waits in its exit until the others have come to its last boundary.

Training thread, collective, but for :meth:`Preemption.preempt`. It does not know what is saved.

The last saves of a job that is about to be ended: as much as can become durable by the deadline.

First the save under way is waited for, then as much is saved as is expected to fit. Where time is left after that,
which happens where nothing was known of the storage, or it was faster than it used to be, another save takes more of
what is left. Every one of them is a commit like any other: whatever the deadline cuts off, the one before it stands.

Training thread; collective. It does not know when a job is to end, nor how its process does.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from monitor.config.schema import PreemptionSettings
from monitor.context import JobContext
from monitor.distributed import AsyncFlag, Group
from monitor.events import PreemptedEvent
from monitor.observe.units import is_moving
from monitor.save.saver import Saver
from monitor.types import SaveRequest, StepReport
from policies.base import Choice
from store.certificate import is_lossy
from store.errors import PREEMPTED, ConfigError
from store.names import Unit

_log = logging.getLogger("driftpoint")

ECHO = 1.0
"""Seconds in which the same signal again is the same announcement: schedulers signal a process and its parents, which
pass it on."""

_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class SignalWatcher:
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

    def __init__(self, owner: SignalWatcher, number: signal.Signals, previous: Any) -> None:
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
        self._relay: AsyncFlag | None = group.async_flag() if self._active else None
        self._announced = SignalWatcher(settings.signals if self._active else ())

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
            found = self._relay.exchange(self._announced.first is not None)
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
            passed = self._group.all_reduce_max([int(1e6 * passed)])[0] / 1e6
        return deadline(self._settings.grace_seconds, passed)

    def close(self, leaving: bool) -> None:
        """Signals do again what they did before. leaving: but for echoes, since the process ends as it was told to."""
        self._relay = None
        if not leaving:
            self._announced.close()


def _leave() -> None:
    os.write(2, _TOO_LATE)
    os._exit(PREEMPTED)


_ROUNDS = 8
"""Saves at most: each is expected to take most of the time left, so that more are of no use."""


@dataclass
class FinalSave:
    """Of one job, at ``step``. decide: measures, decides and begins a save; ``save`` and ``saver`` are its.

    affordable: bytes that are expected to become durable in so many seconds, on rank 0."""

    job: JobContext
    saver: Saver
    step: int
    decide: Callable[[SaveRequest], StepReport]
    affordable: Callable[[float], float]

    def make(self, deadline: Deadline) -> StepReport:
        """Save. Returns what was decided and became of it, alike on all ranks. Raises nothing that a rank that is gone
        makes the others raise: the job ends anyhow."""
        try:
            return self._made(deadline)
        except RuntimeError as error:
            _log.error("preempted: another rank is gone, and nothing more can be saved: %s", error)
        return StepReport(self.step, "failed", saved={}, preempted=True)

    def _made(self, deadline: Deadline) -> StepReport:
        demand = SaveRequest("preempted", lambda: self.affordable(deadline.left))
        saved: dict[Unit, Choice] = {}
        self.saver.wait(deadline.left)
        report = self._one(demand, deadline, saved)
        first, rounds = report, 1
        while report.skipped is None and rounds < _ROUNDS and not self._whole() and self._in_time(deadline):
            report, rounds = self._one(demand, deadline, saved), rounds + 1
        if self.job.group.rank == 0:
            self.job.listeners.on_preempted(self._outcome(deadline.passed, report.skipped))
        return replace(first, saved=saved, preempted=True)

    def _one(self, demand: SaveRequest, deadline: Deadline, saved: dict[Unit, Choice]) -> StepReport:
        report = self.decide(demand)
        if report.skipped is not None:
            return report
        self.saver.wait(deadline.left)
        busy = self.saver.settle(self.step, False).skip == "busy"
        failed = bool(self.job.group.all_reduce_max([self.saver.failed])[0])
        if busy or failed:
            return replace(report, skipped="busy" if busy else "failed", saved={})
        saved.update(report.saved or {})
        return report

    def _whole(self) -> bool:
        return bool(self.job.group.broadcast(not stale_units(self.job, self.step)))

    def _outcome(self, seconds: float, skipped: str | None) -> PreemptedEvent:
        ledger, moving = self.job.ledger, [unit for unit in self.job.table.sizes if is_moving(unit)]
        ages = [ledger.staleness(unit, self.step) for unit in moving]
        whole = ages.count(0) == len(moving)
        records = [ledger.versions[unit] for unit in moving] if whole else []
        return PreemptedEvent(
            step=self.step,
            seconds=seconds,
            skipped=skipped,
            moving=len(moving),
            fresh=ages.count(0),
            oldest=max((age for age in ages if age is not None), default=0),
            exact=whole and all(one.version == ledger.newest and not is_lossy(one.encoding) for one in records),
            newest=ledger.newest,
        )

    def _in_time(self, deadline: Deadline) -> bool:
        return bool(self.job.group.broadcast(deadline.left > 0.0))


def stale_units(job: JobContext, step: int) -> Mapping[Unit, int | None]:
    """Rank 0: the moving units whose newest version is not of this step, and how many steps old it is."""
    found = {unit: job.ledger.staleness(unit, step) for unit in job.table.sizes if is_moving(unit)}
    return {unit: staleness for unit, staleness in found.items() if staleness != 0}
