"""Whole entries of fragments, written and read in one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from store.encoding.base import CHUNK, Bytes, Encoding, Lane, Values, chunk_sizes, lanes_bytes
from store.encoding.stream import BaseEntry, Packing, Read, encoded_chunks, next_chunk, pack_chunks, require_end
from store.fragments import Readable
from store.names import payload_path
from store.schema import Entry, PartRecord
from store.segment import read_piece
from tests.support.reference_encodings import encode_chunk


def iter_chunks(values: Values) -> Iterator[Values]:
    """Yield the chunks of a fragment's values (1-d) as views."""
    for start in range(0, values.size, CHUNK):
        yield values[start : start + CHUNK]


def split_chunks(encoded: Bytes, encoding: Encoding, numel: int, dtype: str) -> Iterator[Bytes]:
    """Yield the encoded chunks of a whole encoded fragment as views."""
    assert encoded.size == encoding.stored_bytes(numel, dtype)
    start = 0
    for size in chunk_sizes(numel):
        stop = start + lanes_bytes(encoding.lanes(size, dtype))
        yield encoded[start:stop]
        start = stop


def encode_entry(
    chunks: Iterable[Values], encoding: Encoding, numel: int, dtype: str, packing: Packing | None = None
) -> Iterator[memoryview]:
    """Yield the bytes of an entry, a piece for each chunk of values."""
    return pack_chunks((encode_chunk(encoding, values) for values in chunks), encoding, numel, dtype, packing)


def decode_entry(
    read: Read, numel: int, dtype: str, encoding: Encoding, *, packed: bool = False, base: BaseEntry | None = None
) -> Iterator[Values]:
    """Yield the values of a fragment chunk by chunk: float32 for lossy encodings, bytes (uint8) for raw."""
    chunks = encoded_chunks(read, numel, dtype, encoding, packed=packed, base=base)
    for size, chunk in zip(chunk_sizes(numel), chunks, strict=True):
        yield encoding.decode(chunk, size, dtype)


def unpack_chunk(frame: bytes, lanes: Sequence[Lane], base: Bytes | None = None) -> Bytes:
    """Return the only chunk of an entry."""
    read = reader(frame)
    chunk = next_chunk(read, lanes, True, base)
    require_end(read)
    return chunk


def reader(data: bytes, asked: list[int] | None = None) -> Read:
    position = 0

    def read(nbytes: int) -> memoryview:
        nonlocal position
        if asked is not None:
            asked.append(nbytes)
        position += nbytes
        return memoryview(data)[position - nbytes : position]

    return read


def read_entry(files: Readable, part: PartRecord, entry: Entry, target: memoryview) -> None:
    """Fill ``target`` (``entry.nbytes`` bytes) with the stored bytes of a fragment and check their hash."""
    read_piece(files, payload_path(part.save, part.rank), part.header_bytes, entry, target)
