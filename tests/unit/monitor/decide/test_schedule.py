"""When to decide: what the pace makes of what is measured, on a clock that the test moves."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monitor.config.schema import AutoSettings
from monitor.decide.schedule import AdaptiveInterval, FixedInterval, schedule_for
from monitor.telemetry.metrics import Metrics
from policies.interval import daly


class Clock:
    """Goes when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Run:
    """A job on one rank: what it takes, and what became of its decisions."""

    step_seconds: float = 1.0
    cost: float = 0.5
    durable: float = 5.0
    auto: AutoSettings = field(default_factory=AutoSettings)
    max_staleness: int | None = None
    step: int = 0
    decisions: list[tuple[int, int | None]] = field(default_factory=list)
    """Step, and the interval; None where a save was under way."""

    def __post_init__(self) -> None:
        self.clock, self.metrics = Clock(), Metrics()
        self.pace = AdaptiveInterval(self.auto, self.max_staleness, 8, self.metrics, self.clock)
        self.commits_at = [-math.inf]

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.clock.now += self.step_seconds
            self.step += 1
            self.pace.timing.stepped(self.clock.now)
            if self.pace.due(self.step):
                self._decide()

    def _decide(self) -> None:
        if self.commits_at[-1] > self.clock.now:
            self.pace.put_off(self.step, busy=True)
            self.decisions.append((self.step, None))
            return
        if self.commits_at[-1] > 0:
            self.pace.timing.committed(self.durable)
        interval = self.pace.choose()
        self.pace.agreed(self.step, interval)
        self.clock.now += self.cost
        self.pace.timing.stalled(self.cost, counts=True)
        self.commits_at.append(self.clock.now + self.durable)
        self.decisions.append((self.step, interval))

    @property
    def interval(self) -> int:
        return next(interval for _, interval in reversed(self.decisions) if interval is not None)


def test_every_so_many_steps_nothing_is_chosen() -> None:
    pace = schedule_for(7, AutoSettings(), None, 1, Metrics())
    assert isinstance(pace, FixedInterval)
    for restart in (0, 3):
        pace.restart()
        assert [step for step in range(restart + 1, 30) if pace.due(step)] == [7, 14, 21, 28]
    assert pace.choose() is None


def test_it_starts_soon_and_comes_to_the_optimum() -> None:
    run = Run(auto=AutoSettings(max_loss_minutes=600))
    run.go(6000)
    best = daly(0.5, 50_000 / 8 * 3600)
    assert [interval for _, interval in run.decisions[:6]] == [3, None, None, 12, 48, 192]
    assert best / 1.26 < run.interval < best * 1.26
    assert run.metrics.registry.get_sample_value("driftpoint_decision_interval_steps") == run.interval


def test_steps_that_take_longer_and_saves_that_cost_more_are_followed() -> None:
    run = Run(auto=AutoSettings(gpu_hours_per_interruption=80, max_loss_minutes=600))
    run.go(8000)
    before = run.interval
    run.step_seconds = 4.0
    run.go(3 * before)
    assert run.interval == pytest.approx(before / 4, rel=0.3)
    slower = run.interval
    run.cost = 8.0
    run.go(12 * slower)
    assert run.interval == pytest.approx(4 * slower, rel=0.35)


def test_one_slow_save_and_one_long_evaluation_change_nothing() -> None:
    run = Run(auto=AutoSettings(gpu_hours_per_interruption=80, max_loss_minutes=600))
    run.go(8000)
    before = run.interval
    for cost, pause in ((100.0, 0.0), (0.5, 5000.0)):
        run.cost = cost
        run.clock.now += pause
        run.go(before)
        run.cost = 0.5
        run.go(before)
    assert run.interval == before


def test_after_the_start_hardly_a_decision_finds_a_save_under_way() -> None:
    """Saves that cost next to nothing and take long: as often as they can be."""
    run = Run(cost=1e-6, durable=300.0)
    run.go(20_000)
    busy = [step for step, interval in run.decisions if interval is None]
    assert busy and max(busy) < 700  # of the first save alone, which nobody knows the length of
    assert len(busy) < 12
    assert run.interval == 301


