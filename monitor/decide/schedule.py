"""When to decide: fixed or auto interval, step timing, memory-tier interval.

What a job has shown of itself: seconds a step, seconds that a decision costs training, seconds to a commit.

Medians of the last few, so that an evaluation between two steps, or the first save, which is slower than those that
follow, is no measure of what comes. Told by the training thread of its rank; it knows neither saves nor the clock.

When to decide: every so many steps, or as ``every: auto`` finds best from what rank 0 measures.

All ranks come to the same steps: what only rank 0 can know travels with the decision itself (``History.interval``),
and what follows a decision that was not made is worked out from what all of them know already. Training thread.

How often a version is kept in memory: every so many steps, or as often as copying allows.

``auto``: so seldom that what training waits for it, copies and all, stays below a share of its time, and that the
background thread has most of it to itself. Each rank finds its own and the longest holds, so all come to the same
steps. Training thread.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median
from typing import Literal

from typing_extensions import override

from monitor.config.schema import AutoSettings
from monitor.events import AttachEvent, CommitEvent, DecisionEvent, SaveListener
from monitor.telemetry.metrics import Metrics
from policies.interval import FIRST, Interval, Limits, Measured, Prior, next_interval

_STEPS = 51
_SAVES = 5


class StepTiming:
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


_log = logging.getLogger("driftpoint")


class Schedule(SaveListener):
    """Says at which steps decisions are made, and measures the time of steps, decisions and saves."""

    def __init__(self, metrics: Metrics) -> None:
        self.timing = StepTiming()
        """Of this rank; only rank 0's counts."""
        self._metrics = metrics

    @override
    def on_attach(self, event: AttachEvent) -> None:
        if event.rank == 0:
            # At each scrape, in its thread: copying a few numbers is no race, and steps need not pay for it.
            self._metrics.gauge("step_seconds").set_function(lambda: self.timing.step or 0.0)

    @override
    def on_step(self, step: int, at: float) -> None:
        self.timing.stepped(at)

    @override
    def on_decision(self, event: DecisionEvent) -> None:
        self.timing.stalled(event.stall, counts=event.decided is not None and not event.decided.forced)

    @override
    def on_copy_wait(self, seconds: float) -> None:
        self.timing.waited(seconds)

    @override
    def on_commit(self, event: CommitEvent) -> None:
        self.timing.committed(event.seconds)

    def count(self, interruptions: int, rank_seconds: float) -> None:
        """Of the incarnations before this one."""

    def restart(self) -> None:
        """The job stands at another step than it was brought to by its own steps. Alike on all ranks."""

    def due(self, step: int) -> bool:
        """Whether to decide at this step. Alike on all ranks."""
        raise NotImplementedError

    def choose(self) -> int | None:
        """Rank 0, at a decision: the steps to the next one, None where that is settled already."""
        return None

    def agreed(self, step: int, interval: int | None) -> None:
        """A decision was made at ``step``; ``interval`` is rank 0's choice. Alike on all ranks."""

    def put_off(self, step: int, busy: bool) -> None:
        """No decision could be made at ``step``; ``busy``: for a save that is under way. Alike on all ranks."""


class FixedInterval(Schedule):
    """Every ``every`` steps, counted from step 0 of the training: nothing is chosen."""

    def __init__(self, every: int, metrics: Metrics) -> None:
        super().__init__(metrics)
        self._every = every
        metrics.gauge("decision_interval_steps").set(every)

    @override
    def due(self, step: int) -> bool:
        return step % self._every == 0


