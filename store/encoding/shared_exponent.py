"""Implement ``int8-shared-exponent``: coarse whole multiples of a power of two, one exponent for 64 values.

docs/encodings.md has the formulas. Codes are within -127 and 127, and are stored as zigzag, so that small ones have
zeros in their high bits; most are within -3 and 3, and take less than three bits once packed.

It is meant for first moments, of which a resume needs the sign and about the size: a decoded value has the sign of the
value or is 0, and is at most twice as large, so no update gets larger than that or turns around. ``usual`` ignores
outliers, which would make all other values of a block zero. Both statistics are made of minima and maxima, which
rounding does not reorder, so encoding a decoded value gives the same scale and the same codes.

Refused: NaN, infinities, and values above 1.5 * 2**127 (2.55e38). A shared power of two is block floating point;
OCP's Microscaling formats (MXINT8) share one among 32 values, with the largest at full scale."""

from dataclasses import dataclass

import numpy as np

from store.encoding.base import BLOCK, Bytes, Float32Encoding, Lane, pieces
from store.encoding.int8 import Floats, block_count
from store.errors import DamagedError

INT8_SHARED_EXPONENT = "int8-shared-exponent"
GROUPS = 4  # of the elements of a block; a group has every fourth one

ROUND_USUAL, ROUND_LARGE = 1 << 21, 1 << 16
"""Added to the bits of a value before its fraction is cut, to get its exponent after rounding to 2 or 7 bits."""

LESS_USUAL, LESS_LARGE = 1, 6  # what is subtracted from the exponent of the rounded value to get that of the scale
FRACTION = 23  # bits of the fraction of a float32

LEAST, MOST = 3, 253
"""Least and most exponent of a scale, plus 127. With the least, a subnormal value is below half a scale, so codes do
not depend on whether a thread flushes them to zero."""

TOO_LARGE = 0x7F400001  # magnitude bits of the least value refused: above 1.5 * 2**127, a multiple of all scales


@dataclass(frozen=True)
class Int8SharedExponent(Float32Encoding):
    """A lane of zigzag codes, one byte a value, and a lane of exponents, one byte a block."""

    name: str = INT8_SHARED_EXPONENT
    relative_bound: float = 1.0

    def _lanes(self, numel: int) -> tuple[Lane, ...]:
        return Lane(numel, 1), Lane(block_count(numel), 1)

    def _decode_into(self, values: Floats, data: Bytes) -> None:
        codes, exponents = data[: values.size], data[values.size :].astype("<u4")
        if not bool(np.all((exponents == 0) | ((exponents >= LEAST) & (exponents <= MOST)))):
            raise DamagedError(f"a chunk stored as {self.name} has a scale that was never written")
        if values.size and int(codes.max()) == 0xFF:
            raise DamagedError(f"a chunk stored as {self.name} has a code that was never written")
        scales = (exponents << FRACTION).view("<f4")
        for piece in pieces(values.size):
            blocks = slice(piece.start // BLOCK, block_count(piece.stop))
            by = np.repeat(scales[blocks], BLOCK)[: piece.stop - piece.start]
            code = (codes[piece] >> 1).view(np.int8) ^ -(codes[piece] & 1).view(np.int8)
            with np.errstate(over="ignore"):
                np.multiply(code, by, out=values[piece])
        if int(exponents.max(initial=0)) > MOST - LESS_LARGE and not bool(np.isfinite(values).all()):
            raise DamagedError(f"a chunk stored as {self.name} has a value that is not finite")
