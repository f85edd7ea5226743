"""The expected rate of interruptions: the prior, and what happened on top of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.interval import Prior

ORDINARY = Prior(50_000.0, 0.0, gpus=64)


def test_before_anything_happened_it_is_what_was_said() -> None:
    assert ORDINARY.expected_per_hour(0, 0.0) == pytest.approx(64 / 50_000)
    spot = Prior(50_000.0, 0.5, gpus=64)
    assert spot.expected_per_hour(0, 0.0) == pytest.approx(64 / 50_000 + 0.5)


@given(
    hours=st.floats(1e2, 1e6), preempted=st.floats(0, 10), gpus=st.integers(1, 20_000), seen=st.integers(0, 3),
    ran=st.floats(0, 1e7),
)  # fmt: skip
def test_the_mean_over_all_kinds_of_job_by_integration(
    hours: float, preempted: float, gpus: int, seen: int, ran: float
) -> None:
    """Against a sum over a fine grid of rates, of prior density x probability of what was seen."""
    prior = Prior(hours, preempted, gpus)
    kinds = 6
    weights = [0.01**kind for kind in range(kinds)]
    typical = sum(w * 10**k for k, w in enumerate(weights)) / sum(weights) / prior.per_gpu_hour
    top = bottom = 0.0
    for i in range(4000):
        log_rate = math.log(prior.per_gpu_hour) + (i - 2500) * 0.01
        rate = math.exp(log_rate)
        density = sum(w / sum(weights) * (b := typical / 10**k) * math.exp(-b * rate) for k, w in enumerate(weights))
        likelihood = math.exp(seen * (log_rate - math.log(prior.per_gpu_hour)) - rate * ran)
        mass = density * likelihood * rate
        bottom += mass
        top += mass * rate
    if bottom > 0.0 and prior.per_gpu_hour * ran < 1e6:
        assert prior.expected_per_hour(seen, ran) == pytest.approx(gpus * top / bottom, rel=0.02)


def test_hours_without_an_interruption_make_it_rarer_but_slowly() -> None:
    per_gpu_hour = [ORDINARY.expected_per_hour(0, hours) / 64 for hours in (0.0, 1e3, 5e4, 5e5)]
    assert per_gpu_hour == sorted(per_gpu_hour, reverse=True)
    assert per_gpu_hour[1] > 0.9 / 50_000
    assert 1 / 120_000 < per_gpu_hour[2] < 1 / 80_000
    assert per_gpu_hour[3] == pytest.approx(1 / 555_000, rel=0.01)


def test_a_few_in_a_row_are_believed() -> None:
    """8 GPUs interrupted every hour: a prior of 50 000 GPU-hours would otherwise be held on to for years."""
    small = Prior(50_000.0, 0.0, gpus=8)
    rates = [small.expected_per_hour(seen, 8.0 * seen) for seen in range(11)]
    assert rates == sorted(rates)
    assert rates[1] < 0.01
    assert rates[3] > 0.2
    assert rates[10] == pytest.approx(1.0, rel=0.4)


def test_in_the_end_what_happened_is_all_that_counts() -> None:
    for seen, hours in ((1000, 1e4), (1000, 1e8)):
        assert ORDINARY.expected_per_hour(seen, hours) == pytest.approx(64 * seen / hours, rel=0.01)


@given(seen=st.integers(0, 10_000), hours=st.floats(0, 1e9), more=st.floats(0, 1e9), gpus=st.integers(1, 100_000))
def test_it_rises_with_interruptions_and_falls_with_hours(seen: int, hours: float, more: float, gpus: int) -> None:
    prior = Prior(50_000.0, 0.1, gpus)
    rate = prior.expected_per_hour(seen, hours)
    assert 0.0 < rate < math.inf
    assert prior.expected_per_hour(seen + 1, hours) >= rate * (1 - 1e-9)
    assert prior.expected_per_hour(seen, hours + more) <= rate * (1 + 1e-9)
