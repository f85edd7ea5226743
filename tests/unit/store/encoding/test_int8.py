"""int8-block, and what is read of int8-sqrt-block, against their definitions, worked out slowly in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from monitor.save.torch_codecs import encoder_named
from store.encoding import BLOCK, INT8_SQRT_BLOCK, WRITABLE
from store.encoding.int8 import GRID, LEAST_SCALE, Int8Block, Int8SqrtBlock, split_lanes
from store.errors import DamagedError
from tests.support.reference_encodings import SQRT_LEAST_SCALE, encode_chunk

Floats = NDArray[np.float32]


def lanes(encoding: Int8Block | Int8SqrtBlock, values: Floats) -> tuple[list[int], Floats]:
    codes, scales = split_lanes(encode_chunk(encoding, values), values.size)
    return (codes.view(np.int8) if isinstance(encoding, Int8Block) else codes).tolist(), scales


def block_with(largest: float, seed: int = 0) -> Floats:
    values = (np.random.default_rng(seed).uniform(-1, 1, BLOCK) * largest).astype("<f4")
    values[seed % BLOCK] = largest
    return values


def step_down(value: np.float32) -> np.float32:
    """The scale next below, on the grid."""
    return np.float32((np.array([value]).view("<u4") - np.uint32(GRID + 1)).view("<f4")[0])


def holds(code: int, scale: np.float32, value: np.float32) -> bool:
    """Whether a code is enough: its square, rounded once after the exact product, reaches the value."""
    root = Fraction(float(scale)) * code
    return np.float32(float(root)) ** 2 >= value


@pytest.mark.parametrize("seed", range(20))
def test_int8_codes_are_the_nearest(seed: int) -> None:
    values = block_with(10.0 ** (3 * seed - 33), seed)
    codes, scales = lanes(Int8Block(), values)
    scale = Fraction(float(scales[0]))
    assert int(scales.view("<u4")[0]) & GRID == 0
    largest = Fraction(float(np.abs(values).max()))
    assert 0 <= largest / 127 - scale <= largest / 127 / (1 << 14)
    for value, code in zip(values, codes, strict=True):
        assert abs(Fraction(float(value)) - code * scale) <= scale * (Fraction(1, 2) + Fraction(1, 1 << 14))


def test_int8_by_hand() -> None:
    values = np.zeros(70, "<f4")
    values[:5] = [127, -127, 0.5, 1.5, -2.5]
    values[64:67] = [-254, 1, 3]
    codes, scales = lanes(Int8Block(), values)
    assert scales.tolist() == [1, 2]
    assert codes[:5] == [127, -127, 0, 2, -2]
    assert codes[64:67] == [-127, 0, 2]  # 0.5 and 1.5, ties to even


def test_blocks_too_small_for_a_scale_are_zero() -> None:
    for largest, zero in ((0.0, True), (1e-45, True), (126 * LEAST_SCALE, True), (127 * LEAST_SCALE, False)):
        values = np.full(64, largest, "<f4")
        codes, scales = lanes(Int8Block(), values)
        assert bool(scales[0] == 0) is zero
        assert (set(codes) == {0}) is zero


def test_the_largest_float_is_held() -> None:
    values = np.full(64, np.finfo(np.float32).max, "<f4")
    decoded = Int8Block().decode(encode_chunk(Int8Block(), values), 64, "F32")
    assert np.all(np.isfinite(decoded))
    assert np.all(np.abs(decoded / values - 1) < 2.0**-14)


@pytest.mark.parametrize("seed", range(20))
def test_sqrt_scales_and_codes_are_the_least_that_hold(seed: int) -> None:
    values = np.abs(block_with(10.0 ** (3 * seed - 32), seed))
    codes, scales = lanes(Int8SqrtBlock(), values)
    scale = scales[0]
    assert int(scales.view("<u4")[0]) & GRID == 0
    assert holds(255, scale, values.max())
    assert not holds(255, step_down(scale), values.max())
    for value, code in zip(values, codes, strict=True):
        assert holds(code, scale, value)
        assert not holds(code - 1, scale, value)


def test_sqrt_of_tiny_values_is_never_zero() -> None:
    values = np.array([1e-45, 0.0, -0.0, 2.0**-126, 2.0**-124, 4e-37], "<f4")
    codes, scales = lanes(Int8SqrtBlock(), values)
    assert scales.tolist() == [SQRT_LEAST_SCALE]
    assert codes == [1, 0, 0, 1, 1, 3]
    assert Int8SqrtBlock().decode(encode_chunk(Int8SqrtBlock(), values), 6, "F32").tolist()[:3] == [2.0**-124, 0.0, 0.0]


def test_a_small_value_beside_a_large_one_is_rounded_up_far() -> None:
    values = np.array([1.0, 1e-20, 0.0], "<f4")
    decoded = Int8SqrtBlock().decode(encode_chunk(Int8SqrtBlock(), values), 3, "F32")
    assert decoded[2] == 0
    assert decoded[1] == pytest.approx(1 / 255**2, rel=1e-3)  # the update it divides is damped, never blown up
    assert decoded[0] >= 1


def test_sqrt_is_not_written() -> None:
    assert INT8_SQRT_BLOCK not in WRITABLE
    with pytest.raises(DamagedError, match="no encoder"):
        encoder_named(INT8_SQRT_BLOCK)


@pytest.mark.parametrize("encoding", [Int8Block(), Int8SqrtBlock()])
@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0, -0.0, 1e-45, 1e37, 1.0 + 2.0**-23])
def test_scales_that_were_never_written_are_damage(encoding: Int8Block | Int8SqrtBlock, scale: float) -> None:
    data = encode_chunk(encoding, np.ones(65, "<f4"))
    data[-4:] = np.array([scale], "<f4").view(np.uint8)
    with pytest.raises(DamagedError, match="scale"):
        encoding.decode(data, 65, "F32")


def test_the_code_that_was_never_written_is_damage() -> None:
    data = encode_chunk(Int8Block(), np.ones(65, "<f4"))
    data[3] = 0x80
    with pytest.raises(DamagedError, match="code"):
        Int8Block().decode(data, 65, "F32")


@pytest.mark.parametrize("encoding", [Int8Block(), Int8SqrtBlock()])
def test_other_blocks_make_no_difference(encoding: Int8Block | Int8SqrtBlock) -> None:
    values = np.abs(np.concatenate([block_with(1e-3, 1), block_with(1e9, 2), block_with(1e-9, 3)[:20]]))
    together = encoding.decode(encode_chunk(encoding, values), values.size, "F32")
    alone = [values[start : start + BLOCK] for start in range(0, values.size, BLOCK)]
    assert (
        together.tolist()
        == np.concatenate([encoding.decode(encode_chunk(encoding, b), b.size, "F32") for b in alone]).tolist()
    )
