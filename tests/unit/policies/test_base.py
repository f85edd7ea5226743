from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.base import compared, digits, version

numbers = st.floats(0, 1e9)


@given(value=numbers, limit=numbers)
def test_a_printed_value_stands_on_the_same_side_of_its_limit(value: float, limit: float) -> None:
    printed = float(digits(value, limit))
    assert (printed < limit, printed > limit) == (value < limit, value > limit)


def test_three_digits_where_they_are_enough() -> None:
    assert compared("drift", 0.0123456, ">=", "threshold", 0.01) == "drift 0.0123 >= threshold 0.01"
    assert compared("drift", 0.0100049, ">", "max_drift", 0.01) == "drift 0.010005 > max_drift 0.01"


def test_the_step_of_a_version() -> None:
    assert version(120, 10) == "the version of step 110"
    assert version(120, None) == "there is no version yet"
