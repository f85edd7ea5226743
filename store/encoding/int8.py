"""Implement the block encodings ``int8-block`` and ``int8-sqrt-block``: 17/16 bytes a value, all in float32.

Scales are float32 whose low 8 bits are zero. The product of such a scale with an 8-bit integer is exact in float32, so
encoding a decoded value gives the same bytes again.

``int8-block`` stores float32 values as signed bytes, one scale for 64 values; docs/encodings.md has the formulas. It is
meant for first moments; values far below the largest of their block become zero. Refused: NaN and infinities.

``int8-sqrt-block`` is only read: earlier releases stored second moments in it, now ``int8-log2`` takes its place.

    value = (code * scale)**2, with unsigned codes"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from store.encoding.base import BLOCK, Bytes, Float32Encoding, Lane, pieces
from store.errors import DamagedError

GRID = 0xFF  # bits that are zero in every scale

Floats = NDArray[np.float32]


def block_count(numel: int) -> int:
    """Return the number of blocks of ``numel`` elements; the last may be shorter."""
    return -(-numel // BLOCK)


def split_lanes(data: Bytes, numel: int) -> tuple[Bytes, Floats]:
    """Return the codes and the scales of a chunk as views."""
    return data[:numel], data[numel:].view("<f4")


@dataclass(frozen=True)
class _BlockEncoding(Float32Encoding):
    """A lane of codes, one byte a value, and a lane of scales, one float32 a block."""

    code_type: ClassVar[type[np.int8 | np.uint8]]
    scale_range: ClassVar[tuple[float, float]]  # least and largest scale that is written, besides 0

    def _lanes(self, numel: int) -> tuple[Lane, ...]:
        return Lane(numel, 1), Lane(block_count(numel), 4)

    def _decode_into(self, values: Floats, data: Bytes) -> None:
        codes, scales = split_lanes(data, values.size)
        self._check_scales(scales)
        typed = codes.view(self.code_type)
        if values.size and int(typed.min()) < -127:
            raise DamagedError(f"a chunk stored as {self.name} has a code that was never written")
        for piece in pieces(values.size):
            blocks = slice(piece.start // BLOCK, block_count(piece.stop))
            by = np.repeat(scales[blocks], BLOCK)[: piece.stop - piece.start]
            self._finish(np.multiply(typed[piece], by, out=values[piece]))

    def _check_scales(self, scales: Floats) -> None:
        """Raise DamagedError unless each scale is 0, or within the limits and on the grid, as all written ones are."""
        bits = np.ascontiguousarray(scales).view("<u4")
        low, high = np.array(self.scale_range, "<f4").view("<u4").tolist()
        if not bool(np.all((bits == 0) | ((bits >= low) & (bits <= high) & ((bits & GRID) == 0)))):
            raise DamagedError(f"a chunk stored as {self.name} has a scale that was never written")

    def _finish(self, products: Floats) -> None:
        """Turn codes times scales into values, in place."""


INT8_SQRT_BLOCK = "int8-sqrt-block"


@dataclass(frozen=True)
class Int8SqrtBlock(_BlockEncoding):
    """Square roots as unsigned bytes; only decodes."""

    name: str = INT8_SQRT_BLOCK
    relative_bound: float = 0.064
    code_type = np.uint8
    scale_range = 2.0**-62, 2.0**56

    def _finish(self, products: Floats) -> None:
        np.multiply(products, products, out=products)


INT8_BLOCK = "int8-block"

LEAST_SCALE = 2.0**-124
"""A block with a smaller scale is zero. So a subnormal value is always less than half a scale, and the codes do not
depend on whether a thread flushes subnormals to zero."""


@dataclass(frozen=True)
class Int8Block(_BlockEncoding):
    """Values as signed bytes, rounded to the nearest."""

    name: str = INT8_BLOCK
    relative_bound: float = 0.032
    code_type = np.int8
    scale_range = LEAST_SCALE, 2.0**128 / 127
