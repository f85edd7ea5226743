"""bf16 and bf16+int8 against integer arithmetic on every pattern that matters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from store.encoding import CHUNK, ENCODINGS, WRITABLE, encoding_named
from store.encoding.bfloat16 import TOO_LARGE, Bf16, Bf16Int8, ScaledBf16
from store.errors import DamagedError
from tests.support.reference_encodings import ValuesError, encode_chunk


def from_bits(*bits: int) -> NDArray[np.float32]:
    return np.array(bits, "<u4").view("<f4")


def every_high_half() -> NDArray[np.float32]:
    """All 2**16 upper halves, each with the lower halves at which rounding turns."""
    lows = np.array([0, 1, 0x7F, 0x80, 0x7FFF, 0x8000, 0x8001, 0x807F, 0x8080, 0xFFFF], np.uint32)
    bits = ((np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] + lows).reshape(-1)
    return bits[(bits & 0x7FFFFFFF) < TOO_LARGE].view("<f4")


def test_bf16_is_what_torch_converts_to() -> None:
    values = every_high_half()
    assert values.size < CHUNK
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy()
    assert encode_chunk(Bf16(), values).tobytes() == expected.tobytes()
    assert encode_chunk(Bf16Int8(), values)[: 2 * values.size].tobytes() == expected.tobytes()


def test_bf16_by_hand() -> None:
    # 1 + half a step: to even, down; 1 + 3 half steps: to even, up; just above a half: up; -0.0 keeps its sign.
    values = from_bits(0x3F808000, 0x3F818000, 0x3F808001, 0x80000000, 0x00008001, 0x7F7F7FFF)
    assert encode_chunk(Bf16(), values).view("<u2").tolist() == [0x3F80, 0x3F82, 0x3F81, 0x8000, 0x0001, 0x7F7F]


def test_decoded_bf16_plus_int8_rounds_to_the_same_bf16() -> None:
    values = every_high_half()
    decoded = Bf16Int8().decode(encode_chunk(Bf16Int8(), values), values.size, "F32")
    assert encode_chunk(Bf16(), decoded).tobytes() == encode_chunk(Bf16(), values).tobytes()


def test_residuals_by_hand() -> None:
    # Exactly half a bfloat16 step above, to even down: rest 0x8000 / 0x100 = 128, clipped to 127.
    # 0x3F818000 rounds up to 0x3F82: rest -128, clipped to -127. 0x180 / 0x100 = 1.5: to even, 2; 0x80: 0.5, to 0.
    values = from_bits(0x3F808000, 0x3F818000, 0x3F800180, 0x3F800080, 0xBF800180)
    data = encode_chunk(Bf16Int8(), values)
    assert data[10:].view(np.int8).tolist() == [127, -127, 2, 0, 2]
    assert Bf16Int8().decode(data, 5, "F32").view("<u4").tolist() == [
        0x3F807F00, 0x3F818100, 0x3F800200, 0x3F800000, 0xBF800200,
    ]  # fmt: skip


def test_an_error_above_half_a_residual_only_where_clipped() -> None:
    values = every_high_half()
    bits = values.view("<i4")
    error = np.abs(Bf16Int8().decode(encode_chunk(Bf16Int8(), values), values.size, "F32").view("<i4") - bits)
    clipped = np.abs((bits & 0xFFFF) - 0x8000) < 0x80
    assert error[~clipped].max() == 0x80
    assert error.max() == 0x100


@pytest.mark.parametrize("encoding", [Bf16(), Bf16Int8()])
def test_what_would_become_infinite_is_refused(encoding: Bf16 | Bf16Int8) -> None:
    for sign in (0, 0x80000000):
        encode_chunk(encoding, from_bits(sign | (TOO_LARGE - 1)))
        with pytest.raises(ValuesError, match=r"3\.3961e38"):
            encode_chunk(encoding, from_bits(0, sign | TOO_LARGE))


@pytest.mark.parametrize("encoding", [Bf16(), Bf16Int8()])
@pytest.mark.parametrize("half", [0x7F80, 0xFF80, 0x7FC0])
def test_a_stored_value_that_is_not_finite_is_damage(encoding: Bf16 | Bf16Int8, half: int) -> None:
    data = encode_chunk(encoding, np.ones(3, "<f4"))
    data[2:4] = np.array([half], "<u2").view(np.uint8)
    with pytest.raises(DamagedError, match="not finite"):
        encoding.decode(data, 3, "F32")


def test_a_residual_that_was_never_written_is_damage() -> None:
    data = encode_chunk(Bf16Int8(), np.ones(3, "<f4"))
    data[-1] = 0x80
    with pytest.raises(DamagedError, match="residual"):
        Bf16Int8().decode(data, 3, "F32")


def scaled(factor: float, *halves: int) -> NDArray[np.uint8]:
    return np.concatenate([np.array([factor], "<f4").view(np.uint8), np.array(halves, "<u2").view(np.uint8)])


def test_scaled_values_are_the_nearest_float32_to_the_product() -> None:
    halves, factor = (every_high_half().view("<u4") & 0xFFFF0000).view("<f4"), np.float32(0.3)
    products = halves.astype(np.float64) * np.float64(factor)  # exact: 8 and 24 significant bits
    data = scaled(0.3, *(halves.view("<u4") >> 16).tolist())
    with np.errstate(all="ignore"):
        assert ScaledBf16().decode(data, halves.size, "F32").tobytes() == products.astype("<f4").tobytes()


def test_every_chunk_of_scaled_values_has_its_factor() -> None:
    encoding = ScaledBf16()
    assert encoding.stored_bytes(0, "F32") == 0
    assert encoding.stored_bytes(CHUNK + 3, "F32") == 2 * (CHUNK + 3) + 8
    assert encoding.decode(scaled(2.0, 0x3F80, 0x8000), 2, "F32").tolist() == [2.0, -0.0]
    assert encoding.lossless


@pytest.mark.parametrize("half", [0x7F80, 0xFF80, 0x7FC0])
def test_a_scaled_value_that_is_not_finite_is_damage(half: int) -> None:
    with pytest.raises(DamagedError, match="not finite"):
        ScaledBf16().decode(scaled(0.5, 0x3F80, half), 2, "F32")


@pytest.mark.parametrize("factor", [0.0, -0.5, 1e-39, 2.0**127, float("inf"), float("nan")])
def test_a_factor_that_is_never_written_is_damage(factor: float) -> None:
    with pytest.raises(DamagedError, match="factor"):
        ScaledBf16().decode(scaled(factor, 0x3F80), 1, "F32")


def test_no_setting_chooses_scaled_values() -> None:
    assert encoding_named("bf16-scaled") == ScaledBf16()
    assert "bf16-scaled" not in (*ENCODINGS, *WRITABLE)
