"""Implement the encodings ``bf16`` and ``bf16+int8`` in integer arithmetic, independent of the floating-point mode.

``bf16`` rounds float32 values to bfloat16, to the nearest, ties to even, in two bytes a value. The result is bit for
bit that of ``tensor.to(torch.bfloat16)``, including subnormals and -0.0, so a bfloat16 model computes with exactly the
stored weights. Refused: NaN, infinities, and finite values above 3.3961e38, which would round to infinity.

``bf16+int8`` stores a float32 value as its bfloat16 and a signed byte of the residual, in three bytes a value.

    high  = the value's bits rounded to bfloat16 (16 bits)
    low   = (bits - high * 2**16) / 2**8, rounded to the nearest, ties to even, clipped to [-127, 127]
    bits  = high * 2**16 + low * 2**8

Rounding a decoded value to bfloat16 gives ``high`` again, because low adds at most 127 * 2**8, less than half a place,
2**15. So the weights of a bfloat16 model stay exact, and the float32 master copy keeps about 16 significant bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from store.encoding.base import (
    Bytes,
    Encoding,
    Lane,
    Values,
    ValuesError,
    check_applies,
    check_float32,
    check_size,
    lanes_bytes,
    pieces,
    sum_over_chunks,
)
from store.errors import DamagedError

BF16 = "bf16"

MAGNITUDE = 0x7FFFFFFF
TOO_LARGE = 0x7F7F8000
"""Magnitude bits of the smallest float32 that rounds to infinity: halfway above the largest bfloat16, a tie to even."""


def check_rounds(encoding: Encoding, values: NDArray[np.float32]) -> None:
    """Raise ValuesError if a value does not round to a finite bfloat16."""
    bits = values.view("<u4")
    for piece in pieces(bits.size):
        if int((bits[piece] & MAGNITUDE).max()) >= TOO_LARGE:
            raise ValuesError(f"{encoding.name} holds no NaN, no infinity and nothing above 3.3961e38")


def round_to_bfloat16(bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the upper 16 bits after rounding to nearest, ties to even, right-aligned. Finite results only."""
    half = np.uint32(0x7FFF)
    return (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + half)) >> np.uint32(16)


def check_finite(encoding: Encoding, halves: NDArray[np.uint16]) -> None:
    """Raise DamagedError if a stored bfloat16 is not finite: none is ever written."""
    for piece in pieces(halves.size):
        if int((halves[piece] & 0x7FFF).max()) >= 0x7F80:
            raise DamagedError(f"a chunk stored as {encoding.name} holds a value that is not finite")


@dataclass(frozen=True)
class Bf16:
    """One lane of two bytes."""

    name: str = BF16
    lossless: bool = False
    relative_bound: float = 2.0**-8 * 1.01

    def applies(self, dtype: str) -> bool:
        return dtype == "F32"

    def stored_bytes(self, numel: int, dtype: str) -> int:
        return sum_over_chunks(self, numel, dtype)

    def lanes(self, numel: int, dtype: str) -> tuple[Lane, ...]:
        check_applies(self, dtype)
        return (Lane(numel, 2),)

    def encode(self, values: Values) -> Bytes:
        checked = check_float32(self, values)
        check_rounds(self, checked)
        bits = checked.view("<u4")
        halves = np.empty(bits.size, "<u2")
        for piece in pieces(bits.size):
            halves[piece] = round_to_bfloat16(bits[piece])
        return halves.view(np.uint8)

    def decode(self, data: Bytes, numel: int, dtype: str) -> Values:
        check_size(self, data, numel, dtype)
        halves = data.view("<u2")
        check_finite(self, halves)
        bits = np.empty(numel, "<u4")
        for piece in pieces(numel):
            np.left_shift(halves[piece], 16, out=bits[piece], dtype=np.uint32)
        return bits.view("<f4")

    def error_bound(self, values: Values) -> NDArray[np.float64]:
        """Return 2**-8 of the value, at least 2**-134 (subnormals): half a unit in the last of eight places."""
        return np.maximum(np.abs(values.astype(np.float64)) * 2.0**-8, 2.0**-134)


BF16_INT8 = "bf16+int8"


@dataclass(frozen=True)
class Bf16Int8:
    """A lane of bfloat16 and a lane of residuals."""

    name: str = BF16_INT8
    lossless: bool = False
    relative_bound: float = 2.0**-15 * 1.01

    def applies(self, dtype: str) -> bool:
        return dtype == "F32"

    def stored_bytes(self, numel: int, dtype: str) -> int:
        return sum_over_chunks(self, numel, dtype)

    def lanes(self, numel: int, dtype: str) -> tuple[Lane, ...]:
        check_applies(self, dtype)
        return Lane(numel, 2), Lane(numel, 1)

    def encode(self, values: Values) -> Bytes:
        checked = check_float32(self, values)
        check_rounds(self, checked)
        bits = checked.view("<u4")
        data = np.empty(lanes_bytes(self.lanes(bits.size, "F32")), np.uint8)
        highs, lows = _split(data, bits.size)
        for piece in pieces(bits.size):
            high = round_to_bfloat16(bits[piece])
            highs[piece] = high
            # Taking high * 2**16 off first or last is the same: it is an even multiple of 2**8.
            rest = (bits[piece] - (high << 16)).view("<i4")
            low = (rest + (((rest >> 8) & 1) + 127)) >> 8
            lows[piece] = np.clip(low, -127, 127)
        return data

    def decode(self, data: Bytes, numel: int, dtype: str) -> Values:
        check_size(self, data, numel, dtype)
        highs, lows = _split(data, numel)
        check_finite(self, highs)
        if numel and int(lows.min()) < -127:
            raise DamagedError(f"a chunk stored as {self.name} has a residual that was never written")
        bits = np.empty(numel, "<i4")
        for piece in pieces(numel):
            np.left_shift(highs[piece], 16, out=bits[piece].view("<u4"), dtype=np.uint32)
            bits[piece] += lows[piece].astype("<i4") << 8
        return bits.view("<f4")

    def error_bound(self, values: Values) -> NDArray[np.float64]:
        """Return 2**-15 of the value, at least 2**-141 (subnormals): one residual if clipped, otherwise half of one."""
        return np.maximum(np.abs(values.astype(np.float64)) * 2.0**-15, 2.0**-141)


def _split(data: Bytes, numel: int) -> tuple[NDArray[np.uint16], NDArray[np.int8]]:
    return data[: 2 * numel].view("<u2"), data[2 * numel :].view(np.int8)
