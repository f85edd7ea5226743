"""Implement the encodings as whole multiples of a power of two, which a block of values shares.

docs/encodings.md has the formulas. The scale follows from the usual magnitude of the block: ``usual`` ignores outliers,
which would make all other values zero. Both statistics are made of minima and maxima, which rounding does not reorder,
so encoding a decoded value gives the same scale and the same codes.

``int8-shared-exponent`` and ``int8-shared-exponent-128`` are meant for first moments: a decoded value has the sign of
the value or is 0, and is at most twice as large. ``int16-shared-exponent`` is meant for weights, whose differences are
small multiples of one scale; small tensors, such as those of norms, have finer scales.

Refused: NaN, infinities, and values above 1.5 * 2**127 (2.55e38)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from store.encoding.base import BLOCK, Bytes, Float32Encoding, Lane, pieces
from store.encoding.int8 import Floats
from store.errors import DamagedError

INT8_SHARED_EXPONENT = "int8-shared-exponent"
INT8_SHARED_EXPONENT_128 = "int8-shared-exponent-128"
INT16_SHARED_EXPONENT = "int16-shared-exponent"
FRACTION = 23  # bits of the fraction of a float32

LEAST, MOST = 3, 253
"""Least and most exponent of a scale, plus 127. With the least, a subnormal value is below half a scale, so codes do
not depend on whether a thread flushes them to zero."""

TOO_LARGE = 0x7F400001  # magnitude bits of the least value refused: above 1.5 * 2**127, a multiple of all scales


@dataclass(frozen=True)
class SharedExponent(Float32Encoding):
    """A lane of signed codes, and a lane of exponents, one byte a block.

    A scale is 2**-below_usual times the power of two of the usual magnitude, or 2**-below_large times that of the
    largest if that is more; magnitudes are rounded to one significant bit more than that."""

    block: int = BLOCK  # elements that share a scale
    groups: int = 4  # of the elements of a block, every fourth in one; the usual magnitude is one that each group has
    width: int = 1  # bytes of a code
    below_usual: int = 1
    below_large: int = 6
    small: int = 0  # chunks of fewer elements have the finest scales, which follow from the largest magnitude alone

    def finest(self, numel: int) -> int:
        """Return ``below_usual`` of a chunk of ``numel`` elements."""
        return self.below_large if numel < self.small else self.below_usual

    def blocks(self, numel: int) -> int:
        """Return the number of blocks; the last may be shorter."""
        return -(-numel // self.block)

    def rounding(self, below: int) -> int:
        """Return what is added to the bits of a magnitude, before its fraction is cut, to round it."""
        return 1 << (FRACTION - 1 - below)

    def _lanes(self, numel: int) -> tuple[Lane, ...]:
        return Lane(numel, self.width), Lane(self.blocks(numel), 1)

    def _decode_into(self, values: Floats, data: Bytes) -> None:
        stored, exponents = data[: self.width * values.size], data[self.width * values.size :].astype("<u4")
        if not bool(np.all((exponents == 0) | ((exponents >= LEAST) & (exponents <= MOST)))):
            raise DamagedError(f"a chunk stored as {self.name} has a scale that was never written")
        scales = (exponents << FRACTION).view("<f4")
        for piece in pieces(values.size):
            codes = self._codes(stored[self.width * piece.start : self.width * piece.stop])
            if int(codes.min()) == np.iinfo(codes.dtype).min:
                raise DamagedError(f"a chunk stored as {self.name} has a code that was never written")
            by = np.repeat(scales[piece.start // self.block : self.blocks(piece.stop)], self.block)
            with np.errstate(over="ignore"):
                np.multiply(codes, by[: codes.size], out=values[piece])
        if int(exponents.max(initial=0)) > MOST - self.below_large and not bool(np.isfinite(values).all()):
            raise DamagedError(f"a chunk stored as {self.name} has a value that is not finite")

    def _codes(self, stored: Bytes) -> NDArray[np.int8 | np.int16]:
        return stored.view("<i2")


@dataclass(frozen=True)
class Int8SharedExponent(SharedExponent):
    """Zigzag codes within -127 and 127, one exponent for 64 values."""

    name: str = INT8_SHARED_EXPONENT
    relative_bound: float = 1.0

    def _codes(self, stored: Bytes) -> NDArray[np.int8 | np.int16]:
        return (stored >> 1).view(np.int8) ^ -(stored & 1).view(np.int8)


@dataclass(frozen=True)
class Int8SharedExponent128(Int8SharedExponent):
    """The same, one exponent for 128 values, so that fewer of the codes are large."""

    name: str = INT8_SHARED_EXPONENT_128
    relative_bound: float = 1.5
    block: int = 2 * BLOCK


@dataclass(frozen=True)
class Int16SharedExponent(SharedExponent):
    """Codes within -32767 and 32767, one exponent for 4096 values."""

    name: str = INT16_SHARED_EXPONENT
    relative_bound: float = 0.016
    block: int = 64 * BLOCK
    groups: int = 64
    width: int = 2
    below_usual: int = 8
    below_large: int = 14
    small: int = 1 << 14
