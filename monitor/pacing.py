"""When to decide: every so many steps, or as ``every: auto`` finds best from what rank 0 measures.

All ranks come to the same steps: what only rank 0 can know travels with the decision itself (``History.interval``),
and what follows a decision that was not made is worked out from what all of them know already. Training thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal

from typing_extensions import override

from monitor.events import AttachEvent, CommitEvent, DecisionEvent, SaveListener
from monitor.metrics import Metrics
from monitor.settings import AutoSettings
from monitor.timing import Timing
from policies.interruptions import Prior
from policies.interval import FIRST, Interval, Limits, Measured, next_interval

_log = logging.getLogger("driftpoint")


class Pace(SaveListener):
    """Says at which steps decisions are made, and measures the time of steps, decisions and saves."""

    def __init__(self, metrics: Metrics) -> None:
        self.timing = Timing()
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


class Steady(Pace):
    """Every ``every`` steps, counted from step 0 of the training: nothing is chosen."""

    def __init__(self, every: int, metrics: Metrics) -> None:
        super().__init__(metrics)
        self._every = every
        metrics.gauge("decision_interval_steps").set(every)

    @override
    def due(self, step: int) -> bool:
        return step % self._every == 0


class Adaptive(Pace):
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


def pace_for(
    every: int | Literal["auto"], auto: AutoSettings, max_staleness: int | None, world_size: int, metrics: Metrics
) -> Pace:
    """The pace that the settings name."""
    if every == "auto":
        return Adaptive(auto, max_staleness, world_size, metrics)
    return Steady(every, metrics)
