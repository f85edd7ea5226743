"""The difference of an encoded chunk to an older one of the same kind, and back. Lossless.

Lane by lane, as little-endian integers of the lane's width: subtract, wrapping around, then zigzag, so that small
differences of either sign have zeros in their high bytes and byte planes of those pack to nothing. Zigzag is what
Protocol Buffers and Parquet do with signed integers. Widths other than 1, 2, 4 and 8 go byte by byte.

It knows neither files nor compression, and checks nothing but sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from store.encoding.base import PIECE, Bytes, Lane, lanes_bytes

_SIGNED = {1: "<i1", 2: "<i2", 4: "<i4", 8: "<i8"}

Integers = NDArray[np.signedinteger[Any]]


def difference(chunk: Bytes, base: Bytes, lanes: Sequence[Lane]) -> Bytes:
    """What leads from ``base`` to ``chunk``; both hold one encoded chunk of these lanes, and so does the result."""
    result = np.empty_like(chunk)
    for new, old, out in _pieces((chunk, base, result), lanes):
        delta = new - old
        np.bitwise_xor(delta << 1, delta >> (8 * delta.itemsize - 1), out=out)
    return result


def restored(delta: Bytes, base: Bytes, lanes: Sequence[Lane]) -> Bytes:
    """The chunk that ``difference`` was made of, given the same base."""
    result = np.empty_like(delta)
    for zigzag, old, out in _pieces((delta, base, result), lanes):
        half = (zigzag.view(zigzag.dtype.str.replace("i", "u")) >> 1).view(zigzag.dtype)
        np.add(half ^ -(zigzag & 1), old, out=out)
    return result


def _pieces(arrays: tuple[Bytes, Bytes, Bytes], lanes: Sequence[Lane]) -> Iterator[list[Integers]]:
    """The arrays' lanes as integers, a piece at a time."""
    if any(array.size != lanes_bytes(lanes) for array in arrays):
        raise ValueError(f"chunks of {[array.size for array in arrays]} bytes for lanes of {lanes_bytes(lanes)}")
    start = 0
    for lane in lanes:
        stop = start + lane.nbytes
        typed = [array[start:stop].view(_SIGNED.get(lane.width, "<i1")) for array in arrays]
        for first in range(0, typed[0].size, PIECE):
            yield [one[first : first + PIECE] for one in typed]
        start = stop
