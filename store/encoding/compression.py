"""Pack encoded chunks losslessly: zstd (RFC 8878) on byte planes, optionally of the difference to a base chunk.

docs/store-format.md has the layout of a frame. Byte k of all elements of a lane makes one plane: signs and exponents of
training state repeat and compress, low bytes are close to noise. A plane that would not get at least 3 % smaller is
stored. Byte planes are the shuffle filter of HDF5 and Blosc, applied to model weights by ZipNN (arXiv:2411.05239).

zstd spends at least one bit on each byte that it does not find repeated. So a plane of mostly small values is split,
and a lane of which few elements are not 0 is sparse, as are gradients of embeddings. Differences are zigzag, so that
small ones have zeros in their high bytes. When reading, every length is checked before memory is allocated."""

import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from store.encoding.base import BLOCK, CHUNK, PIECE, Bytes, Encoding, Lane, lane_slices, lanes_bytes
from store.errors import DamagedError

_SIGNED = {1: "<i1", 2: "<i2", 4: "<i4", 8: "<i8"}

Integers = NDArray[np.signedinteger[Any]]


def difference(chunk: Bytes, base: Bytes, lanes: Sequence[Lane]) -> Bytes:
    """Return the difference of ``chunk`` to ``base``, two encoded chunks of these lanes, in the same size."""
    result = np.empty_like(chunk)
    for new, old, out in _pieces((chunk, base, result), lanes):
        delta = new - old
        np.bitwise_xor(delta << 1, delta >> (8 * delta.itemsize - 1), out=out)
    return result


def apply_difference(delta: Bytes, base: Bytes, lanes: Sequence[Lane]) -> Bytes:
    """Return the chunk from its ``difference`` to the same base."""
    result = np.empty_like(delta)
    for zigzag, old, out in _pieces((delta, base, result), lanes):
        half = (zigzag.view(zigzag.dtype.str.replace("i", "u")) >> 1).view(zigzag.dtype)
        np.add(half ^ -(zigzag & 1), old, out=out)
    return result


def _pieces(arrays: tuple[Bytes, Bytes, Bytes], lanes: Sequence[Lane]) -> Iterator[list[Integers]]:
    if any(array.size != lanes_bytes(lanes) for array in arrays):
        raise ValueError(f"chunks of {[array.size for array in arrays]} bytes for lanes of {lanes_bytes(lanes)}")
    for lane, place in lane_slices(lanes):
        typed = [array[place].view(_SIGNED.get(lane.width, "<i1")) for array in arrays]
        for first in range(0, typed[0].size, PIECE):
            yield [one[first : first + PIECE] for one in typed]


FRAME_HEADER = 4  # bytes of the length at the start of a frame
_LENGTH = struct.Struct("<I")
_PLANE = struct.Struct("<BI")
_STORED, _ZSTD, _SPLIT, _SPARSE = 0, 1, 2, 3
_UNSIGNED = {2: "<u2", 4: "<u4", 8: "<u8"}  # elements of lanes that may be sparse
FEW = 12  # a lane is sparse if at most one of so many elements is not 0
_WORTH = 0.97  # a plane is stored compressed if its size is at most this share
_PROMISING = 0.985  # a plane is compressed as a whole if its sample compresses to this share
_SPLITTABLE = 0.6  # splitting is tried if the sample compresses to this share
_BETTER = 0.98  # a plane is split if its sample shrinks to this share: samples are inexact
_WHOLE = 8  # bits of a plane that is not split
_SAMPLE_RUN = 8192
_SAMPLE_RUNS = 4


