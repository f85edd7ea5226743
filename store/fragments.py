"""Stored fragments back to values, chunk by chunk: read, checked, unpacked, decoded.

Whether the bytes were right is known at the end: nobody may use a value before. Memory is a few chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import xxhash

from store.coverage import Source
from store.encoding import encoding_named
from store.encoding.base import Values, chunk_sizes
from store.encoding.stream import Stored, encoded_chunks
from store.errors import DamagedError, StorageError
from store.layout import payload_path
from store.names import SaveId


class Readable(Protocol):
    """Where stored bytes are read from. :class:`store.files.Files` is one."""

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset``. DamagedError where the file ends early, StorageError."""
        ...


class FragmentReader:
    """Reads one stored fragment, and the one that it is the difference to, once."""

    def __init__(self, files: Readable, source: Source) -> None:
        self._source = source
        self._own = StoredBytes(files, source)
        self._base = None if source.base is None else StoredBytes(files, source.base)
        self.at_fault: SaveId = source.part.save
        """The save whose bytes are wrong or refused, after an error."""

    def chunks(self) -> Iterator[Values]:
        """The values: float32 from lossy encodings, bytes (uint8) of ``entry.dtype`` from raw.

        DamagedError, perhaps after the last chunk, where stored bytes are not what was written; StorageError."""
        entry = self._source.entry
        encoding, state = encoding_named(entry.encoding), xxhash.xxh3_128()
        base = None if self._base is None else Stored(self._base.read, self._base.packed)
        try:
            encoded = encoded_chunks(
                self._own.read, entry.numel, entry.dtype, encoding, packed=self._own.packed, base=base
            )
            for size, chunk in zip(chunk_sizes(entry.numel), encoded, strict=True):
                if self._own.packed:
                    state.update(chunk.data)
                yield encoding.decode(chunk, size, entry.dtype)
            self._check()
        except (DamagedError, StorageError):
            self._blame()
            raise
        if self._own.packed:
            check_encoded(self._source, state.hexdigest())

    def _check(self) -> None:
        for one in (self._base, self._own):
            if one is not None:
                one.check()

    def _blame(self) -> None:
        """Wrong bytes of a base show as nonsense of what depends on it, so ask the base first."""
        base = self._base
        if base is None or self._source.base is None:
            return
        try:
            base.check()
        except (DamagedError, StorageError):
            self.at_fault = self._source.base.part.save


def check_encoded(source: Source, found: str) -> None:
    """DamagedError unless what a packed fragment unpacked to has the hash of what was packed.

    A wrong base shows here and nowhere else: its own bytes, and the difference's, may all be as they were written."""
    if found != source.entry.encoded_xxh3_128:
        where = payload_path(source.part.save, source.part.rank)
        base = "" if source.base is None else f", as the difference to {source.base.part.save}"
        raise DamagedError(f"{source.fqn}/{source.slot} in {where} does not unpack to what was packed{base}")


class StoredBytes:
    """An entry's stored bytes, front to back, hashed as they are read."""

    def __init__(self, files: Readable, source: Source) -> None:
        self._files = files
        self._entry = source.entry
        self._path = payload_path(source.part.save, source.part.rank)
        self._offset = source.part.header_bytes + source.entry.offset
        self._read = 0
        self._hash = xxhash.xxh3_128()
        self.packed = source.entry.packing is not None

    def read(self, nbytes: int) -> memoryview:
        """The next bytes; fewer only at the end."""
        data = memoryview(bytearray(min(nbytes, self._entry.nbytes - self._read)))
        self._files.read_into(self._path, self._offset + self._read, data)
        self._read += len(data)
        self._hash.update(data)
        return data

    def check(self) -> None:
        """Read what is left. DamagedError unless all bytes together have the hash that they were written with."""
        while self._read < self._entry.nbytes:
            self.read(1 << 22)
        if self._hash.hexdigest() != self._entry.xxh3_128:
            raise DamagedError(
                f"{self._path}: bytes {self._offset} to {self._offset + self._entry.nbytes} do not match their hash"
            )
