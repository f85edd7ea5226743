"""Define what an encoding is, the sizes of dtypes (named as in safetensors), and the encoding ``raw``.

A fragment's encoded form is the concatenation of its independent encoded chunks, so that encoding, packing, differences
and decoding stream in bounded memory. Bytes are little-endian, and so must the machine be."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from store.errors import DamagedError
from store.names import RAW

CHUNK = 1 << 20  # elements of every chunk of a fragment but the last. A constant of format 1; a multiple of BLOCK
BLOCK = 64  # elements that share one scale in the block encodings. A constant of format 1

PIECE = 1 << 16
"""Elements processed at a time inside a chunk, so that intermediate results stay in the core's cache.

Not part of the format: any multiple of BLOCK gives the same bytes."""

Bytes = NDArray[np.uint8]  # 1-d uint8
Values = NDArray[Any]  # 1-d values; float32 for the lossy encodings


@dataclass(frozen=True)
class Lane:
    """``count`` contiguous elements of ``width`` bytes in a chunk, which packing splits into byte planes."""

    count: int
    width: int

    @property
    def nbytes(self) -> int:
        return self.count * self.width


@dataclass(frozen=True)
class Encoding(ABC):
    """One way to store a slot.

    ``relative_bound``: upper bound of ‖decoded - value‖ / ‖decoded‖ over many values that are not all below 1e-28."""

    name: str  # in parts, manifests and the configuration
    relative_bound: float
    lossless: bool = False  # whether decoding restores every bit

    @abstractmethod
    def applies(self, dtype: str) -> bool:
        """Return whether it can hold values of this dtype."""

    @abstractmethod
    def stored_bytes(self, numel: int, dtype: str) -> int:
        """Return the exact size of a whole fragment before packing. Raises DamagedError for other dtypes."""

    @abstractmethod
    def lanes(self, numel: int, dtype: str) -> tuple[Lane, ...]:
        """Return the lanes of one chunk of ``numel <= CHUNK`` elements, in byte order."""

    @abstractmethod
    def decode(self, data: Bytes, numel: int, dtype: str, out: Values | None = None) -> Values:
        """Decode one chunk, a lossy one into ``out``. Raises DamagedError for ``data`` that no encoder writes."""


def chunk_sizes(numel: int) -> Iterator[int]:
    """Yield the elements of each chunk of a fragment."""
    for start in range(0, numel, CHUNK):
        yield min(CHUNK, numel - start)


def pieces(numel: int) -> Iterator[slice]:
    """Yield the pieces of a chunk; see PIECE."""
    for start in range(0, numel, PIECE):
        yield slice(start, min(start + PIECE, numel))


def lane_slices(lanes: Sequence[Lane]) -> Iterator[tuple[Lane, slice]]:
    """Yield each lane of an encoded chunk with its bytes."""
    start = 0
    for lane in lanes:
        yield lane, slice(start, start + lane.nbytes)
        start += lane.nbytes


def lanes_bytes(lanes: Sequence[Lane]) -> int:
    """Return the bytes of one encoded chunk."""
    return sum(lane.nbytes for lane in lanes)


def check_size(encoding: Encoding, data: Bytes, numel: int, dtype: str) -> None:
    """Raise DamagedError unless ``data`` has the size of one encoded chunk of ``numel`` elements."""
    expected = lanes_bytes(encoding.lanes(numel, dtype))
    if data.size != expected:
        raise DamagedError(f"a chunk of {numel} {dtype} has {data.size} bytes; {encoding.name} needs {expected}")


DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "C64": ("complex64", 8),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1),
    "U64": ("uint64", 8), "U32": ("uint32", 4), "U16": ("uint16", 2), "U8": ("uint8", 1), "BOOL": ("bool", 1),
}  # fmt: skip
"""By their names in safetensors: the names of dtypes in torch and numpy, and the bytes of an element."""


def itemsize(dtype: str) -> int:
    """Return the bytes of one element. Raises DamagedError for unknown dtypes."""
    if dtype not in DTYPES:
        raise DamagedError(f"dtype {dtype!r} is unknown; known are {', '.join(DTYPES)}")
    return DTYPES[dtype][1]


@dataclass(frozen=True)
class Raw(Encoding):
    """Stores the little-endian bytes unchanged, in one lane as wide as the dtype."""

    name: str = RAW
    relative_bound: float = 0.0
    lossless: bool = True

    def applies(self, dtype: str) -> bool:
        return dtype in DTYPES

    def stored_bytes(self, numel: int, dtype: str) -> int:
        return numel * itemsize(dtype)

    def lanes(self, numel: int, dtype: str) -> tuple[Lane, ...]:
        return (Lane(numel, itemsize(dtype)),)

    def decode(self, data: Bytes, numel: int, dtype: str, out: Values | None = None) -> Values:  # noqa: ARG002
        """Return the bytes as uint8, for the caller to view: numpy has no type for some dtypes (BF16, F8)."""
        check_size(self, data, numel, dtype)
        return data


@dataclass(frozen=True)
class Float32Encoding(Encoding):
    """Base of the lossy encodings, which hold float32 values only."""

    def applies(self, dtype: str) -> bool:
        return dtype == "F32"

    def stored_bytes(self, numel: int, dtype: str) -> int:
        whole, rest = divmod(numel, CHUNK)
        size = lanes_bytes(self.lanes(rest, dtype))
        return size + whole * lanes_bytes(self.lanes(CHUNK, dtype)) if whole else size

    def lanes(self, numel: int, dtype: str) -> tuple[Lane, ...]:
        if not self.applies(dtype):  # only a damaged part names such a dtype
            raise DamagedError(f"encoding {self.name!r} holds no values of dtype {dtype!r}")
        return self._lanes(numel)

    def decode(self, data: Bytes, numel: int, dtype: str, out: Values | None = None) -> Values:
        check_size(self, data, numel, dtype)
        values = np.empty(numel, "<f4") if out is None else out
        self._decode_into(values, data)
        return values

    @abstractmethod
    def _lanes(self, numel: int) -> tuple[Lane, ...]: ...

    @abstractmethod
    def _decode_into(self, values: NDArray[np.float32], data: Bytes) -> None:
        """Fill ``values`` from data of the right size. Raises DamagedError for data that no encoder writes."""