class _Zstd(threading.local):
    """zstd of one thread: its objects are not thread-safe, and creating one costs more than a small plane."""

    def __init__(self) -> None:
        self.compressors: dict[int, zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


def pack_chunk(encoded: Bytes, lanes: Sequence[Lane], level: int, base: Bytes | None = None) -> bytes:
    """Return a frame of an encoded chunk. ``level`` is zstd's; ``base`` is an encoded chunk of the same lanes."""
    content = encoded if base is None else difference(encoded, base, lanes)
    if content.size != lanes_bytes(lanes):
        raise ValueError(f"a chunk of {content.size} bytes for lanes of {lanes_bytes(lanes)}")
    parts = [part for lane, place in lane_slices(lanes) for part in _pack_lane(content[place], lane.width, level)]
    return b"".join((_LENGTH.pack(sum(map(len, parts))), *parts))


def frame_length(header: bytes | memoryview, lanes: Sequence[Lane]) -> int:
    """Return the bytes after a frame's first four. Raises DamagedError if that is too long for these lanes."""
    length: int = _LENGTH.unpack(header)[0]
    if length > frame_bound(lanes) - FRAME_HEADER:
        raise DamagedError(f"a packed chunk claims {length} bytes; it can have {frame_bound(lanes) - FRAME_HEADER}")
    return length


def frame_bound(lanes: Sequence[Lane]) -> int:
    """Return the largest size of a frame of these lanes, with all planes stored."""
    return FRAME_HEADER + lanes_bytes(lanes) + _PLANE.size * sum(lane.width for lane in lanes)


def packed_bound(encoding: Encoding, numel: int, dtype: str) -> int:
    """Return the largest size of a packed fragment."""
    whole, rest = divmod(numel, CHUNK)  # not chunk by chunk: a damaged part may claim any size
    return (frame_bound(encoding.lanes(rest, dtype)) if rest else 0) + whole * frame_bound(encoding.lanes(CHUNK, dtype))


def unpack_body(body: memoryview, lanes: Sequence[Lane], base: Bytes | None = None) -> Bytes:
    """Return the encoded chunk in a frame without its first four bytes. Raises DamagedError unless it is valid."""
    content, at = np.empty(lanes_bytes(lanes), np.uint8), 0
    for lane, place in lane_slices(lanes):
        at = _read_lane(body, at, content[place].reshape(lane.count, lane.width))
    if at != len(body):
        raise DamagedError(f"a packed chunk has {len(body) - at} bytes more than its planes")
    return content if base is None else apply_difference(content, base, lanes)


def _pack_lane(content: Bytes, width: int, level: int) -> list[bytes | memoryview]:
    parts: list[bytes | memoryview] = []
    elements = content.view(_UNSIGNED.get(width, np.uint8))
    sample = _sampled(elements)
    if width in _UNSIGNED and sample.size >= BLOCK and np.count_nonzero(sample) * FEW <= sample.size:
        nonzero = elements != 0
        if np.count_nonzero(nonzero) * FEW <= elements.size:
            parts += [bytes((_SPARSE,)), *_compressed(np.packbits(nonzero, bitorder="little"), level)]
            content = elements[nonzero].view(np.uint8)
    for k in range(width):
        parts += _pack_plane(np.ascontiguousarray(content[k::width]), level)
    return parts


def _pack_plane(plane: Bytes, level: int) -> list[bytes | memoryview]:
    bits = _low_bits(plane, level)
    if not bits:
        return [_PLANE.pack(_STORED, plane.size), plane.data]
    if bits == _WHOLE:
        return _compressed(plane, level)
    low, high = _compressed(pack_bits(plane, bits), level), plane >> np.uint8(bits)
    parts = [bytes((bits,)), *low, *(_compressed(high, level) if high.any() else ())]
    size = sum(map(len, parts))
    return [_PLANE.pack(_SPLIT, size), *parts] if size <= _WORTH * plane.size else _compressed(plane, level)


def _compressed(plane: Bytes, level: int) -> list[bytes | memoryview]:
    packed = _compressor(level).compress(plane.data)
    if len(packed) <= _WORTH * plane.size:
        return [_PLANE.pack(_ZSTD, len(packed)), packed]
    return [_PLANE.pack(_STORED, plane.size), plane.data]


def _low_bits(plane: Bytes, level: int) -> int:
    """Return how many low bits to split off, by what is best on a sample. 8: do not split. 0: store the plane as it is.

    Most planes of low bytes are noise, which the sample shows at little cost."""
    sample = _sampled(plane)
    compress = _compressor(level).compress
    sizes = {_WHOLE: len(compress(sample.data))}
    if sizes[_WHOLE] > _PROMISING * sample.size:
        return 0 if sample is not plane else _WHOLE
    if sizes[_WHOLE] <= _SPLITTABLE * sample.size:
        for bits in _WORDS:
            low, high = pack_bits(sample, bits), sample >> np.uint8(bits)
            sizes[bits] = min(len(compress(low.data)), low.size) + (len(compress(high.data)) if high.any() else 0)
    best = min(sizes, key=lambda bits: sizes[bits])
    return best if sizes[best] <= _BETTER * sizes[_WHOLE] else _WHOLE


def _sampled(values: NDArray[Any]) -> NDArray[Any]:
    if values.size <= 2 * _SAMPLE_RUN * _SAMPLE_RUNS:
        return values
    step = values.size // _SAMPLE_RUNS
    return np.concatenate([values[k * step : k * step + _SAMPLE_RUN] for k in range(_SAMPLE_RUNS)])


_WORDS = {bits: (np.dtype(f"<u{8 // bits}"), (8 // bits).bit_length() - 1) for bits in (4, 2, 1)}
"""By bits: integer type with one byte for each value that shares a packed byte, and how often it is halved."""


def pack_bits(plane: Bytes, bits: int) -> Bytes:
    """Return the ``bits`` (1, 2 or 4) low bits of all values, the first value lowest in each byte."""
    kind, halvings = _WORDS[bits]
    words = np.zeros(-(-plane.size // kind.itemsize), kind)
    np.bitwise_and(plane, (1 << bits) - 1, out=words.view(np.uint8)[: plane.size])
    for step in range(halvings):
        words |= words >> kind.type(8 - bits << step)
    return words.astype(np.uint8)


def unpack_bits(packed: Bytes, bits: int, count: int) -> Bytes:
    """Return ``count`` values from their ``pack_bits``. Raises DamagedError if unused bits are not 0."""
    kind, halvings = _WORDS[bits]
    words = packed.astype(kind)
    for step in range(halvings):
        words |= words << kind.type(8 - bits << step)
    words &= np.frombuffer(bytes([(1 << bits) - 1]) * kind.itemsize, kind)[0]
    values = words.view(np.uint8)
    if values[count:].any():
        raise DamagedError("a split plane of a packed chunk has bits after its last value")
    return values[:count]


def _read_lane(body: memoryview, at: int, target: Bytes) -> int:
    """Fill ``target``, a row for each element of a lane, from the planes at ``at``. Return their end."""
    count, width = target.shape
    rows = target
    if at < len(body) and body[at] == _SPARSE and width in _UNSIGNED:
        packed, at = _read_plane(body, at + 1, -(-count // 8))
        bits = np.unpackbits(packed, bitorder="little")
        if bits[count:].any():
            raise DamagedError("a sparse lane of a packed chunk has bits after its last element")
        nonzero = bits[:count].view(np.bool_)
        rows = np.empty((np.count_nonzero(nonzero), width), np.uint8)
    for k in range(width):
        rows[:, k], at = _read_plane(body, at, len(rows))
    if rows is not target:
        target[:] = 0
        np.place(target.view(_UNSIGNED[width]).reshape(-1), nonzero, rows.view(_UNSIGNED[width]).reshape(-1))
    return at


def _read_plane(body: memoryview, at: int, count: int, split: bool = False) -> tuple[Bytes, int]:
    """Return the plane of ``count`` bytes at ``at``, and its end. ``split``: it is part of a split one."""
    if len(body) - at < _PLANE.size:
        raise DamagedError("a packed chunk ends within the head of a plane")
    method, length = _PLANE.unpack_from(body, at)
    start, stop = at + _PLANE.size, at + _PLANE.size + length
    if stop > len(body):
        raise DamagedError(f"a plane of a packed chunk claims {length} bytes where {len(body) - start} are left")
    data = body[start:stop]
    if method == _STORED:
        if length != count:
            raise DamagedError(f"a stored plane of a packed chunk has {length} bytes instead of {count}")
        return np.frombuffer(data, np.uint8), stop
    if method == _SPLIT and not split:
        return _read_split(data, count), stop
    if method != _ZSTD:
        raise DamagedError(f"a plane of a packed chunk has method {method}, which this release does not know")
    return np.frombuffer(_decompress(data, count), np.uint8), stop


def _read_split(data: memoryview, count: int) -> Bytes:
    bits = data[0] if len(data) else 0
    if bits not in _WORDS:
        raise DamagedError(f"a split plane of a packed chunk has {bits} low bits instead of 1, 2 or 4")
    low, at = _read_plane(data, 1, -(-count * bits // 8), split=True)
    values = unpack_bits(low, bits, count)
    if at < len(data):
        high, at = _read_plane(data, at, count, split=True)
        if at != len(data) or int(high.max(initial=0)) >> (8 - bits):
            raise DamagedError("the planes of a split plane of a packed chunk do not fit together")
        values |= high << np.uint8(bits)
    return values


def _decompress(data: memoryview, count: int) -> bytes:
    """Decompress ``count`` bytes, after checking the frame's content size, which zstd allocates."""
    try:
        content_size = zstandard.get_frame_parameters(data).content_size
        if content_size != count:
            raise DamagedError(f"a packed plane claims {content_size} bytes instead of {count}")
        plain = _zstd.decompressor.decompress(data, max_output_size=count, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DamagedError(f"a packed plane cannot be decompressed: {error}") from error
    if len(plain) != count:
        raise DamagedError(f"a packed plane holds {len(plain)} bytes instead of {count}")
    return plain


def _compressor(level: int) -> zstandard.ZstdCompressor:
    if level not in _zstd.compressors:
        made = zstandard.ZstdCompressor(level=level, write_checksum=False, write_content_size=True)
        _zstd.compressors[level] = made
    return _zstd.compressors[level]
