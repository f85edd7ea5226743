"""Encode and decode the entry of a fragment chunk by chunk, in bounded memory.

An entry holds the encoded chunks of its fragment or, packed, a frame for each. Each iterator belongs to one thread."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from store.encoding.base import Bytes, Encoding, Lane, chunk_sizes, lanes_bytes
from store.encoding.compression import FRAME_HEADER, frame_length, pack_chunk, packed_bound, unpack_body
from store.errors import DamagedError

Read = Callable[[int], memoryview]  # returns the next bytes of an entry, fewer only at its end


@dataclass(frozen=True)
class BaseEntry:
    """The stored bytes of a base, and those of the base that it has in turn."""

    read: Read
    packed: bool
    base: "BaseEntry | None" = None

    def next_chunk(self, lanes: Sequence[Lane]) -> Bytes:
        """Return its next encoded chunk. Raises DamagedError."""
        return next_chunk(self.read, lanes, self.packed, None if self.base is None else self.base.next_chunk(lanes))

    def require_end(self) -> None:
        """Raise DamagedError if it, or a base of it, has more bytes than its chunks."""
        require_end(self.read)
        if self.base is not None:
            self.base.require_end()


@dataclass(frozen=True)
class Packing:
    """Packing options. ``level`` is zstd's; ``base`` yields the encoded chunks of the base in order."""

    level: int = 1
    base: Iterable[Bytes] | None = None


def pack_chunks(
    chunks: Iterable[Bytes], encoding: Encoding, numel: int, dtype: str, packing: Packing | None = None
) -> Iterator[memoryview]:
    """Yield the bytes of an entry, a piece for each encoded chunk. Raises ValueError for a wrong number of elements."""
    base = None if packing is None or packing.base is None else iter(packing.base)
    given = iter(chunks)
    for size in chunk_sizes(numel):
        lanes = encoding.lanes(size, dtype)
        chunk = _next(given, lanes_bytes(lanes))
        if packing is None:
            yield chunk.data
        else:
            yield memoryview(pack_chunk(chunk, lanes, packing.level, None if base is None else _next(base, chunk.size)))
    if next(given, None) is not None or (base is not None and next(base, None) is not None):
        raise ValueError(f"more chunks than {numel} elements make")


def _next(chunks: Iterator[Bytes], nbytes: int) -> Bytes:
    chunk = next(chunks, None)
    if chunk is None or chunk.size != nbytes:
        raise ValueError(f"a chunk of {nbytes} bytes was expected, not {'none' if chunk is None else chunk.size}")
    return chunk


def encoded_chunks(
    read: Read, numel: int, dtype: str, encoding: Encoding, *, packed: bool = False, base: BaseEntry | None = None
) -> Iterator[Bytes]:
    """Yield the encoded chunks of an entry, unpacked but not decoded.

    Raises DamagedError if bytes are missing, left over, or invalid. A base implies packing. A chunk may be
    a view of the bytes that ``read`` returned, which must not change."""
    if base is not None and not packed:
        raise DamagedError("an entry that is not packed cannot be the difference to another one")
    for size in chunk_sizes(numel):
        lanes = encoding.lanes(size, dtype)
        yield next_chunk(read, lanes, packed, None if base is None else base.next_chunk(lanes))
    require_end(read)
    if base is not None:
        base.require_end()


def next_chunk(read: Read, lanes: Sequence[Lane], packed: bool, base: Bytes | None = None) -> Bytes:
    """Return the next encoded chunk of an entry. ``base`` is the same chunk of its base. Raises DamagedError."""
    if packed:
        return unpack_body(_exactly(read, frame_length(_exactly(read, FRAME_HEADER), lanes)), lanes, base)
    return np.frombuffer(_exactly(read, lanes_bytes(lanes)), np.uint8)


def _exactly(read: Read, nbytes: int) -> memoryview:
    data = read(nbytes)
    if len(data) != nbytes:
        raise DamagedError(f"an entry ends {nbytes - len(data)} bytes too early")
    return data


def require_end(read: Read) -> None:
    """Raise DamagedError if an entry has more bytes than its chunks."""
    if len(read(1)):
        raise DamagedError("an entry has more bytes than its chunks")


PACKING = "split-planes"  # name of the packing that is written; see :mod:`store.encoding.compression`
PACKINGS = ("planes", PACKING)  # those that are read. Earlier releases wrote `planes`, in which no plane is split


@dataclass
class EncodedEntry:
    """Bytes of an entry that are encoded, and perhaps packed, while they are written; a StreamedData."""

    encoding: Encoding
    numel: int
    dtype: str
    chunks: Callable[[], Iterable[Bytes]]  # returns the encoded chunks anew at every call
    packing: Packing | None = None  # None to write the chunks unpacked
    bases: tuple[str, ...] = ()  # names of the save of ``packing.base``, and of those that this one needs in turn
    written: int = 0  # bytes produced so far
    seconds: float = 0.0  # time spent producing them, without writing
    _hash: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128, repr=False)

    def __post_init__(self) -> None:
        if bool(self.bases) != (self.packing is not None and self.packing.base is not None):
            raise ValueError("a difference needs the name of its base, and nothing else does")

    @property
    def base(self) -> str | None:
        return self.bases[0] if self.bases else None

    @property
    def nbytes(self) -> int:
        if self.packing is None:
            return self.encoding.stored_bytes(self.numel, self.dtype)
        return packed_bound(self.encoding, self.numel, self.dtype)

    @property
    def exact(self) -> bool:
        return self.packing is None

    def pieces(self) -> Iterator[memoryview]:
        """See :class:`store.segment.StreamedData`. Errors of ``chunks`` pass through."""
        self._hash.reset()
        self.written, made = 0, pack_chunks(self._hashed(), self.encoding, self.numel, self.dtype, self.packing)
        while True:
            began, piece = time.perf_counter(), next(made, None)
            self.seconds += time.perf_counter() - began
            if piece is None:
                return
            self.written += len(piece)
            yield piece

    def encoded_xxh3_128(self) -> str | None:
        """Return the hash of the encoded bytes after all are written; None if they are stored unpacked."""
        return None if self.packing is None else self._hash.hexdigest()

    def _hashed(self) -> Iterator[Bytes]:
        for chunk in self.chunks():
            if self.packing is not None:
                self._hash.update(chunk.data)
            yield chunk
