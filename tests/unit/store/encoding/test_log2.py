"""int8-log2 against its definition, in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from store.encoding.log2 import Int8Log2
from tests.support.reference_encodings import ValuesError, encode_chunk

LEAST, LARGEST = 2.0**-95, float(np.nextafter(np.float32(1.1875 * 2.0**32), np.float32(0)))
ALL = np.arange(256, dtype=np.uint8)


def codes(*values: float) -> list[int]:
    return encode_chunk(Int8Log2(), np.array(values, "<f4")).tolist()


def decoded(values: NDArray[np.float32]) -> NDArray[np.float64]:
    return Int8Log2().decode(encode_chunk(Int8Log2(), values), values.size, "F32").astype(np.float64)


def test_levels_are_half_octaves_and_rounded_as_float32() -> None:
    levels = Int8Log2().decode(ALL, 256, "F32")
    assert levels.tolist() == [0, *np.exp2((np.arange(1, 256) - 191) / 2).astype("<f4").tolist()]
    assert (levels[191], levels[1], levels[255]) == (1, LEAST, 2.0**32)
    assert encode_chunk(Int8Log2(), levels).tolist() == ALL.tolist()


def test_borders_are_exact_and_to_the_nearest_by_ratio() -> None:
    for octave in (-94, -1, 0, 31):
        for border in (1.1875, 1.6875):
            at = np.float32(border * 2.0**octave)
            below = np.nextafter(at, np.float32(0))
            assert codes(at) == [codes(below)[0] + 1] == [191 + 2 * octave + 1 + (border > 1.5)]
    levels = [Fraction(float(level)) for level in Int8Log2().decode(ALL, 256, "F32")[1:]]
    values = [Fraction(float(np.float32(a) * np.float32(b))) for a, b in pairwise([1.0, 1.1, 1.2, 1.3, 1.5, 1.8, 1.95])]
    for value in values:
        nearest = min(levels, key=lambda level: max(level / value, value / level))
        assert decoded(np.array([float(value)], "<f4"))[0] == nearest


@given(bits=st.lists(st.integers(1, int(np.float32(LARGEST).view("<u4"))), min_size=1))
def test_no_update_changes_by_more_than_a_tenth(bits: list[int]) -> None:
    """An update is divided by the root, which is between 0.9163 and 1.0924 times as large."""
    values = np.array(bits, "<u4").view("<f4")
    ratios = np.sqrt(np.maximum(values.astype(np.float64), LEAST) / decoded(values))
    assert 0.9163 <= ratios.min() <= ratios.max() <= 1.0925


def test_updates_are_unbiased() -> None:
    values = np.exp2(np.random.default_rng(0).uniform(-20, 0, 1 << 18)).astype("<f4")
    assert abs(np.mean(np.sqrt(values / decoded(values))) - 1) < 0.002


def test_values_below_the_least_level_are_rounded_up_and_only_zero_is_zero() -> None:
    assert codes(0.0, -0.0, 1e-45, 2.0**-126, 2.0**-96, LEAST) == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("bad", [-1.0, -1e-45, np.nan, -np.nan, np.inf, 1.1875 * 2.0**32, 3e38])
def test_it_refuses_values_out_of_its_range(bad: float) -> None:
    values = np.ones(200, "<f4")
    for at in (0, 70, 199):
        broken = values.copy()
        broken[at] = bad
        with pytest.raises(ValuesError):
            encode_chunk(Int8Log2(), broken)
    assert codes(LARGEST) == [255]
