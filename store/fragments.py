"""Stored fragments back to values, chunk by chunk: read, checked, unpacked, decoded.

Whether the bytes were right is known at the end: nobody may use a value before. Memory is a few chunks.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from store.coverage import Source
from store.encoding import encoding_named
from store.encoding.base import Values, chunk_sizes
from store.encoding.stream import Stored, encoded_chunks
from store.errors import DamagedError, StorageError
from store.files import Files
from store.layout import payload_path
from store.names import SaveId


class FragmentReader:
    """Reads one stored fragment, and the one that it is the difference to, once."""

    def __init__(self, files: Files, source: Source) -> None:
        self._source = source
        self._own = _Bytes(files, source)
        self._base = None if source.base is None else _Bytes(files, source.base)
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
        if self._own.packed and state.hexdigest() != entry.encoded_xxh3_128:
            raise DamagedError(f"{self._own.where} does not unpack to what was packed")

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


class _Bytes:
    """An entry's stored bytes, front to back, hashed as they are read."""

    def __init__(self, files: Files, source: Source) -> None:
        self._files = files
        self._entry = source.entry
        self._path = payload_path(source.part.save, source.part.rank)
        self._offset = source.part.header_bytes + source.entry.offset
        self._read = 0
        self._hash = xxhash.xxh3_128()
        self.packed = source.entry.packing is not None
        self.where = f"{source.entry.fqn}/{source.entry.slot} in {self._path}"

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
