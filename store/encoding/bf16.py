"""``bf16``: float32 values rounded to bfloat16, to the nearest, ties to even. Two bytes a value.

Bit for bit what ``tensor.to(torch.bfloat16)`` gives on every value that it holds, subnormals and -0.0 included, so
that weights stored this way are exactly the weights that a bfloat16 model computes with. It is arithmetic on
integers alone, and so the same in every floating-point mode.

Refused: NaN, infinities, and finite values so large (above 3.3961e38) that they would become infinite.
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
    pieces,
    sum_over_chunks,
)
from store.errors import DamagedError

BF16 = "bf16"

MAGNITUDE = 0x7FFFFFFF
TOO_LARGE = 0x7F7F8000
"""Magnitude bits of the smallest float32 that rounds to infinity: halfway above the largest bfloat16, a tie to even."""


def check_rounds(encoding: Encoding, values: NDArray[np.float32]) -> None:
    """ValuesError where a value would not round to a finite bfloat16."""
    bits = values.view("<u4")
    for piece in pieces(bits.size):
        if int((bits[piece] & MAGNITUDE).max()) >= TOO_LARGE:
            raise ValuesError(f"{encoding.name} holds no NaN, no infinity and nothing above 3.3961e38")


def rounded(bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The upper 16 bits after rounding to nearest, ties to even, right-aligned. Finite results only."""
    half = np.uint32(0x7FFF)
    return (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + half)) >> np.uint32(16)


def check_finite(encoding: Encoding, halves: NDArray[np.uint16]) -> None:
    """DamagedError where a stored bfloat16 is not finite: none was ever written."""
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
        """F32 only."""
        return dtype == "F32"

    def stored_bytes(self, numel: int, dtype: str) -> int:
        """Two bytes a value."""
        return sum_over_chunks(self, numel, dtype)

    def lanes(self, numel: int, dtype: str) -> tuple[Lane, ...]:
        """See :class:`store.encoding.base.Encoding`."""
        check_applies(self, dtype)
        return (Lane(numel, 2),)

    def encode(self, values: Values) -> Bytes:
        """See :class:`store.encoding.base.Encoding`."""
        checked = check_float32(self, values)
        check_rounds(self, checked)
        bits = checked.view("<u4")
        halves = np.empty(bits.size, "<u2")
        for piece in pieces(bits.size):
            halves[piece] = rounded(bits[piece])
        return halves.view(np.uint8)

    def decode(self, data: Bytes, numel: int, dtype: str) -> Values:
        """float32 values, exactly the bfloat16 ones."""
        check_size(self, data, numel, dtype)
        halves = data.view("<u2")
        check_finite(self, halves)
        bits = np.empty(numel, "<u4")
        for piece in pieces(numel):
            np.left_shift(halves[piece], 16, out=bits[piece], dtype=np.uint32)
        return bits.view("<f4")

    def error_bound(self, values: Values) -> NDArray[np.float64]:
        """2**-8 of the value, and for subnormals 2**-134: half a unit in the last of eight places."""
        return np.maximum(np.abs(values.astype(np.float64)) * 2.0**-8, 2.0**-134)
