"""Spikes: what is one, what is none, whatever schedule, policy and staleness the readings come from."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.anomaly import FACTOR, LEAST, DriftAnomaly, DriftAnomalyDetector, DriftReading
from store.names import WEIGHTS, Unit

UNITS = [Unit(f"blocks.{i}", WEIGHTS) for i in range(12)]


def moment(drift: float, staleness: int, noise: random.Random) -> dict[Unit, DriftReading]:
    return {
        unit: DriftReading(drift * noise.uniform(0.7, 1.4) * (1 + 0.1 * i), staleness) for i, unit in enumerate(UNITS)
    }


def fed(spikes: DriftAnomalyDetector, moments: list[dict[Unit, DriftReading]]) -> list[DriftAnomaly]:
    return [one for readings in moments for one in spikes.read(readings)]


def settled(seed: int = 0, moments: int = 20) -> tuple[DriftAnomalyDetector, random.Random]:
    noise, spikes = random.Random(seed), DriftAnomalyDetector()
    assert not fed(spikes, [moment(0.01, 10, noise) for _ in range(moments)])
    return spikes, noise


def test_one_layer_that_jumps_is_a_spike_and_no_other() -> None:
    spikes, noise = settled()
    readings = moment(0.01, 10, noise)
    readings[UNITS[5]] = DriftReading(2.0, 10)
    (found,) = spikes.read(readings)
    assert found.unit == UNITS[5] and found.drift == 2.0 and found.jump > 50
    assert max(jump for unit, jump in spikes.jumps.items() if unit != UNITS[5]) < FACTOR


def test_a_stretch_is_told_once_and_the_next_one_again() -> None:
    spikes, noise = settled()

    def jumped(times: int) -> list[DriftAnomaly]:
        return fed(spikes, [{**moment(0.01, 10, noise), UNITS[2]: DriftReading(2.0, 10)} for _ in range(times)])

    assert len(jumped(3)) == 1
    assert not fed(spikes, [moment(0.01, 10, noise) for _ in range(10)])
    assert len(jumped(1)) == 1


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_a_learning_rate_that_warms_up_is_none(power: float) -> None:
    noise, spikes = random.Random(1), DriftAnomalyDetector()
    assert not fed(spikes, [moment(1e-5 * (i + 1) ** power, 10, noise) for i in range(200)])


def test_one_that_starts_again_moves_all_layers_and_is_none() -> None:
    spikes, noise = settled()
    assert not fed(spikes, [moment(0.01 * 0.8**i, 10, noise) for i in range(30)])
    assert not fed(spikes, [moment(0.01, 10, noise) for _ in range(5)])


def test_a_layer_that_slowed_down_can_still_jump() -> None:
    """That drift went down with a learning rate must not count as scatter, or nothing would ever stand out."""
    spikes, noise = settled()
    assert not fed(spikes, [moment(0.01 * 0.9**i, 10, noise) for i in range(40)])
    readings = moment(0.01 * 0.9**40, 10, noise)
    readings[UNITS[5]] = DriftReading(0.2, 10)
    assert [one.unit for one in spikes.read(readings)] == [UNITS[5]]


@pytest.mark.parametrize("growth", [0.0, 0.5, 1.0])
def test_layers_saved_in_turn_are_read_at_any_staleness(growth: float) -> None:
    """Each unit is saved every fourth decision, so that its drift goes up and down with its staleness."""
    noise, spikes = random.Random(2), DriftAnomalyDetector()
    for i in range(120):
        readings = {}
        for k, unit in enumerate(UNITS):
            staleness = 10 * ((i + k) % 4 + 1)
            readings[unit] = DriftReading(0.01 * (staleness / 10) ** growth * noise.uniform(0.8, 1.2), staleness)
        assert not spikes.read(readings)
    readings[UNITS[0]] = DriftReading(2.0, readings[UNITS[0]].staleness)
    assert [one.unit for one in spikes.read(readings)] == [UNITS[0]]


def test_a_job_of_one_layer_has_only_its_own_past() -> None:
    noise, spikes, unit = random.Random(3), DriftAnomalyDetector(), UNITS[0]
    assert not fed(spikes, [{unit: DriftReading(0.01 * noise.uniform(0.7, 1.4), 10)} for _ in range(30)])
    assert [one.unit for one in spikes.read({unit: DriftReading(0.2, 10)})] == [unit]


def test_nothing_is_said_before_there_is_a_past() -> None:
    noise, spikes = random.Random(4), DriftAnomalyDetector()
    assert not fed(spikes, [moment(0.01, 10, noise) for _ in range(LEAST - 1)])
    assert not spikes.read({UNITS[0]: DriftReading(1e6, 10)})


def test_what_is_restless_by_nature_needs_to_jump_further() -> None:
    noise, spikes, unit = random.Random(5), DriftAnomalyDetector(), UNITS[0]
    readings = [{unit: DriftReading(0.01 * math.exp(noise.gauss(0, 0.8)), 10)} for _ in range(60)]
    assert len(fed(spikes, readings)) <= 1, "of values that lie within a factor of ten of each other"


def test_weights_that_never_moved_and_do() -> None:
    spikes, unit = DriftAnomalyDetector(), UNITS[0]
    assert not fed(spikes, [{unit: DriftReading(0.0, 10)} for _ in range(20)])
    assert [one.jump for one in spikes.read({unit: DriftReading(0.5, 10)})] == [math.inf]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(UNITS),
            st.builds(
                DriftReading,
                st.floats(min_value=0.0) | st.sampled_from([math.nan, math.inf]),
                st.integers(min_value=0, max_value=1 << 40),
            ),
            max_size=6,
        ),
        max_size=60,
    )
)
def test_no_readings_can_break_it(moments: list[dict[Unit, DriftReading]]) -> None:
    spikes = DriftAnomalyDetector()
    for readings in moments:
        for one in spikes.read(readings):
            assert one.unit in readings and one.jump >= FACTOR


def test_an_explosion_is_a_spike_before_there_is_a_past() -> None:
    noise, spikes = random.Random(3), DriftAnomalyDetector()
    assert not fed(spikes, [moment(0.01, 10, noise) for _ in range(2)])
    readings = moment(0.01, 10, noise)
    readings[UNITS[5]] = DriftReading(1e6, 10)
    (found,) = spikes.read(readings)
    assert found.unit == UNITS[5] and found.jump > 1e6
    assert not fed(spikes, [readings] * 4), "only the first of consecutive ones"


def test_a_layer_that_begins_at_zero_moves_far_and_is_no_spike() -> None:
    noise, spikes = random.Random(3), DriftAnomalyDetector()
    readings = [moment(0.01, 100, noise) | {UNITS[5]: DriftReading(drift, 100)} for drift in (2.8e5, 900.0, 99.0, 2.0)]
    assert not fed(spikes, readings)


def test_where_the_other_layers_stand_still_a_jump_is_a_number() -> None:
    spikes = DriftAnomalyDetector()
    moments = [{unit: DriftReading(0.0, 10) for unit in UNITS} for _ in range(3)]
    moments[2][UNITS[5]] = DriftReading(1e4, 10)
    (found,) = fed(spikes, moments)
    assert found.jump == 1e4
