"""int8-shared-exponent against its definition, in exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from store.encoding import BLOCK
from store.encoding.shared_exponent import Int8SharedExponent
from store.errors import DamagedError
from tests.support.reference_encodings import ValuesError, encode_chunk

LARGEST = 1.5 * 2.0**127
Floats = NDArray[np.float32]


def lanes(values: Floats) -> tuple[list[int], list[int]]:
    data = encode_chunk(Int8SharedExponent(), values).astype(int)
    zigzag = data[: values.size]
    return np.where(zigzag & 1, -(zigzag // 2) - 1, zigzag // 2).tolist(), data[values.size :].tolist()


def decoded(values: Floats) -> Floats:
    encoding = Int8SharedExponent()
    return encoding.decode(encode_chunk(encoding, values), values.size, "F32")


def rounded_exponent(value: Fraction, bits: int) -> int:
    """e, where the value rounded to so many significant bits, ties to even, is in [2**e, 2**(e + 1))."""
    e = math.floor(math.log2(value))
    e += (value >= Fraction(2) ** (e + 1)) - (value < Fraction(2) ** e)
    return e + (round(value / Fraction(2) ** (e - bits + 1)) == 1 << bits)


def scale_of(block: list[Fraction]) -> Fraction:
    magnitudes = [abs(value) for value in block] + [Fraction(0)] * (BLOCK - len(block))
    large, usual = max(magnitudes), min(max(magnitudes[j::4]) for j in range(4))
    least = Fraction(2) ** -124
    if large <= least / 2:
        return Fraction(0)
    exponents = [rounded_exponent(large, 7) - 6] + ([rounded_exponent(usual, 2) - 1] if usual else [])
    return max(least, *(Fraction(2) ** e for e in exponents))


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), numel=st.integers(1, 2 * BLOCK + 5), tail=st.floats(0, 30), size=st.floats(-37, 36))
def test_scales_and_codes_are_those_of_the_definition(seed: int, numel: int, tail: float, size: float) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(numel) * 10.0 ** (size - rng.uniform(0, tail, numel) / 4)).astype("<f4")
    codes, exponents = lanes(values)
    for start in range(0, numel, BLOCK):
        block = [Fraction(float(value)) for value in values[start : start + BLOCK]]
        scale = scale_of(block)
        assert exponents[start // BLOCK] == (127 + math.log2(scale) if scale else 0)
        assert codes[start : start + BLOCK] == [round(value / scale) if scale else 0 for value in block]


def test_by_hand() -> None:
    values = np.zeros(70, "<f4")
    values[:8] = [2, -2, 3.49, 2.5, -0.5, 0.51, 1.5, 0.1]
    values[64:66] = [127, 1]
    codes, exponents = lanes(values)
    assert exponents == [127, 127]
    assert codes[:8] == [2, -2, 3, 2, 0, 1, 2, 0]
    assert codes[64:66] == [127, 1]


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), tail=st.floats(0, 40))
def test_no_value_turns_around_or_more_than_doubles(seed: int, tail: float) -> None:
    """So no update does: it grows in proportion to the first moment."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(300) * np.exp(-rng.uniform(0, tail, 300))).astype("<f4")
    ratios = decoded(values).astype(np.float64) / values
    assert 0 <= ratios.min() <= ratios.max() <= 2


def test_an_outlier_leaves_the_others_of_its_block_alone() -> None:
    values = np.random.default_rng(0).standard_normal(64).astype("<f4")
    alone = decoded(values)
    values[5] = 40
    assert decoded(values)[6:].tolist() == alone[6:].tolist()


def test_blocks_too_small_for_a_scale_are_zero() -> None:
    for largest, zero in ((0.0, True), (1e-45, True), (2.0**-125, True), (1.01 * 2.0**-125, False)):
        codes, exponents = lanes(np.full(64, largest, "<f4"))
        assert (exponents == [0], set(codes) == {0}) == (zero, zero)


@pytest.mark.parametrize("bad", [np.nan, -np.inf, float(np.nextafter(np.float32(LARGEST), np.float32(np.inf)))])
def test_it_refuses_values_out_of_its_range(bad: float) -> None:
    for at in (0, 70, 199):
        values = np.ones(200, "<f4")
        values[at] = bad
        with pytest.raises(ValuesError):
            encode_chunk(Int8SharedExponent(), values)
    assert decoded(np.full(70, -LARGEST, "<f4")).tolist() == [-LARGEST] * 70


@pytest.mark.parametrize(("at", "value"), [(3, 0xFF), (-1, 1), (-1, 2), (-1, 254), (-1, 255)])
def test_codes_and_scales_that_were_never_written_are_damage(at: int, value: int) -> None:
    data = encode_chunk(Int8SharedExponent(), np.ones(65, "<f4"))
    data[at] = value
    with pytest.raises(DamagedError, match="never written"):
        Int8SharedExponent().decode(data, 65, "F32")


def test_products_that_are_not_finite_are_damage() -> None:
    data = encode_chunk(Int8SharedExponent(), np.ones(65, "<f4"))
    data[:65], data[65:] = 0xFC, 250
    with pytest.raises(DamagedError, match="not finite"):
        Int8SharedExponent().decode(data, 65, "F32")
