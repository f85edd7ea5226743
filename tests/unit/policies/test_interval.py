"""The interval between decisions: Daly's formula against brute force and against a simulated job, and its limits."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.interval import Limits, Measured, daly, next_interval


def lost(interval: float, cost: float, between: float, durable: float = 0.0, restart: float = 0.0) -> float:
    """Time lost a second of training that counts, as docs/interval.md derives it; both in the same unit."""
    growth = math.expm1((interval + cost) / between) * math.exp(durable / between)
    return (between + restart) * growth / interval - 1.0


@pytest.mark.parametrize("between", [60.0, 3600.0, 1e7])
@pytest.mark.parametrize("share", [1e-8, 1e-6, 1e-4, 1e-2, 0.1, 0.5, 1.0, 1.5, 1.99, 2.0, 3.0, 30.0])
@pytest.mark.parametrize(("durable", "restart"), [(0.0, 0.0), (0.05, 0.2)])
def test_no_interval_loses_less_by_brute_force(between: float, share: float, durable: float, restart: float) -> None:
    """``durable`` and ``restart``, shares of the time between interruptions, cost time but move the optimum nowhere."""
    cost = share * between

    def at(interval: float) -> float:
        return lost(interval, cost, between, durable * between, restart * between)

    least = min(at(interval) for interval in np.geomspace(1e-6, 10.0, 20_001) * between)
    assert at(daly(cost, between)) <= least * 1.02


def test_young_is_its_limit_where_saves_are_cheap() -> None:
    assert daly(1.0, 1e9) == pytest.approx(math.sqrt(2e9), rel=1e-4)


def test_daly_by_hand() -> None:
    """cost 2, between 100: sqrt(400) * (1 + 0.1/3 + 0.01/9) - 2."""
    assert daly(2.0, 100.0) == pytest.approx(20.0 * (1 + 0.1 / 3 + 0.01 / 9) - 2.0)
    assert daly(0.0, 100.0) == 0.0


@pytest.mark.parametrize(("between", "minutes"), [(24 * 60.0, 117.0), (6 * 60.0, 57.0), (15.0, 9.1)])
def test_the_figures_of_the_paper(between: float, minutes: float) -> None:
    """Its figures 3 to 5: dumps of 5 minutes."""
    assert daly(5.0, between) == pytest.approx(minutes, rel=0.01)


def simulated(interval: float, cost: float, between: float, durable: float, restart: float, saves: int) -> float:
    """Seconds that a job takes for each second of training that counts. Nothing of the formula is in here."""
    chance = random.Random(3)
    now, fails_at = 0.0, chance.expovariate(1 / between)
    next_save, kept, under_way = interval + cost, 0, None  # the end of the stall; saves durable; when one will be
    while kept < saves:
        event = min(next_save, math.inf if under_way is None else under_way, fails_at)
        now = event
        if event == fails_at:
            now += restart
            fails_at, next_save, under_way = now + chance.expovariate(1 / between), now + interval + cost, None
        elif event == under_way:
            kept, under_way = kept + 1, None
        else:
            under_way, next_save = now + durable, now + interval + cost
    return now / (kept * interval)


@pytest.mark.parametrize(("durable", "restart"), [(0.0, 0.0), (12.0, 0.0), (12.0, 30.0)])
def test_what_is_minimised_is_what_a_job_loses_that_saves_beside_training(durable: float, restart: float) -> None:
    found = simulated(20.0, 3.0, 100.0, durable, restart, saves=100_000)
    assert found == pytest.approx(1.0 + lost(20.0, 3.0, 100.0, durable, restart), rel=0.01)


HOUR = 3600.0


def test_the_optimum_in_steps() -> None:
    measured = Measured(step=2.0, cost=1.0, durable=10.0)
    found = next_interval(100, measured, 0.1, Limits())
    assert found.steps == math.floor(daly(1.0, 10 * HOUR) / 2.0) == 133
    assert (found.because, found.too_slow) == ("the least time lost", False)


def test_what_is_near_the_optimum_stays_where_it_is() -> None:
    measured = Measured(step=2.0, cost=1.0, durable=10.0)
    assert [next_interval(now, measured, 0.1, Limits()).steps for now in (106, 107, 133, 166, 167)] == [
        133,
        107,
        133,
        166,
        133,
    ]


def test_it_grows_fourfold_at_most_and_falls_at_once() -> None:
    measured = Measured(step=2.0, cost=1.0, durable=0.1)
    assert next_interval(3, measured, 0.1, Limits()).steps == 12
    assert next_interval(9000, measured, 0.1, Limits()).steps == 133


def test_before_anything_is_measured_it_stays_within_what_is_known() -> None:
    assert next_interval(3, Measured(), 0.1, Limits(max_loss=1800.0)).steps == 3
    assert next_interval(3, Measured(step=900.0), 0.1, Limits(max_loss=1800.0)).steps == 2
    assert next_interval(3, Measured(), 0.1, Limits(max_staleness=2)).steps == 2


def test_the_limits_in_their_order() -> None:
    slow = Measured(step=1.0, cost=100.0, durable=60.0)
    assert daly(100.0, 100 * HOUR) > 8000
    free = next_interval(5000, slow, 0.01, Limits(max_loss=1800.0))
    assert (free.steps, free.because, free.too_slow) == (1800 - 60 - 100, "max_loss_minutes", False)
    tight = next_interval(5000, slow, 0.01, Limits(max_loss=200.0))
    assert (tight.steps, tight.because, tight.too_slow) == (61, "the time that a save takes", True)
    bounded = next_interval(5000, slow, 0.01, Limits(max_loss=200.0, max_staleness=20))
    assert (bounded.steps, bounded.because) == (20, "max_staleness")


seconds = st.floats(0, 1e7)


@given(
    now=st.integers(1, 10**9),
    step=st.none() | seconds,
    cost=st.none() | seconds,
    durable=st.none() | seconds,
    per_hour=st.floats(1e-9, 1e9),
    max_loss=st.floats(1e-3, 1e9) | st.just(math.inf),
    max_staleness=st.none() | st.integers(1, 10**6),
)
@settings(max_examples=500)
def test_limits_hold_whatever_is_measured(
    now: int,
    step: float | None,
    cost: float | None,
    durable: float | None,
    per_hour: float,
    max_loss: float,
    max_staleness: int | None,
) -> None:
    found = next_interval(now, Measured(step, cost, durable), per_hour, Limits(max_loss, max_staleness))
    assert found.steps >= 1
    if max_staleness is not None:
        assert found.steps <= max_staleness
    if step is not None and step > 1e-6:
        at_most = found.steps == max_staleness
        assert found.steps * step >= (durable or 0.0) * (1 - 1e-9) or at_most
        loss = found.steps * step + (durable or 0.0) + (cost or 0.0)
        assert loss <= max_loss * (1 + 1e-9) or found.too_slow


@given(
    step=st.floats(1e-3, 1e3),
    cost=st.floats(1e-6, 1e3),
    durable=st.floats(0, 1e3),
    per_hour=st.floats(1e-5, 1e2),
    start=st.integers(1, 10**6),
    noise=st.lists(st.floats(0.95, 1.05), min_size=20, max_size=20),
)
def test_measurements_that_waver_do_not_move_it_once_it_is_there(
    step: float, cost: float, durable: float, per_hour: float, start: int, noise: list[float]
) -> None:
    """A twentieth either way; it settles within the fourfold steps that it takes to get there."""
    now = start
    for _ in range(20):
        now = next_interval(now, Measured(step, cost, durable), per_hour, Limits()).steps
    seen = {now}
    for factor in noise:
        now = next_interval(now, Measured(step, cost * factor, durable), per_hour, Limits()).steps
        seen.add(now)
    assert len(seen) <= 2
