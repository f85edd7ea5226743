"""The bytes of an entry that are made while they are written: encoded chunk by chunk, and perhaps packed.

A :class:`store.payload.Produced`. It does not know where values come from nor what becomes of the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import xxhash

from store.encoding import Encoding
from store.encoding.base import Bytes
from store.encoding.packing import packed_bound
from store.encoding.stream import Packing, stored

PACKING = "planes"
"""Name of the one packing of format 1; see :mod:`store.encoding.packing`."""


@dataclass
class Encoded:
    """A fragment of ``numel`` elements of ``dtype``. chunks: its encoded chunks, made anew with every call.

    packing: how to pack them, None where they are written as they are. base: name of the save that the chunks in
    ``packing.base`` are of."""

    encoding: Encoding
    numel: int
    dtype: str
    chunks: Callable[[], Iterable[Bytes]]
    packing: Packing | None = None
    base: str | None = None
    written: int = 0
    """Bytes made so far."""
    seconds: float = 0.0
    """Time that making them took, without what became of them."""
    _hash: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128, repr=False)

    def __post_init__(self) -> None:
        if (self.base is not None) != (self.packing is not None and self.packing.base is not None):
            raise ValueError("a difference needs the name of its base, and nothing else does")

    @property
    def nbytes(self) -> int:
        """See :class:`store.payload.Produced`."""
        if self.packing is None:
            return self.encoding.stored_bytes(self.numel, self.dtype)
        return packed_bound(self.encoding, self.numel, self.dtype)

    @property
    def exact(self) -> bool:
        """See :class:`store.payload.Produced`."""
        return self.packing is None

    def pieces(self) -> Iterator[memoryview]:
        """See :class:`store.payload.Produced`. ValuesError where the encoding cannot hold the values."""
        self._hash.reset()
        self.written, made = 0, stored(self._hashed(), self.encoding, self.numel, self.dtype, self.packing)
        while True:
            began = time.perf_counter()
            piece = next(made, None)
            self.seconds += time.perf_counter() - began
            if piece is None:
                return
            self.written += len(piece)
            yield piece

    def encoded_xxh3_128(self) -> str | None:
        """Hash of the encoded bytes, once they are all written; None where they are what is stored."""
        return None if self.packing is None else self._hash.hexdigest()

    def _hashed(self) -> Iterator[Bytes]:
        for chunk in self.chunks():
            if self.packing is not None:
                self._hash.update(chunk.data)
            yield chunk
