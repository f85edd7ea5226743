"""Distances between any two steps, against movement that is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from policies.replay.movement import EXPONENT, Movement, movement_of
from policies.replay.recorded_run import run_of
from store.names import BUFFER, WEIGHTS, Unit
from store.trace import DecisionLine, Trace
from tests.support.traces import Mover, decisions, job_line, moved_line, power, trace_of

WEIGHT = Unit("layers.0", WEIGHTS)
MOMENT = Unit("layers.0", "exp_avg")


def movement(*movers: Mover, steps: tuple[int, ...] = (100, 200, 300), ages: tuple[int, ...] = (1, 4, 16)) -> Movement:
    return movement_of(run_of(trace_of(movers, steps, ages)).segments[0])


@pytest.mark.parametrize("exponent", [0.5, 0.75, 1.0])
@pytest.mark.parametrize("age", [0.25, 1.0, 3.0, 4.0, 11.5, 16.0, 250.0])
def test_a_power_law_is_found_at_every_age(exponent: float, age: float) -> None:
    law = power(1e-3, exponent)
    found = movement(Mover(WEIGHT, 400, law)).distance(300, np.array([300 - age]))
    assert found == pytest.approx([law(age)], rel=1e-9)


def test_what_saturates_stays_saturated() -> None:
    def law(age: float) -> float:
        return math.sqrt(2 * (1 - 0.9**age))

    moved = movement(Mover(MOMENT, 400, law), ages=(1, 2, 4, 8, 16, 32, 64, 128))
    for age in (1, 3, 6, 12, 24, 48, 100, 290):
        assert moved.distance(300, np.array([300.0 - age])) == pytest.approx([law(age)], rel=0.03)


def test_units_are_read_apart() -> None:
    fast, slow = power(1e-2, 1.0), power(1e-5, 0.5)
    moved = movement(Mover(WEIGHT, 400, fast), Mover(MOMENT, 400, slow))
    found = moved.distance(300, np.array([290.0, 200.0]))
    assert found == pytest.approx([fast(10), slow(100)], rel=1e-9)


def test_the_line_of_the_nearest_later_step_counts() -> None:
    early, late = Mover(WEIGHT, 400, power(1e-2, 1.0)), Mover(WEIGHT, 400, power(1e-3, 1.0))
    lines = (job_line([early], {}), *decisions([100, 200, 300]), moved_line([early], 200, (10, 20)))
    moved = movement_of(run_of(Trace((*lines, moved_line([late], 300, (10, 20))), 0)).segments[0])
    assert moved.distance(199, np.array([189.0])) == pytest.approx([0.1])
    assert moved.distance(201, np.array([191.0])) == pytest.approx([0.01])
    assert moved.distance(310, np.array([300.0])) == pytest.approx([0.01])


def test_without_lines_of_movement_drift_tells_it_less_what_was_rounded() -> None:
    mover = Mover(WEIGHT, 400, power(1e-3, 1.0))
    line = DecisionLine(
        step=40, seconds=40, commits=1, drift=(0.05,), staleness=(10,), error=(0.03,), encoding=("bf16",),
        stored_bytes=(200,), skipped="nothing",
    )  # fmt: skip
    moved = movement_of(run_of(Trace((job_line([mover], {}), line), 0)).segments[0])
    assert moved.distance(40, np.array([30.0])) == pytest.approx([0.04])
    assert moved.distance(40, np.array([20.0])) == pytest.approx([0.04 * 2**EXPONENT])


def test_no_movement_and_what_is_not_known() -> None:
    moved = movement(Mover(Unit("layers.0", BUFFER), 400, power(1.0, 1.0), moving=False), Mover(WEIGHT, 4, power(0, 1)))
    assert moved.distance(300, np.array([100.0, 100.0])).tolist() == [0.0, 0.0]
    nothing = movement_of(run_of(trace_of([Mover(WEIGHT, 4, power(1, 1))], (10, 20), ())).segments[0])
    assert math.isnan(nothing.distance(20, np.array([10.0]))[0])


def test_a_version_of_now_or_later_is_no_distance_away() -> None:
    moved = movement(Mover(WEIGHT, 400, power(1e-3, 1.0)))
    assert moved.distance(300, np.array([300.0])).tolist() == [0.0]
    assert moved.distance(300, np.array([310.0])).tolist() == [0.0]
