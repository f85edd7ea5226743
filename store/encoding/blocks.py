"""What the two block encodings share: a chunk in rows of 64, its lanes, and scales with short significands.

Scales are float32 whose low 8 bits are zero. A product of such a scale with an integer of 8 bits is exact in
float32, which is what makes encoding a decoded value give back the very same bytes. It does not know how a scale
is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from store.encoding.base import BLOCK, Bytes, Encoding, Lane, check_applies, pieces
from store.errors import DamagedError

GRID = 0xFF
"""The bits that are zero in every scale."""

Floats = NDArray[np.float32]


def block_count(numel: int) -> int:
    """Blocks of ``numel`` elements; the last may be shorter."""
    return -(-numel // BLOCK)


def block_lanes(encoding: Encoding, numel: int, dtype: str) -> tuple[Lane, ...]:
    """One byte a value, then one float32 a block."""
    check_applies(encoding, dtype)
    return Lane(numel, 1), Lane(block_count(numel), 4)


def split_lanes(data: Bytes, numel: int) -> tuple[Bytes, Floats]:
    """The codes and the scales of a chunk, as views."""
    return data[:numel], data[numel:].view("<f4")


def rows(values: Floats) -> Iterator[tuple[slice, slice, Floats]]:
    """Piece by piece: the elements, their blocks, and the values as an array of (blocks, 64).

    A last block that is shorter comes by itself, filled up with zeros.
    """
    whole = values.size - values.size % BLOCK
    for piece in pieces(whole):
        yield piece, slice(piece.start // BLOCK, piece.stop // BLOCK), values[piece].reshape(-1, BLOCK)
    if whole < values.size:
        last = np.zeros((1, BLOCK), "<f4")
        last[0, : values.size - whole] = values[whole:]
        yield slice(whole, values.size), slice(whole // BLOCK, whole // BLOCK + 1), last


def repeated(scales: Floats, blocks: slice, numel: int) -> Floats:
    """The scale of each of ``numel`` elements that start with the first of the blocks."""
    return np.repeat(scales[blocks], BLOCK)[:numel]


def check_scales(encoding: Encoding, scales: Floats, least: float, most: float) -> None:
    """DamagedError unless each scale is 0 or within the limits, on the grid: nothing else was ever written."""
    bits = np.ascontiguousarray(scales).view("<u4")
    low, high = np.array([least, most], "<f4").view("<u4").tolist()
    if not bool(np.all((bits == 0) | ((bits >= low) & (bits <= high) & ((bits & GRID) == 0)))):
        raise DamagedError(f"a chunk stored as {encoding.name} has a scale that was never written")