class AdaptiveInterval(Schedule):
    """``every: auto``. world_size: ranks, each taken for a GPU. clock: seconds, never going back."""

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
        # What is held back until a bound is near was promised a decision that the next incarnation must keep: at once.
        self._first = FIRST if max_staleness is None else 1
        self._interval = FIRST
        self._next: int | None = None
        self._in_vain = 0
        self._told: int | None = None
        self._told_slow = False
        metrics.gauge("decision_interval_steps").set(self._first)

    @override
    def count(self, interruptions: int, rank_seconds: float) -> None:
        self._before = (interruptions, rank_seconds)
        self._metrics.gauge("interruptions").set(interruptions)

    @override
    def restart(self) -> None:
        self._next = None
        self._in_vain = 0
        self.timing.restart()

    @override
    def due(self, step: int) -> bool:
        # The first one comes soon: the others are placed by what it measures.
        if self._next is None:
            self._next = step - 1 + self._first
        return step >= self._next

    @override
    def choose(self) -> int | None:
        measured, per_hour = self.timing.measured(), self._per_hour()
        found = next_interval(self._interval, measured, per_hour, self._limits)
        self._show(found, measured, per_hour)
        return found.steps

    @override
    def agreed(self, step: int, interval: int | None) -> None:
        self._interval = interval or self._interval
        self._next = step + self._interval
        self._in_vain = 0

    @override
    def put_off(self, step: int, busy: bool) -> None:
        # While a save is under way: soon, then at doubling distances, since the time that the first one takes is not
        # known. So a decision is never later than twice the time of the save.
        wait = self._interval
        if busy:
            wait = max(1, self._interval // 4) << min(self._in_vain, 40)
            self._in_vain += 1
        self._next = step + min(wait, self._limits.max_staleness or wait)

    def _per_hour(self) -> float:
        interruptions, rank_seconds = self._before
        own = self._world_size * max(0.0, self._clock() - self._began)  # a clock that went back ends no training
        return self._prior.expected_per_hour(interruptions, (rank_seconds + own) / 3600.0)

    def _show(self, found: Interval, measured: Measured, per_hour: float) -> None:
        self._metrics.gauge("decision_interval_steps").set(found.steps)
        self._metrics.gauge("expected_interruptions_per_hour").set(per_hour)
        self._metrics.gauge("decision_cost_seconds").set(measured.cost or 0.0)
        if found.too_slow and not self._told_slow:
            _log.warning(
                "every: auto: auto.max_loss_minutes cannot hold, since a save takes %.3g s to become durable and a "
                "step %.3g s: saves follow each other as they can. Raise it, write less, or to a faster disk",
                measured.durable or 0.0,
                measured.step or 0.0,
            )
        self._told_slow = found.too_slow
        if self._told is None or not self._told / 2 <= found.steps <= self._told * 2:
            self._tell(found, measured, per_hour)

    def _tell(self, found: Interval, measured: Measured, per_hour: float) -> None:
        was = "" if self._told is None else f" (it was {self._told})"
        known = [
            f"{name} {seconds:.3g} s"
            for name, seconds in (("a step takes", measured.step), ("a save costs training", measured.cost))
            if seconds is not None
        ]
        _log.info(
            "every: auto: %d steps to the next decision%s, for %s; %s",
            found.steps,
            was,
            found.because,
            ", ".join([*known, f"one interruption in {1 / per_hour:.3g} h is expected"]),
        )
        self._told = found.steps


def schedule_for(
    every: int | Literal["auto"], auto: AutoSettings, max_staleness: int | None, world_size: int, metrics: Metrics
) -> Schedule:
    """The pace that the settings name."""
    if every == "auto":
        return AdaptiveInterval(auto, max_staleness, world_size, metrics)
    return FixedInterval(every, metrics)


FIRST_SNAPSHOT = 10
"""Steps between versions until it is known what they cost."""

_BUSY = 0.25
"""Share of the time that the background thread may take: it uses memory bandwidth and a core."""

_SENDING = 0.5
"""Share of the time that a version may be on its way to a peer."""

_LONGEST = 100_000


class SnapshotSchedule:
    """every: steps, or ``auto`` under ``stall_share``. clock: seconds, never going back."""

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
        """Whether a version is due. Alike on all ranks."""
        if self._next is None:
            self._next = step + (self._interval - step % self._interval) % self._interval
        return step >= self._next

    def wanted(self) -> int:
        """Steps that this rank wants between two versions."""
        if isinstance(self._every, int):
            return self._every
        if not (self._steps and self._stalls and self._works):
            return FIRST_SNAPSHOT
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