@given(durable=st.floats(0.5, 5000))
@settings(max_examples=50)
def test_the_first_save_is_not_waited_for_much_longer_than_it_takes(durable: float) -> None:
    run = Run(durable=durable)
    run.go(int(3 * durable) + 20)
    made = [step for step, interval in run.decisions if interval is not None]
    assert made[0] == 3
    assert made[1] - made[0] <= 2 * durable + 6


def test_what_may_be_lost_holds() -> None:
    run = Run(auto=AutoSettings(max_loss_minutes=10), durable=60.0)
    run.go(20_000)
    assert run.interval == math.floor(600 - 60 - 0.5)


def test_what_cannot_hold_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(auto=AutoSettings(max_loss_minutes=1), durable=60.0)
    with caplog.at_level(logging.WARNING, "driftpoint"):
        run.go(2000)
    assert len(caplog.records) == 1 and "max_loss_minutes cannot be kept" in caplog.text
    assert run.interval == 61


def test_a_change_is_told_when_it_is_more_than_twofold(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "driftpoint"):
        run = Run(auto=AutoSettings(gpu_hours_per_interruption=80, max_loss_minutes=600))
        run.go(20_000)
    told = [record.message.split(" steps")[0].split()[-1] for record in caplog.records]
    assert told == ["3", "12", "48", "190"]
    assert "one interruption is expected every" in caplog.text


def test_interruptions_bring_decisions_closer() -> None:
    intervals = []
    for interruptions in (0, 1, 3, 10):
        run = Run(auto=AutoSettings(max_loss_minutes=6000))
        run.pace.count(interruptions, 8 * 3600.0 * interruptions)
        run.go(20_000)
        intervals.append(run.interval)
    assert intervals == sorted(intervals, reverse=True)
    assert intervals[-1] == pytest.approx(daly(0.5, 1.4 * 3600), rel=0.3)


@given(
    max_staleness=st.integers(1, 300),
    step_seconds=st.floats(0.01, 100),
    cost=st.floats(0, 100),
    durable=st.floats(0, 1000),
    restarts=st.lists(st.integers(1, 200), max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_max_staleness_is_the_most_between_decisions(
    max_staleness: int, step_seconds: float, cost: float, durable: float, restarts: list[int]
) -> None:
    """And between the last one before an interruption and the first one after it."""
    run = Run(step_seconds, cost, durable, max_staleness=max_staleness)
    for steps in [*restarts, 500]:
        run.go(steps)
        run.step = run.decisions[-1][0] if run.decisions else 0
        run.pace.restart()
        run.decisions.append((run.step, 1))
    met = sorted({step for step, _ in run.decisions})
    assert max(later - earlier for earlier, later in pairwise(met)) <= max_staleness


def test_a_save_by_hand_is_no_measure_and_starts_the_interval_anew() -> None:
    run = Run(auto=AutoSettings(gpu_hours_per_interruption=80, max_loss_minutes=600))
    run.go(8000)
    interval = run.interval
    run.pace.agreed(run.step, run.pace.choose())
    run.pace.timing.stalled(500.0, counts=False)
    run.pace.timing.waited(500.0)
    at = run.step
    run.go(interval)
    assert [step - at for step, _ in run.decisions if step > at] == [interval]
    assert run.interval == interval


def test_a_decision_that_could_not_be_made_for_other_reasons_comes_again_after_the_interval() -> None:
    run = Run()
    run.pace.agreed(100, 40)
    run.pace.put_off(140, busy=False)
    assert next(step for step in range(141, 200) if run.pace.due(step)) == 180
    run.pace.put_off(180, busy=True)
    run.pace.put_off(190, busy=True)
    assert next(step for step in range(191, 300) if run.pace.due(step)) == 210


def test_a_clock_that_goes_back_ends_no_training() -> None:
    run = Run()
    run.go(20)
    run.clock.now -= 1e9
    run.commits_at.append(-math.inf)
    run.go(200)
    assert len(run.decisions) > 3 and 1 <= run.interval <= 1800


def test_after_going_back_a_decision_comes_as_soon_as_at_the_start() -> None:
    """The framework may load an earlier step."""
    run = Run()
    run.go(400)
    run.step = 100
    decided = len(run.decisions)
    run.go(20)
    assert len(run.decisions) > decided
