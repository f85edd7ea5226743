"""Implement ``int8-log2``: values >= 0 on a fixed logarithmic grid, two levels an octave, one byte a value.

docs/encodings.md has the formulas. It is meant for second moments, whose roots divide the update: no update changes by
more than 9.3 % for it, and the changes average out. The grid is the same everywhere and at all times, so differences to
an earlier save are mostly zero. Values below 2**-95 become that level; only zero becomes zero.

Refused: negative values (-0.0 counts as 0), NaN, infinities, and values from 1.1875 * 2**32 on. All operations are on
integers, so results do not depend on the floating-point mode."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from store.encoding.base import Bytes, Float32Encoding, Lane, pieces

INT8_LOG2 = "int8-log2"
ROUNDING = 0x280000  # added to the bits of a value before they are cut: 40/128 of an octave in the fraction
SHIFT = 22  # bits below the exponent and the highest bit of the fraction
OFFSET = 63  # what is subtracted from the exponent and the highest fraction bit of a level to get its code
TOO_LARGE = (256 + OFFSET << SHIFT) - ROUNDING  # bits of the least value that has no code, 1.1875 * 2**32
ROOT_2 = 0x3504F3  # fraction bits of the square root of 2 as float32
_LEVELS = np.arange(256, dtype=np.uint32) + OFFSET
_VALUES = np.where(_LEVELS > OFFSET, (_LEVELS >> 1 << 23) + (_LEVELS & 1) * ROOT_2, 0).astype("<u4").view("<f4")


@dataclass(frozen=True)
class Int8Log2(Float32Encoding):
    """One lane of unsigned codes."""

    name: str = INT8_LOG2
    relative_bound: float = 0.194

    def _lanes(self, numel: int) -> tuple[Lane, ...]:
        return (Lane(numel, 1),)

    def _decode_into(self, values: NDArray[np.float32], data: Bytes) -> None:
        for piece in pieces(data.size):
            np.take(_VALUES, data[piece], out=values[piece], mode="clip")
