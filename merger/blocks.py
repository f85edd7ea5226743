"""Bytes of a source that a merge reads: blocks, each checked as one, and the extents that lie in them.

Whatever a source is (a store, a framework's own files), this is all that the rest of the merger sees of its
tensors. It does not know what reads them or where they go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash
from isal import isal_zlib

from store.versions import Bad


class Readable(Protocol):
    """Where blocks are read from. :class:`store.files.Files` is one."""

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` from byte ``offset`` of a file. DamagedError where it ends early, StorageError."""
        ...


class Running(Protocol):
    """A checksum over bytes as they come."""

    def update(self, data: memoryview, /) -> None:
        """Take in the next bytes."""
        ...

    def hexdigest(self) -> str:
        """Checksum of everything so far."""
        ...


class Crc32:
    """CRC-32 as zip files have it (ISO 3309), running."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, data: memoryview) -> None:
        """See :class:`Running`."""
        self.value = isal_zlib.crc32(data, self.value)

    def hexdigest(self) -> str:
        """Eight hex digits."""
        return f"{self.value:08x}"


def xxh3() -> Running:
    """xxh3-128 as stores have it, running."""
    return xxhash.xxh3_128()


@dataclass(frozen=True)
class Flaw:
    """A version found to be damaged, and the store that it is of: an older one can stand in for it."""

    store: Path
    bad: Bad


Progress = Callable[[int], None]
"""Told the number of stored bytes just read."""


class Decoding(Protocol):
    """One pass over a block whose bytes have to be decoded. It belongs to one thread."""

    @property
    def flaw(self) -> Flaw | None:
        """What was found damaged, after an error: what is stored may rest on another version, and that one be it."""
        ...

    def pieces(self) -> Iterator[memoryview]:
        """The block's bytes, front to back, in pieces of whole elements; each is the caller's.

        DamagedError, perhaps after the last piece, where what is stored is not what was written; StorageError.
        """
        ...


class Coded(Protocol):
    """What is stored in the place of a block's bytes."""

    @property
    def nbytes(self) -> int:
        """Stored bytes that one pass reads."""
        ...

    @property
    def memory(self) -> int:
        """Bytes of memory that one pass takes at most."""
        ...

    def decoding(self, progress: Progress) -> Decoding:
        """Begin a pass."""
        ...


@dataclass(frozen=True, eq=False)
class Block:
    """``nbytes`` bytes from ``offset`` of a file, right if ``digest`` is what ``checksum`` gives over all of them.

    name: what to call it in an error. flaw: what is found if the bytes are wrong; None where that ends the merge.
    coded: where ``nbytes`` bytes have to be decoded from what is stored from ``offset``, and ``digest`` is of that.
    """

    files: Readable
    path: str
    offset: int
    nbytes: int
    checksum: Callable[[], Running]
    digest: str
    name: str
    flaw: Flaw | None = None
    coded: Coded | None = None

    @property
    def stored_bytes(self) -> int:
        """What reading the block once reads: also what it is the difference to, where it is one."""
        return self.nbytes if self.coded is None else self.coded.nbytes


@dataclass(frozen=True, eq=False)
class Extent:
    """Elements [start, stop) of a flattened (fqn, slot): they lie from byte ``offset`` of a block, little-endian.

    dtype: as safetensors names it. A :class:`store.coverage.Span`.
    """

    fqn: str
    slot: str
    start: int
    stop: int
    dtype: str
    block: Block
    offset: int
