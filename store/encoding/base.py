"""Encoding protocol; raw; dtype sizes.

What an encoding is: values of a fragment to bytes of a size known beforehand, and back.

Everything works chunk by chunk. A fragment's encoded form is the concatenation of its encoded chunks, and each
chunk stands for itself, so that encoding, packing, differences and decoding stream in bounded memory.

It does not know packing, files, devices, or where a fragment lies. Bytes are little-endian, and so must the
machine be, as everywhere in this project.

How wide the elements of each dtype are. Dtypes are named as in safetensors. Knows no values.

``raw``: the little-endian bytes as they are. Any dtype, nothing lost, nothing refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from store.errors import DamagedError
from store.names import RAW

CHUNK = 1 << 20
"""Elements of every chunk of a fragment but the last. A constant of format 1; a multiple of BLOCK."""

BLOCK = 64
"""Elements that share one scale in the block encodings. A constant of format 1."""

PIECE = 1 << 16
"""Elements worked on at a time inside a chunk, so that intermediate results stay in the core's cache.

No part of the format: blocks never straddle pieces, so any multiple of BLOCK gives the same bytes.
"""

Bytes = NDArray[np.uint8]
"""1-d uint8."""

Values = NDArray[Any]
"""1-d values; float32 for the lossy encodings."""


class ValuesError(ValueError):
    """Values that an encoding cannot hold inside its bound. The caller stores them raw, or holds them back."""


@dataclass(frozen=True)
class Lane:
    """``count`` elements of ``width`` bytes, side by side in a chunk: what packing splits into byte planes."""

    count: int
    width: int

    @property
    def nbytes(self) -> int:
        """Of the whole lane."""
        return self.count * self.width


class Encoding(Protocol):
    """One way to store a slot."""

    @property
    def name(self) -> str:
        """As parts, manifests and the configuration write it."""

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back every bit."""

    @property
    def relative_bound(self) -> float:
        """The most that ‖decoded - value‖ / ‖decoded‖ comes to over many values that are not all below 1e-36."""

    def applies(self, dtype: str) -> bool:
        """Whether it can hold values of this dtype."""

    def stored_bytes(self, numel: int, dtype: str) -> int:
        """Exact size of a whole fragment before packing. DamagedError for a dtype that it does not apply to."""

    def lanes(self, numel: int, dtype: str) -> tuple[Lane, ...]:
        """The lanes of one chunk of ``numel <= CHUNK`` elements, in the order in which its bytes lie."""

    def encode(self, values: Values) -> Bytes:
        """The bytes of one chunk. ValuesError for values that it cannot hold inside its bound."""

    def decode(self, data: Bytes, numel: int, dtype: str) -> Values:
        """The values of one chunk. DamagedError unless ``data`` is something that ``encode`` can have written."""

    def error_bound(self, values: Values) -> NDArray[np.float64]:
        """How far, at most, each decoded value may lie from the value of one chunk that it stands for."""


def chunk_sizes(numel: int) -> Iterator[int]:
    """Elements of each chunk of a fragment. None for an empty one."""
    for start in range(0, numel, CHUNK):
        yield min(CHUNK, numel - start)


def pieces(numel: int) -> Iterator[slice]:
    """The pieces of a chunk; see PIECE."""
    for start in range(0, numel, PIECE):
        yield slice(start, min(start + PIECE, numel))


def lanes_bytes(lanes: Sequence[Lane]) -> int:
    """Bytes of one encoded chunk."""
    return sum(lane.nbytes for lane in lanes)


def sum_over_chunks(encoding: Encoding, numel: int, dtype: str) -> int:
    """Bytes of a fragment, from the lanes of its chunks."""
    whole, rest = divmod(numel, CHUNK)
    size = lanes_bytes(encoding.lanes(rest, dtype))
    return size + whole * lanes_bytes(encoding.lanes(CHUNK, dtype)) if whole else size


def check_applies(encoding: Encoding, dtype: str) -> None:
    """DamagedError for a dtype that the encoding cannot hold: only a damaged part says so."""
    if not encoding.applies(dtype):
        raise DamagedError(f"encoding {encoding.name!r} holds no values of dtype {dtype!r}")


def check_size(encoding: Encoding, data: Bytes, numel: int, dtype: str) -> None:
    """DamagedError unless ``data`` has the size of one encoded chunk of ``numel`` elements."""
    expected = lanes_bytes(encoding.lanes(numel, dtype))
    if data.size != expected:
        raise DamagedError(
            f"a chunk of {numel} elements of {dtype} has {data.size} bytes where {encoding.name} takes {expected}"
        )


def check_float32(encoding: Encoding, values: Values) -> NDArray[np.float32]:
    """The values, contiguous. ValueError unless they are one chunk of float32: the caller's mistake."""
    if values.dtype != np.dtype("<f4") or values.ndim != 1 or values.size > CHUNK:
        raise ValueError(
            f"{encoding.name} takes at most {CHUNK} float32 values in one dimension, "
            f"not {values.dtype} of shape {values.shape}"
        )
    return np.ascontiguousarray(values)


_ITEMSIZE = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
    "C64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


def is_known_dtype(dtype: str) -> bool:
    """Whether this release knows the dtype."""
    return dtype in _ITEMSIZE


def itemsize(dtype: str) -> int:
    """Bytes of one element; dtypes are named as in safetensors."""
    if dtype not in _ITEMSIZE:
        raise DamagedError(f"dtype {dtype!r} is unknown; known are {', '.join(_ITEMSIZE)}")
    return _ITEMSIZE[dtype]


@dataclass(frozen=True)
class Raw:
    """One lane, as wide as the dtype."""

    name: str = RAW
    lossless: bool = True
    relative_bound: float = 0.0

    def applies(self, dtype: str) -> bool:
        return is_known_dtype(dtype)

    def stored_bytes(self, numel: int, dtype: str) -> int:
        return numel * itemsize(dtype)

    def lanes(self, numel: int, dtype: str) -> tuple[Lane, ...]:
        return (Lane(numel, itemsize(dtype)),)

    def encode(self, values: Values) -> Bytes:
        """A view of the values' bytes; a copy only where they are not contiguous. Takes bytes too."""
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    def decode(self, data: Bytes, numel: int, dtype: str) -> Values:
        """The bytes themselves, as uint8: numpy has no type for some dtypes (BF16, F8), so the caller views them."""
        check_size(self, data, numel, dtype)
        return data

    def error_bound(self, values: Values) -> NDArray[np.float64]:
        return np.zeros(values.size)
