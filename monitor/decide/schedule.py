"""Schedule decisions (fixed or automatic interval) and in-memory snapshots, from measured step and save times.

All ranks reach the same steps: rank 0's choice travels with the decision (``History.interval``), everything else
follows from what all ranks know. Training thread."""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median
from typing import Literal

from monitor.config.schema import AutoSettings
from monitor.events import AttachEvent, CommitEvent, DecisionEvent, SaveListener
from monitor.telemetry.metrics import Metrics
from policies.interval import FIRST, Interval, Limits, Measured, Prior, next_interval

_log = logging.getLogger("driftpoint")

_STEPS = 51  # steps in a median
_SAVES = 5  # decisions and saves in a median

FIRST_SNAPSHOT = 10  # steps between in-memory snapshots until their cost is known

_MAX_BUSY_SHARE = 0.25
"""Share of the time that the background thread may work on snapshots: it uses memory bandwidth and a core."""

_MAX_SEND_SHARE = 0.5  # share of the time that a snapshot may be in transit to a peer

_MAX_INTERVAL = 100_000

_MOST_SPARED = 100  # most steps before a save in which snapshots are left out


class StepTiming:
    """Measures the time of steps, decisions and commits. Times are monotonic seconds.

    Medians of the last few, so that an evaluation between two steps, or the slow first save, does not distort them."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._costs: deque[float] = deque(maxlen=_SAVES)
        self._durable: deque[float] = deque(maxlen=_SAVES)
        self._last: float | None = None
        self._stall = 0.0
        self._cost: float | None = None

    @property
    def step(self) -> float | None:
        """Seconds of a step; None if not known yet."""
        return _median(self._steps)

    def restart(self) -> None:
        """Ignore the time until the next step (after a resume, for example)."""
        self._last = None
        self._stall = 0.0
        self._cost = None

    def stepped(self, at: float) -> None:
        """Record an optimizer step, before a decision on it."""
        if self._last is not None:
            self._steps.append(max(0.0, at - self._last - self._stall))
        self._last, self._stall = at, 0.0

    def stalled(self, seconds: float, counts: bool) -> None:
        """Record that training waited for a decision.

        counts: the decision is typical; False for ``save()``, or if a save was under way."""
        self._stall += seconds
        self._settle()
        self._cost = seconds if counts else None

    def waited(self, seconds: float) -> None:
        """Record that an optimizer step waited for copies of the last save."""
        self._stall += seconds
        if self._cost is not None:
            self._cost += seconds

    def committed(self, seconds: float) -> None:
        """Record a commit, ``seconds`` after its save began."""
        self._durable.append(seconds)

    def measured(self) -> Measured:
        """Return the current measurements; the last decision counts with all its cost."""
        self._settle()
        # The slowest commit, not the median: a decision during a save cannot begin another.
        return Measured(_median(self._steps), _median(self._costs), max(self._durable, default=None))

    def _settle(self) -> None:
        if self._cost is not None:
            self._costs.append(self._cost)
        self._cost = None


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return median(known) if known else None


class Schedule(SaveListener, ABC):
    """Determines at which steps to decide, and measures the time of steps, decisions and saves."""

    def __init__(self, metrics: Metrics) -> None:
        self.timing = StepTiming()  # measurements of this rank; only those of rank 0 are used
        self._metrics = metrics

    def on_attach(self, event: AttachEvent) -> None:
        if event.rank == 0:
            # Evaluated at each scrape, in its thread, so that steps do not pay for it.
            self._metrics.gauge("step_seconds").set_function(lambda: self.timing.step or 0.0)

    def on_step(self, step: int, at: float) -> None:  # noqa: ARG002 - the event's
        self.timing.stepped(at)

    def on_decision(self, event: DecisionEvent) -> None:
        self.timing.stalled(event.stall, counts=event.decided is not None and not event.decided.forced)

    def on_copy_wait(self, seconds: float) -> None:
        self.timing.waited(seconds)

    def on_commit(self, event: CommitEvent) -> None:
        self.timing.committed(event.seconds)

    def count(self, interruptions: int, rank_seconds: float) -> None:
        """Set the interruptions and rank-seconds of the incarnations before this one."""

    def restart(self) -> None:
        """Start anew after a resume. Alike on all ranks."""

    @abstractmethod
    def due(self, step: int) -> bool:
        """Return whether to decide at this step. Alike on all ranks."""

    def choose(self) -> int | None:
        """Return the steps to the next decision; None if the interval is fixed. Rank 0, at a decision."""
        return None

    def agreed(self, step: int, interval: int | None) -> None:
        """Record a decision at ``step``; ``interval`` is rank 0's choice. Alike on all ranks."""

    def put_off(self, step: int, busy: bool) -> None:
        """Record that no decision was possible at ``step``. busy: a save is under way. Alike on all ranks."""


