"""Encodings with a shared exponent against their definition, in exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from store.encoding.shared_exponent import (
    Int8SharedExponent,
    Int8SharedExponent128,
    Int16SharedExponent,
    SharedExponent,
)
from store.errors import DamagedError
from tests.support.reference_encodings import ValuesError, encode_chunk

LARGEST = 1.5 * 2.0**127
Floats = NDArray[np.float32]


BYTES, WIDE, WORDS = Int8SharedExponent(), Int8SharedExponent128(), Int16SharedExponent()

each = pytest.mark.parametrize("form", [BYTES, WIDE, WORDS], ids=lambda form: form.name)


def lanes(values: Floats, form: SharedExponent = BYTES) -> tuple[list[int], list[int]]:
    data, end = encode_chunk(form, values), form.width * values.size
    if form is WORDS:
        return data[:end].view("<i2").tolist(), data[end:].tolist()
    zigzag = data[:end].astype(int)
    return np.where(zigzag & 1, -(zigzag // 2) - 1, zigzag // 2).tolist(), data[end:].tolist()


def decoded(values: Floats, form: SharedExponent = BYTES) -> Floats:
    return form.decode(encode_chunk(form, values), values.size, "F32")


def rounded_exponent(value: Fraction, bits: int) -> int:
    """e, where the value rounded to so many significant bits, ties to even, is in [2**e, 2**(e + 1))."""
    e = math.floor(math.log2(value))
    e += (value >= Fraction(2) ** (e + 1)) - (value < Fraction(2) ** e)
    return e + (round(value / Fraction(2) ** (e - bits + 1)) == 1 << bits)


def scale_of(block: list[Fraction], form: SharedExponent, numel: int) -> Fraction:
    size, groups, usually, mostly = (
        (4096, 64, 14 if numel < 16384 else 8, 14) if form is WORDS else (64 if form is BYTES else 128, 4, 1, 6)
    )
    magnitudes = [abs(value) for value in block] + [Fraction(0)] * (size - len(block))
    large, usual = max(magnitudes), min(max(magnitudes[j::groups]) for j in range(groups))
    least = Fraction(2) ** -124
    if large <= least / 2:
        return Fraction(0)
    exponents = [rounded_exponent(large, mostly + 1) - mostly]
    exponents += [rounded_exponent(usual, usually + 1) - usually] if usual else []
    return max(least, *(Fraction(2) ** e for e in exponents))


@each
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), tail=st.floats(0, 30), size=st.floats(-37, 36))
def test_scales_and_codes_are_those_of_the_definition(
    form: SharedExponent, seed: int, tail: float, size: float
) -> None:
    rng = np.random.default_rng(seed)
    numel = int(rng.integers(1, (2 if form.width == 1 or seed % 2 else 5) * form.block + 5))
    values = (rng.standard_normal(numel) * 10.0 ** (size - rng.uniform(0, tail, numel) / 4)).astype("<f4")
    codes, exponents = lanes(values, form)
    for start in range(0, numel, form.block):
        block = [Fraction(float(value)) for value in values[start : start + form.block]]
        scale = scale_of(block, form, numel)
        assert exponents[start // form.block] == (127 + math.log2(scale) if scale else 0)
        assert codes[start : start + form.block] == [round(value / scale) if scale else 0 for value in block]


def test_by_hand() -> None:
    values = np.zeros(70, "<f4")
    values[:8] = [2, -2, 3.49, 2.5, -0.5, 0.51, 1.5, 0.1]
    values[64:66] = [127, 1]
    codes, exponents = lanes(values)
    assert exponents == [127, 127]
    assert codes[:8] == [2, -2, 3, 2, 0, 1, 2, 0]
    assert codes[64:66] == [127, 1]


@each
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), tail=st.floats(0, 40))
def test_no_value_turns_around_or_more_than_doubles(form: SharedExponent, seed: int, tail: float) -> None:
    """So no update does: it grows in proportion to the first moment."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(300) * np.exp(-rng.uniform(0, tail, 300))).astype("<f4")
    ratios = decoded(values, form).astype(np.float64) / values
    assert 0 <= ratios.min() <= ratios.max() <= 2


@each
def test_an_outlier_leaves_the_others_of_its_block_alone(form: SharedExponent) -> None:
    values = np.random.default_rng(0).standard_normal(max(form.block, form.small)).astype("<f4")
    alone = decoded(values, form)
    values[5] = 40
    assert decoded(values, form)[6:].tolist() == alone[6:].tolist()


def test_small_tensors_have_the_finest_scales() -> None:
    for numel, finest in ((128, 2.0**-14), ((1 << 14) - 1, 2.0**-14), (1 << 14, 2.0**-8)):
        values = np.random.default_rng(0).uniform(1, 1.9, numel).astype("<f4")
        assert np.abs(decoded(values, WORDS) - values).max() == pytest.approx(finest / 2, rel=0.05)


@each
def test_blocks_too_small_for_a_scale_are_zero(form: SharedExponent) -> None:
    for largest, zero in ((0.0, True), (1e-45, True), (2.0**-125, True), (1.01 * 2.0**-125, False)):
        codes, exponents = lanes(np.full(form.block, largest, "<f4"), form)
        assert (exponents == [0], set(codes) == {0}) == (zero, zero)


@each
@pytest.mark.parametrize("bad", [np.nan, -np.inf, float(np.nextafter(np.float32(LARGEST), np.float32(np.inf)))])
def test_it_refuses_values_out_of_its_range(form: SharedExponent, bad: float) -> None:
    for at in (0, 70, 4999):
        values = np.ones(5000, "<f4")
        values[at] = bad
        with pytest.raises(ValuesError):
            encode_chunk(form, values)
    assert decoded(np.full(4100, -LARGEST, "<f4"), form).tolist() == [-LARGEST] * 4100


@pytest.mark.parametrize(("at", "value"), [(3, 0xFF), (-1, 1), (-1, 2), (-1, 254), (-1, 255)])
def test_codes_and_scales_that_were_never_written_are_damage(at: int, value: int) -> None:
    data = encode_chunk(BYTES, np.ones(65, "<f4"))
    data[at] = value
    with pytest.raises(DamagedError, match="never written"):
        BYTES.decode(data, 65, "F32")


@pytest.mark.parametrize(("at", "value"), [(7, 0x80), (-1, 1), (-1, 2), (-1, 254), (-1, 255)])
def test_words_and_their_scales_that_were_never_written_are_damage(at: int, value: int) -> None:
    data = encode_chunk(WORDS, np.zeros(65, "<f4"))
    data[at] = value
    with pytest.raises(DamagedError, match="never written"):
        WORDS.decode(data, 65, "F32")


@each
def test_products_that_are_not_finite_are_damage(form: SharedExponent) -> None:
    data = encode_chunk(form, np.ones(65, "<f4"))
    data[: 65 * form.width], data[65 * form.width :] = 0x7C, 250
    with pytest.raises(DamagedError, match="not finite"):
        form.decode(data, 65, "F32")
