"""``int8-block``: float32 values as signed bytes, with one float32 scale for each block of 64.

    scale = |largest of the block| / 127, its low 8 bits cut off; 0 where that is below 2**-124
    code  = value / scale, rounded to the nearest, ties to even; 0 where the scale is 0
    value = code * scale

All in float32. 17/16 bytes a value. Made for first moments, whose size matters less than their sign. What becomes
of values far below the largest of their block: zero. Refused: NaN and infinities.

Block-wise 8-bit state is Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861); here
with linear codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from store.encoding.base import (
    BLOCK,
    Bytes,
    Lane,
    Values,
    ValuesError,
    check_float32,
    check_size,
    lanes_bytes,
    pieces,
    sum_over_chunks,
)
from store.encoding.blocks import GRID, Floats, block_lanes, check_scales, repeated, rows, split_lanes
from store.errors import DamagedError

INT8_BLOCK = "int8-block"

LEAST_SCALE = 2.0**-124
"""Below it a block is zero. It is this far from the smallest normal number so that a subnormal value is always less
than half a scale, and the codes are the same in threads that flush subnormals to zero and in those that do not."""

MOST_SCALE = 2.0**128 / 127
_LEVELS = np.float32(127)


@dataclass(frozen=True)
class Int8Block:
    """A lane of codes and a lane of scales."""

    name: str = INT8_BLOCK
    lossless: bool = False
    relative_bound: float = 0.032

    def applies(self, dtype: str) -> bool:
        """F32 only."""
        return dtype == "F32"

    def stored_bytes(self, numel: int, dtype: str) -> int:
        """One byte a value and four a block."""
        return sum_over_chunks(self, numel, dtype)

    def lanes(self, numel: int, dtype: str) -> tuple[Lane, ...]:
        """See :class:`store.encoding.base.Encoding`."""
        return block_lanes(self, numel, dtype)

    def encode(self, values: Values) -> Bytes:
        """See :class:`store.encoding.base.Encoding`."""
        checked = check_float32(self, values)
        data = np.empty(lanes_bytes(self.lanes(checked.size, "F32")), np.uint8)
        codes, scales = split_lanes(data, checked.size)
        for elements, blocks, block in rows(checked):
            scale = self._scales(block)
            scales[blocks] = scale
            by = np.where(scale > 0, scale, np.float32(np.inf))[:, None]
            # No clipping: |value / scale| <= 127 * (1 + 2**-14), which rounds to 127.
            code = np.rint(block / by).astype(np.int8)
            codes[elements] = code.reshape(-1).view(np.uint8)[: elements.stop - elements.start]
        return data

    def _scales(self, block: Floats) -> Floats:
        largest = np.abs(block).max(axis=1)
        if not bool(np.isfinite(largest).all()):
            raise ValuesError(f"{self.name} holds neither NaN nor infinities")
        bits = (largest / _LEVELS).view("<u4")
        scale = (bits & np.uint32(0xFFFFFFFF - GRID)).view("<f4")
        return np.where(scale < LEAST_SCALE, np.float32(0), scale)

    def decode(self, data: Bytes, numel: int, dtype: str) -> Values:
        """float32 values."""
        check_size(self, data, numel, dtype)
        codes, scales = split_lanes(data, numel)
        check_scales(self, scales, LEAST_SCALE, MOST_SCALE)
        signed = codes.view(np.int8)
        if numel and int(signed.min()) < -127:
            raise DamagedError(f"a chunk stored as {self.name} has a code that was never written")
        values = np.empty(numel, "<f4")
        for piece in pieces(numel):
            blocks = slice(piece.start // BLOCK, -(-piece.stop // BLOCK))
            np.multiply(signed[piece], repeated(scales, blocks, piece.stop - piece.start), out=values[piece])
        return values

    def error_bound(self, values: Values) -> NDArray[np.float64]:
        """Half a scale: the largest of the block / 254 * (1 + 2**-14), and at most 127 * 2**-124 in tiny blocks."""
        bound = np.empty(values.size)
        for elements, _, block in rows(check_float32(self, values)):
            largest = np.abs(block.astype(np.float64)).max(axis=1)
            half = np.where(largest < 128 * LEAST_SCALE, largest, largest / 254 * (1 + 2.0**-14))
            bound[elements] = np.repeat(half, BLOCK)[: elements.stop - elements.start]
        return bound