class FixedInterval(Schedule):
    """Decides every ``every`` steps, counted from step 0 of the training."""

    def __init__(self, every: int, metrics: Metrics) -> None:
        super().__init__(metrics)
        self._every = every
        metrics.gauge("decision_interval_steps").set(every)

    def due(self, step: int) -> bool:
        return step % self._every == 0


class AdaptiveInterval(Schedule):
    """Chooses the interval that loses the least time (``every: auto``); see :mod:`policies.interval`.

    world_size: ranks, each counted as one GPU. clock: monotonic seconds."""

    def __init__(
        self,
        settings: AutoSettings,
        max_staleness: int | None,
        world_size: int,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(metrics)
        self._limits = Limits(settings.max_loss_minutes * 60.0, max_staleness)
        self._prior = Prior(settings.gpu_hours_per_interruption, settings.preemptions_per_hour, world_size)
        self._world_size = world_size
        self._clock = clock
        self._began = clock()
        self._before = (0, 0.0)
        # With max_staleness, units may already be close to it after a restart: decide at the first step.
        self._first = FIRST if max_staleness is None else 1
        self._interval = FIRST
        self._at = 0  # step of the last decision, or attempt
        self._next: int | None = None
        self._attempts = 0
        self._logged_steps: int | None = None
        self._warned_slow = False
        metrics.gauge("decision_interval_steps").set(self._first)

    def count(self, interruptions: int, rank_seconds: float) -> None:
        self._before = (interruptions, rank_seconds)
        self._metrics.gauge("interruptions").set(interruptions)

    def restart(self) -> None:
        self._next = None
        self._attempts = 0
        self.timing.restart()

    def due(self, step: int) -> bool:
        # The first decision comes soon: its measurements determine the next ones.
        if self._next is None or step < self._at:  # the framework may load an earlier step
            self._at, self._next = 0, step - 1 + self._first
        return step >= self._next

    def choose(self) -> int | None:
        measured, (interruptions, rank_seconds) = self.timing.measured(), self._before
        rank_seconds += self._world_size * max(0.0, self._clock() - self._began)  # the clock may have gone back
        per_hour = self._prior.expected_per_hour(interruptions, rank_seconds / 3600.0)
        interval = next_interval(self._interval, measured, per_hour, self._limits)
        self._report(interval, measured, per_hour)
        return interval.steps

    def agreed(self, step: int, interval: int | None) -> None:
        self._interval = interval or self._interval
        self._at, self._next = step, step + self._interval
        self._attempts = 0

    def put_off(self, step: int, busy: bool) -> None:
        # If a save is running, retry with exponential backoff: at most twice the time of the save is lost.
        wait = self._interval
        if busy:
            wait = max(1, self._interval // 4) << min(self._attempts, 40)
            self._attempts += 1
        self._at, self._next = step, step + min(wait, self._limits.max_staleness or wait)

    def _report(self, interval: Interval, measured: Measured, per_hour: float) -> None:
        self._metrics.gauge("decision_interval_steps").set(interval.steps)
        self._metrics.gauge("expected_interruptions_per_hour").set(per_hour)
        self._metrics.gauge("decision_cost_seconds").set(measured.cost or 0.0)
        if interval.too_slow and not self._warned_slow:
            _log.warning(
                "every: auto: auto.max_loss_minutes cannot be kept, because a save takes %.3g s to become durable and "
                "a step %.3g s; saves run back to back. Raise the limit, save less, or use faster storage",
                measured.durable or 0.0,
                measured.step or 0.0,
            )
        self._warned_slow = interval.too_slow
        if self._logged_steps is None or not self._logged_steps / 2 <= interval.steps <= self._logged_steps * 2:
            before = "" if self._logged_steps is None else f" (before: {self._logged_steps})"
            known = [
                f"{name} {seconds:.3g} s"
                for name, seconds in (("a step takes", measured.step), ("a save costs training", measured.cost))
                if seconds is not None
            ]
            told = ", ".join([*known, f"one interruption is expected every {1 / per_hour:.3g} h"])
            text = "every: auto: %d steps to the next decision%s, reason: %s; %s"
            _log.info(text, interval.steps, before, interval.because, told)
            self._logged_steps = interval.steps


def schedule_for(
    every: int | Literal["auto"], auto: AutoSettings, max_staleness: int | None, world_size: int, metrics: Metrics
) -> Schedule:
    """Build the schedule that the settings describe."""
    if every == "auto":
        return AdaptiveInterval(auto, max_staleness, world_size, metrics)
    return FixedInterval(every, metrics)


class SnapshotSchedule:
    """Schedules in-memory snapshots: at a fixed interval, or (``auto``) as often as copying allows.

    ``auto`` keeps the share of time that training waits below ``stall_share``, and limits the work of the background
    thread and of sending. Each rank computes its interval and the longest applies. clock: monotonic seconds."""

    def __init__(
        self, every: int | Literal["auto"], stall_share: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._every = every
        self._share = stall_share
        self._clock = clock
        self._next: int | None = None
        self._interval = every if isinstance(every, int) else FIRST_SNAPSHOT
        self._before: tuple[int, float] | None = None
        self._steps: deque[float] = deque(maxlen=9)
        self._stalls: deque[float] = deque(maxlen=5)
        self._works: deque[float] = deque(maxlen=5)
        self._sends: deque[float] = deque(maxlen=5)
        self._stall = 0.0

    def due(self, step: int) -> bool:
        """Return whether a snapshot is due. Alike on all ranks."""
        if self._next is None or step < self._next - self._interval:  # the framework may load an earlier step
            self._next = step + (self._interval - step % self._interval) % self._interval
        return step >= self._next

    def wanted(self) -> int:
        """Return the interval in steps that this rank needs."""
        if isinstance(self._every, int):
            return self._every
        if not (self._steps and self._stalls and self._works):
            return FIRST_SNAPSHOT
        needed = max(median(self._stalls) / self._share, median(self._works) / _MAX_BUSY_SHARE)
        needed = max(needed, median(self._sends) / _MAX_SEND_SHARE if self._sends else 0.0)
        return max(1, min(_MAX_INTERVAL, math.ceil(needed / max(median(self._steps), 1e-6))))

    @property
    def spare(self) -> int:
        """Steps before a save in which a snapshot may be left out, since the save makes one. The same on all ranks."""
        return 0 if isinstance(self._every, int) else min(self._interval, _MOST_SPARED) - 1

    def agreed(self, step: int, interval: int) -> None:
        """Record a snapshot at ``step``; the next one is ``interval`` steps later. Alike on all ranks."""
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
        """Move a snapshot that was not possible at ``step`` to the next step. Alike on all ranks."""
        self._next = step + 1

    def restart(self) -> None:
        """Start anew after a resume."""
        self._next = self._before = None

    def stalled(self, seconds: float) -> None:
        """Record that training waited for the snapshot under way."""
        self._stall += seconds

    def took(self, seconds: float) -> None:
        """Record the seconds that the background thread worked on a snapshot."""
        self._works.append(seconds)

    def sent(self, seconds: float) -> None:
        """Record the seconds that sending a snapshot to a peer took."""
        self._sends.append(seconds)
