"""The account: shares of time hold over every window, prices are learned, and the first save is free."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from policies.accounting import BYTES, STALL, STORAGE, Account, Excess, Fitted, TokenBucket


class Clock:
    """Goes when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def account(clock: Clock, **rates: float) -> Account:
    return Account({name: TokenBucket(rate, rate * 100.0, clock) for name, rate in rates.items()})


def test_a_line_is_learned_to_the_last_digit() -> None:
    line = Fitted()
    for nbytes in (100.0, 300.0, 700.0):
        line.learn(nbytes, 2.0 + 0.5 * nbytes)
    assert line.cost(1000.0) == pytest.approx(502.0)
    assert line.affordable(52.0) == pytest.approx(100.0)
    assert line.affordable(1.0) == pytest.approx(-1.0)


def test_what_was_seen_for_one_size_only_is_put_down_to_the_bytes() -> None:
    line = Fitted()
    line.learn(100.0, 2.0)
    line.learn(100.0, 2.0)
    assert line.cost(50.0) == pytest.approx(1.0)


@example([(5e-324, 1.0)], 0.0)
@given(st.lists(st.tuples(st.floats(0, 1e12), st.floats(0, 1e4)), min_size=1, max_size=30), st.floats(0, 1e6))
def test_a_price_is_never_negative_and_what_is_affordable_costs_no_more(
    seen: list[tuple[float, float]], purse: float
) -> None:
    for line in (Fitted(), Excess()):
        for nbytes, cost in seen:
            line.learn(nbytes, cost)
        assert 0.0 <= line.cost(0.0) <= line.cost(1e9)
        bytes_ = line.affordable(purse)
        if 0.0 <= bytes_ < math.inf:
            assert line.cost(bytes_) <= purse * (1 + 1e-6) + 1e-6


def test_the_tightest_limit_decides() -> None:
    clock = Clock()
    one = account(clock, **{BYTES: 10.0, STORAGE: 0.1})
    one.begin(1000.0, free=True)
    one.committed(1000.0, 50.0)  # 0.05 seconds a byte
    clock.now = 10.0  # 100 bytes, and 1 second for 20
    assert one.offer() == pytest.approx(20.0)


def test_the_first_save_costs_neither_stall_nor_bytes_but_is_learned_from() -> None:
    clock = Clock()
    one = account(clock, **{BYTES: 10.0, STALL: 0.01})
    one.begin(1000.0, free=True)
    one.stalled(4.0)
    one.committed(1000.0, 9.0)
    clock.now = 100.0  # 1000 bytes, and 1 second of stall for 250
    assert one.at_hand(STALL) == pytest.approx(1.0)
    assert one.offer() == pytest.approx(250.0)


def test_before_any_price_is_known_a_full_save_is_taken_to_cost_what_the_bucket_holds() -> None:
    """After a restart there is no free first save to learn from, and nothing is unlimited."""
    clock = Clock()
    one = account(clock, **{STORAGE: 0.01})
    one.make_room(400.0, 1000.0)
    assert one.offer() == 0.0
    clock.now = 30.0
    assert one.offer() == pytest.approx(300.0)
    one.begin(300.0, free=False)
    one.committed(300.0, 3.0)
    assert one.at_hand(STORAGE) == pytest.approx(-2.7)
    assert one.offer() == pytest.approx(-2.7)


def test_a_decision_that_saves_nothing_is_paid_for_too() -> None:
    clock = Clock()
    one = account(clock, **{STALL: 0.01})
    one.begin(1000.0, free=True)
    one.stalled(4.0)
    one.offer()
    clock.now = 100.0
    one.stalled(0.25)
    assert one.at_hand(STALL) == pytest.approx(0.75)
    assert one.offer() == pytest.approx(125.0)  # learned: 0.25 s a decision, and 4 s for 1000 bytes


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), share=st.floats(0.001, 0.3))
def test_over_every_window_the_share_of_stall_holds(seed: int, share: float) -> None:
    """But for what one save stalled longer than was expected of it."""
    chance, clock = random.Random(seed), Clock()
    one = account(clock, **{STALL: share})
    one.begin(1e6, free=True)
    one.stalled(10.0)
    spent: list[tuple[float, float]] = []
    for _ in range(300):
        clock.now += chance.choice([1.0, 10.0, 60.0])
        offered = one.offer()
        assert offered is not None
        if offered <= 0:
            continue
        expected = chance.uniform(0, min(offered, 1e6))
        one.begin(expected, free=False)
        took = 1e-5 * expected * chance.uniform(0.5, 1.5)
        one.stalled(took)
        spent.append((clock.now, took))
    for first, (begin, _) in enumerate(spent):
        total = 0.0
        for now, took in spent[first:]:
            total += took
            assert total <= share * (now - begin) + share * 100.0 + 15.0 + 1e-6
