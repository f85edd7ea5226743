"""``bf16+int8``: a float32 value as its bfloat16 and a signed byte of what that leaves out. Three bytes a value.

    high  = the value's bits rounded to bfloat16 (16 bits)
    low   = (bits - high * 2**16) / 2**8, rounded to the nearest, ties to even, clipped to [-127, 127]
    bits  = high * 2**16 + low * 2**8

All in integers. Rounding a decoded value to bfloat16 gives ``high`` again: what low adds is at most 127 * 2**8,
less than the half place, 2**15, at which rounding would turn. So the weights that a bfloat16 model computes with
stay exact, and of the float32 master copy 16 significant bits, give or take a last one, are kept.

Refused: what bf16 refuses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from store.encoding.base import (
    Bytes,
    Lane,
    Values,
    check_applies,
    check_float32,
    check_size,
    lanes_bytes,
    pieces,
    sum_over_chunks,
)
from store.encoding.bf16 import check_finite, check_rounds, rounded
from store.errors import DamagedError

BF16_INT8 = "bf16+int8"


@dataclass(frozen=True)
class Bf16Int8:
    """A lane of bfloat16 and a lane of residuals."""

    name: str = BF16_INT8
    lossless: bool = False
    relative_bound: float = 2.0**-15 * 1.01

    def applies(self, dtype: str) -> bool:
        """F32 only."""
        return dtype == "F32"

    def stored_bytes(self, numel: int, dtype: str) -> int:
        """Three bytes a value."""
        return sum_over_chunks(self, numel, dtype)

    def lanes(self, numel: int, dtype: str) -> tuple[Lane, ...]:
        """See :class:`store.encoding.base.Encoding`."""
        check_applies(self, dtype)
        return Lane(numel, 2), Lane(numel, 1)

    def encode(self, values: Values) -> Bytes:
        """See :class:`store.encoding.base.Encoding`."""
        checked = check_float32(self, values)
        check_rounds(self, checked)
        bits = checked.view("<u4")
        data = np.empty(lanes_bytes(self.lanes(bits.size, "F32")), np.uint8)
        highs, lows = _split(data, bits.size)
        for piece in pieces(bits.size):
            high = rounded(bits[piece])
            highs[piece] = high
            # Taking high * 2**16 off first or last is the same: it is an even multiple of 2**8.
            rest = (bits[piece] - (high << 16)).view("<i4")
            low = (rest + (((rest >> 8) & 1) + 127)) >> 8
            lows[piece] = np.clip(low, -127, 127)
        return data

    def decode(self, data: Bytes, numel: int, dtype: str) -> Values:
        """float32 values."""
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
        """2**-15 of the value, and for subnormals 2**-141: one residual, where it is clipped; half of one elsewhere."""
        return np.maximum(np.abs(values.astype(np.float64)) * 2.0**-15, 2.0**-141)


def _split(data: Bytes, numel: int) -> tuple[NDArray[np.uint16], NDArray[np.int8]]:
    return data[: 2 * numel].view("<u2"), data[2 * numel :].view(np.int8)
