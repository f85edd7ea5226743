"""Implement the block encodings ``int8-block`` and ``int8-sqrt-block``: 17/16 bytes a value, all in float32.

Scales are float32 whose low 8 bits are zero. The product of such a scale with an 8-bit integer is exact in float32, so
encoding a decoded value gives the same bytes again.

``int8-sqrt-block`` stores the square roots of values >= 0 as unsigned bytes, one scale for 64 values, rounded up.

    scale = the least float32 whose low 8 bits are zero, of at least 2**-62, for which (255 * scale)**2 >= the largest
            value of the block; 0 if all values are 0
    code  = the least whole number for which (code * scale)**2 >= the value
    value = (code * scale)**2

It is meant for second moments, which divide the update: a decoded value is never below the original, and zero only if
that is zero, so no update can explode. The division uses square roots, which also halve the range of the codes.

The definition uses no square root, because those of some libraries are wrong in the last place (torch's on CPUs, by
Intel MKL, in 6 of 1000). A root gives a first guess of the code; products and comparisons decide.

Refused: negative values (-0.0 counts as 0), NaN, infinities, and blocks that need a scale above 2**56 (values above
3.37e38).

``int8-block`` stores float32 values as signed bytes, one scale for 64 values.

    scale = |largest of the block| / 127, its low 8 bits cut off; 0 where that is below 2**-124
    code  = value / scale, rounded to the nearest, ties to even; 0 where the scale is 0
    value = code * scale

It is meant for first moments, whose size matters less than their sign; values far below the largest of their block
become zero. Refused: NaN and infinities. Block-wise 8-bit state is from Dettmers et al., "8-bit Optimizers via
Block-wise Quantization" (arXiv:2110.02861); here with linear codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from store.encoding.base import (
    BLOCK,
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

GRID = 0xFF
"""Bits that are zero in every scale."""

Floats = NDArray[np.float32]


def block_count(numel: int) -> int:
    """Return the number of blocks of ``numel`` elements; the last may be shorter."""
    return -(-numel // BLOCK)


def block_lanes(encoding: Encoding, numel: int, dtype: str) -> tuple[Lane, ...]:
    """Return the lanes of a chunk: one byte a value, then one float32 a block."""
    check_applies(encoding, dtype)
    return Lane(numel, 1), Lane(block_count(numel), 4)


def split_lanes(data: Bytes, numel: int) -> tuple[Bytes, Floats]:
    """Return the codes and the scales of a chunk as views."""
    return data[:numel], data[numel:].view("<f4")


def rows(values: Floats) -> Iterator[tuple[slice, slice, Floats]]:
    """Yield for each piece its elements, its blocks, and its values of shape (blocks, 64).

    A shorter last block comes last, padded with zeros.
    """
    whole = values.size - values.size % BLOCK
    for piece in pieces(whole):
        yield piece, slice(piece.start // BLOCK, piece.stop // BLOCK), values[piece].reshape(-1, BLOCK)
    if whole < values.size:
        last = np.zeros((1, BLOCK), "<f4")
        last[0, : values.size - whole] = values[whole:]
        yield slice(whole, values.size), slice(whole // BLOCK, whole // BLOCK + 1), last


def scale_per_element(scales: Floats, blocks: slice, numel: int) -> Floats:
    """Return the scale of each of ``numel`` elements, starting at the first of the blocks."""
    return np.repeat(scales[blocks], BLOCK)[:numel]


def check_scales(encoding: Encoding, scales: Floats, least: float, most: float) -> None:
    """Raise DamagedError unless each scale is 0, or within the limits and on the grid, as all written ones are."""
    bits = np.ascontiguousarray(scales).view("<u4")
    low, high = np.array([least, most], "<f4").view("<u4").tolist()
    if not bool(np.all((bits == 0) | ((bits >= low) & (bits <= high) & ((bits & GRID) == 0)))):
        raise DamagedError(f"a chunk stored as {encoding.name} has a scale that was never written")


INT8_SQRT_BLOCK = "int8-sqrt-block"

LEAST_SQRT_SCALE = 2.0**-62
"""Its square is a normal number, so that decoded values and codes do not depend on whether a thread flushes
subnormals to zero."""

MOST_SQRT_SCALE = 2.0**56
"""(255 * 2**56)**2 is finite."""

_UNSIGNED_LEVELS = np.float32(255)
_SHORT = np.float32(1 + 2.0**-20)
_INFINITE = 0x7F800000
_NEGATIVE_ZERO = np.uint32(0x80000000)


@dataclass(frozen=True)
class Int8SqrtBlock:
    """A lane of codes and a lane of scales."""

    name: str = INT8_SQRT_BLOCK
    lossless: bool = False
    relative_bound: float = 0.064

    def applies(self, dtype: str) -> bool:
        return dtype == "F32"

    def stored_bytes(self, numel: int, dtype: str) -> int:
        return sum_over_chunks(self, numel, dtype)

    def lanes(self, numel: int, dtype: str) -> tuple[Lane, ...]:
        return block_lanes(self, numel, dtype)

    def encode(self, values: Values) -> Bytes:
        checked = check_float32(self, values)
        data = np.empty(lanes_bytes(self.lanes(checked.size, "F32")), np.uint8)
        codes, scales = split_lanes(data, checked.size)
        for elements, blocks, block in rows(checked):
            self._check(block)
            scale = self._scales(block.view("<i4").max(axis=1))
            scales[blocks] = scale
            codes[elements] = _codes(block, scale).reshape(-1)[: elements.stop - elements.start]
        return data

    def _check(self, block: Floats) -> None:
        # Compares bits: -0.0 is 0 after its sign is flipped.
        bits = block.view("<u4")
        if int((bits ^ _NEGATIVE_ZERO).view("<i4").max()) > 0 or int(bits.view("<i4").max()) >= _INFINITE:
            raise ValuesError(f"{self.name} holds no negative values, no NaN and no infinities")

    def _scales(self, largest: NDArray[np.int32]) -> Floats:
        """Return the scales from the bits of the largest value of each block; negative bits mean -0.0."""
        root = np.sqrt(np.maximum(largest, 0).view("<f4"))
        # Truncated to the grid, this is the scale or one or two steps below: a step is 256 units in the last place,
        # and the root is wrong by a few at most.
        cut = (root / _UNSIGNED_LEVELS).view("<u4") & np.uint32(0xFFFFFFFF - GRID)
        bits = np.maximum(cut, np.float32(LEAST_SQRT_SCALE).view("<u4"))
        for _ in range(2):
            bits += (_square_bits(bits.view("<f4") * _UNSIGNED_LEVELS) < largest) * np.uint32(GRID + 1)
        scale = np.where(largest > 0, bits.view("<f4"), np.float32(0))
        if float(scale.max()) > MOST_SQRT_SCALE:
            raise ValuesError(f"{self.name} holds nothing above 3.37e38")
        return scale

    def decode(self, data: Bytes, numel: int, dtype: str) -> Values:
        check_size(self, data, numel, dtype)
        codes, scales = split_lanes(data, numel)
        check_scales(self, scales, LEAST_SQRT_SCALE, MOST_SQRT_SCALE)
        values = np.empty(numel, "<f4")
        for piece in pieces(numel):
            blocks = slice(piece.start // BLOCK, -(-piece.stop // BLOCK))
            roots = np.multiply(
                codes[piece], scale_per_element(scales, blocks, piece.stop - piece.start), out=values[piece]
            )
            np.multiply(roots, roots, out=roots)
        return values

    def error_bound(self, values: Values) -> NDArray[np.float64]:
        """Return (root + scale)**2 - value, with the largest scale that the block can get."""
        bound = np.empty(values.size)
        for elements, _, block in rows(check_float32(self, values)):
            roots = np.sqrt(block.astype(np.float64))
            scale = np.maximum(roots.max(axis=1, keepdims=True) / 255 * (1 + 2.0**-13), LEAST_SQRT_SCALE)
            upper = (roots + scale) ** 2 * (1 + 2.0**-22) - block
            bound[elements] = np.where(block == 0, 0, upper).reshape(-1)[: elements.stop - elements.start]
        return bound


def _codes(block: Floats, scale: Floats) -> NDArray[np.uint8]:
    by = np.where(scale > 0, scale, np.float32(1))[:, None]
    # Divided by a little more than the scale, the root gives the code or one less, however it is rounded.
    code = np.ceil(np.sqrt(block) / (by * _SHORT)).astype(np.uint8)
    code += _square_bits(np.multiply(code, by, dtype=np.float32)) < block.view("<i4")
    return code


def _square_bits(roots: Floats) -> NDArray[np.int32]:
    """Return the bits of the squares, which order like the values but are not flushed to zero."""
    with np.errstate(over="ignore"):
        return np.multiply(roots, roots).view("<i4")


INT8_BLOCK = "int8-block"

LEAST_SCALE = 2.0**-124
"""A block with a smaller scale is zero. So a subnormal value is always less than half a scale, and the codes do not
depend on whether a thread flushes subnormals to zero."""

MOST_SCALE = 2.0**128 / 127
_SIGNED_LEVELS = np.float32(127)


@dataclass(frozen=True)
class Int8Block:
    """A lane of codes and a lane of scales."""

    name: str = INT8_BLOCK
    lossless: bool = False
    relative_bound: float = 0.032

    def applies(self, dtype: str) -> bool:
        return dtype == "F32"

    def stored_bytes(self, numel: int, dtype: str) -> int:
        return sum_over_chunks(self, numel, dtype)

    def lanes(self, numel: int, dtype: str) -> tuple[Lane, ...]:
        return block_lanes(self, numel, dtype)

    def encode(self, values: Values) -> Bytes:
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
        bits = (largest / _SIGNED_LEVELS).view("<u4")
        scale = (bits & np.uint32(0xFFFFFFFF - GRID)).view("<f4")
        return np.where(scale < LEAST_SCALE, np.float32(0), scale)

    def decode(self, data: Bytes, numel: int, dtype: str) -> Values:
        check_size(self, data, numel, dtype)
        codes, scales = split_lanes(data, numel)
        check_scales(self, scales, LEAST_SCALE, MOST_SCALE)
        signed = codes.view(np.int8)
        if numel and int(signed.min()) < -127:
            raise DamagedError(f"a chunk stored as {self.name} has a code that was never written")
        values = np.empty(numel, "<f4")
        for piece in pieces(numel):
            blocks = slice(piece.start // BLOCK, -(-piece.stop // BLOCK))
            np.multiply(signed[piece], scale_per_element(scales, blocks, piece.stop - piece.start), out=values[piece])
        return values

    def error_bound(self, values: Values) -> NDArray[np.float64]:
        """Return half a scale: largest of the block / 254 * (1 + 2**-14), at most 127 * 2**-124 in tiny blocks."""
        bound = np.empty(values.size)
        for elements, _, block in rows(check_float32(self, values)):
            largest = np.abs(block.astype(np.float64)).max(axis=1)
            half = np.where(largest < 128 * LEAST_SCALE, largest, largest / 254 * (1 + 2.0**-14))
            bound[elements] = np.repeat(half, BLOCK)[: elements.stop - elements.start]
        return bound
