"""The token bucket: what is spent in any stretch of time is bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.accounting import TokenBucket


class Clock:
    """Goes when it is told to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_it_starts_empty_and_fills_to_the_brim() -> None:
    clock = Clock()
    bucket = TokenBucket(10.0, 50.0, clock)
    assert bucket.available() == 0.0
    clock.now += 3
    assert bucket.available() == 30.0
    clock.now += 30
    assert bucket.available() == 50.0


def test_a_debt_is_paid_back_with_time() -> None:
    clock = Clock()
    bucket = TokenBucket(10.0, 50.0, clock)
    bucket.charge(25.0)
    clock.now += 2
    assert bucket.available() == -5.0


def test_what_is_given_back_does_not_overflow() -> None:
    bucket = TokenBucket(10.0, 50.0, Clock())
    bucket.charge(-80.0)
    assert bucket.available() == 50.0


def test_a_wider_bucket_keeps_what_it_had() -> None:
    clock = Clock()
    bucket = TokenBucket(10.0, 50.0, clock)
    clock.now += 9
    bucket.widen(70.0)
    assert (bucket.available(), bucket.capacity) == (50.0, 70.0)
    bucket.widen(10.0)
    assert bucket.capacity == 70.0


@given(
    rate=st.floats(0.1, 100),
    capacity=st.floats(1, 1000),
    moves=st.lists(st.tuples(st.floats(0, 20), st.floats(0, 1)), max_size=40),
)
def test_in_any_window_no_more_is_spent_than_flows_in_and_was_there(
    rate: float, capacity: float, moves: list[tuple[float, float]]
) -> None:
    clock = Clock()
    bucket = TokenBucket(rate, capacity, clock)
    spent: list[tuple[float, float]] = []
    for pause, share in moves:
        clock.now += pause
        amount = share * bucket.available()
        bucket.charge(amount)
        spent.append((clock.now, amount))
    for first, (begin, _) in enumerate(spent):
        for last in range(first, len(spent)):
            total = sum(amount for _, amount in spent[first : last + 1])
            assert total <= rate * (spent[last][0] - begin) + capacity + 1e-6
