"""Bytes of a source that a merge reads: blocks, each checked as one, and the extents that lie in them.

Whatever a source is (a store, a framework's own files), this is all that the rest of the merger sees of its
tensors. It does not know what reads them or where they go.
"""

from __future__ import annotations

from collections.abc import Callable
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


@dataclass(frozen=True, eq=False)
class Block:
    """``nbytes`` bytes from ``offset`` of a file, right if ``digest`` is what ``checksum`` gives over all of them.

    name: what to call it in an error. flaw: what is found if the bytes are wrong; None where that ends the merge.
    """

    files: Readable
    path: str
    offset: int
    nbytes: int
    checksum: Callable[[], Running]
    digest: str
    name: str
    flaw: Flaw | None = None


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
