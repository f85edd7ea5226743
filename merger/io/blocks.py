"""Checked blocks and extents; encoded fragments.

Bytes of a source that a merge reads: blocks, each checked as one, and the extents that lie in them.

Whatever a source is (a store, a framework's own files), this is all that the rest of the merger sees of its
tensors. It does not know what reads them or where they go.

Fragments of a store that were encoded, packed, or stored as differences, as blocks: decoded while they are read.

Chunk by chunk, each stored byte once, so memory does not grow with a fragment. It does not know where the bytes go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash
from isal import isal_zlib

from store.encoding import CHUNK, itemsize
from store.errors import DamagedError, MissingError, StorageError, UnreachableError
from store.fragments import FragmentReader, Source
from store.resolve import RejectedVersion

Progress = Callable[[int], None]
"""Told the number of stored bytes just read."""

_LARGEST = 14
"""Chunks that a pass takes at most, measured: stored, unpacked and decoded ones, the base's, and what malloc keeps."""


class Readable(Protocol):
    """Where blocks are read from. :class:`store.storage.local.Files` is one."""

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` from byte ``offset`` of a file. DamagedError where it ends early, StorageError."""
        ...


class RunningHash(Protocol):
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
        self.value = isal_zlib.crc32(data, self.value)

    def hexdigest(self) -> str:
        """Eight hex digits."""
        return f"{self.value:08x}"


def xxh3() -> RunningHash:
    """xxh3-128 as stores have it, running."""
    return xxhash.xxh3_128()


@dataclass(frozen=True)
class Damage:
    """A version found to be damaged, and the store that it is of: an older one can stand in for it."""

    store: Path
    bad: RejectedVersion


class Decoding(Protocol):
    """One pass over a block whose bytes have to be decoded. It belongs to one thread."""

    @property
    def flaw(self) -> Damage | None:
        """What was found damaged, after an error: what is stored may rest on another version, and that one be it."""
        ...

    def pieces(self) -> Iterator[memoryview]:
        """The block's bytes, front to back, in pieces of whole elements; each is the caller's.

        DamagedError, perhaps after the last piece, where what is stored is not what was written; StorageError.
        """
        ...


class EncodedFragment(Protocol):
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
    checksum: Callable[[], RunningHash]
    digest: str
    name: str
    flaw: Damage | None = None
    coded: EncodedFragment | None = None

    @property
    def stored_bytes(self) -> int:
        """What reading the block once reads: also what it is the difference to, where it is one."""
        return self.nbytes if self.coded is None else self.coded.nbytes


@dataclass(frozen=True, eq=False)
class Extent:
    """Elements [start, stop) of a flattened (fqn, slot): they lie from byte ``offset`` of a block, little-endian.

    dtype: as safetensors names it. A :class:`store.fragments.Span`.
    """

    fqn: str
    slot: str
    start: int
    stop: int
    dtype: str
    block: Block
    offset: int


@dataclass(frozen=True)
class StoredFragment:
    """A :class:`merger.io.blocks.EncodedFragment`. root: of the store, for its flaws."""

    files: Readable
    source: Source
    root: Path

    @property
    def nbytes(self) -> int:
        """Its own bytes, and those of its base: that is read again for each fragment that is a difference to it."""
        base = self.source.base
        return self.source.entry.nbytes + (0 if base is None else base.entry.nbytes)

    @property
    def memory(self) -> int:
        entry = self.source.entry
        return _LARGEST * min(CHUNK, entry.numel) * itemsize(entry.dtype)

    def decoding(self, progress: Progress) -> FragmentPass:
        return FragmentPass(self, progress)


class FragmentPass:
    """A :class:`merger.io.blocks.Decoding`."""

    def __init__(self, fragment: StoredFragment, progress: Progress) -> None:
        self._fragment = fragment
        self._reader = FragmentReader(_Told(fragment.files, progress), fragment.source)

    @property
    def flaw(self) -> Damage:
        """The fragment's version, or that of its base where the base's bytes are wrong."""
        return Damage(self._fragment.root, RejectedVersion(self._reader.at_fault, self._fragment.source.entry.unit))

    def pieces(self) -> Iterator[memoryview]:
        try:
            for values in self._reader.chunks():
                yield values.view(np.uint8).data
        except DamagedError as error:
            raise DamagedError(f"{self._what('which is damaged')}: {error}") from error
        except UnreachableError:
            raise
        except MissingError as error:
            raise MissingError(f"{self._what('which is gone')}: {error}") from error
        except StorageError as error:
            raise StorageError(f"{self._what('which cannot be read')}: {error}") from error

    def _what(self, fate: str) -> str:
        """Which fragment, and which save's bytes are to blame: a base's wrong bytes show in what depends on it."""
        source, fault = self._fragment.source, self._reader.at_fault
        entry = source.entry
        where = f"{entry.unit} of save {source.part.save}, elements {entry.start} to {entry.stop} of {entry.fqn}"
        return where if fault == source.part.save else f"{where}, the difference to save {fault}, {fate}"


class _Told:
    """Files that tell what is read."""

    def __init__(self, files: Readable, progress: Progress) -> None:
        self._files, self._progress = files, progress

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        self._files.read_into(path, offset, target)
        self._progress(len(target))
