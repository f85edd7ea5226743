"""Describe the bytes that a merge reads: blocks, each with a checksum, and the extents that lie in them.

This is all that the rest of the merger sees of tensors in a source, be it a store or a framework's own files.
Encoded, packed or delta fragments of a store are blocks that are decoded chunk by chunk while they are read, each
stored byte once, so memory does not grow with a fragment."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import xxhash
from isal import isal_zlib

from store.encoding import CHUNK, itemsize
from store.errors import DamagedError, MissingError, StorageError, UnreachableError
from store.fragments import Copy, FragmentReader, Readable, Source
from store.resolve import RejectedVersion

Progress = Callable[[int], None]
"""Called with the number of stored bytes just read."""

_CHUNKS_PER_PASS = 14
"""Most chunks in memory during a pass, measured: stored, unpacked, decoded, the base's, and malloc's reserve."""


class RunningHash(Protocol):
    """A checksum updated as bytes arrive."""

    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class Crc32:
    """CRC-32 of zip files (ISO 3309) as a running hash."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, data: memoryview) -> None:
        self.value = isal_zlib.crc32(data, self.value)

    def hexdigest(self) -> str:
        return f"{self.value:08x}"


class Unchecked:
    """The checksum of files that have none, such as safetensors; its digest is empty."""

    def update(self, data: memoryview) -> None: ...

    def hexdigest(self) -> str:
        return ""


xxh3: Callable[[], RunningHash] = xxhash.xxh3_128
"""The checksum of stores."""


@dataclass(frozen=True)
class Damage:
    """A damaged version of a unit and its store; an older version can be used instead."""

    store: Path
    bad: RejectedVersion


@dataclass(frozen=True)
class StoredFragment:
    """An encoded fragment of the store at ``root``: stored bytes that decode to a block.

    Or, with ``copies``, all fragments of a tensor, ``source`` among them, which a pass puts together in memory."""

    files: Readable
    source: Source
    root: Path
    copies: Sequence[Copy[Source]] = ()

    @property
    def nbytes(self) -> int:
        """Stored bytes that a pass reads: its own and those of its base, which each difference to it reads again."""
        sources = {id(copy.source): copy.source for copy in self.copies}.values() or (self.source,)
        return sum(one.entry.nbytes for source in sources for one in (source, source.base) if one is not None)

    @property
    def memory(self) -> int:
        """Most bytes of memory that one pass takes."""
        entry, whole = self.source.entry, sum(copy.numel for copy in self.copies)
        return (_CHUNKS_PER_PASS * min(CHUNK, entry.numel) + 3 * whole) * itemsize(entry.dtype)


class FragmentPass:
    """One pass over a block whose bytes are decoded. Belongs to one thread."""

    def __init__(self, fragment: StoredFragment, progress: Progress) -> None:
        self._fragment, self._source = fragment, fragment.source
        self._files = _CountingFiles(fragment.files, progress)
        self._reader = FragmentReader(self._files, fragment.source)

    @property
    def flaw(self) -> Damage:
        """After an error: the fragment's version, or its base's version if the base's bytes are wrong."""
        return Damage(self._fragment.root, RejectedVersion(self._reader.at_fault, self._source.entry.unit))

    def pieces(self) -> Iterator[memoryview]:
        """Yield the block's bytes in order, in pieces of whole elements; the caller owns each piece.

        Raises DamagedError, perhaps after the last piece, if the stored bytes are wrong; StorageError."""
        if not self._fragment.copies:
            yield from self._decoded()
            return
        size, copies = itemsize(self._source.dtype), self._fragment.copies
        whole = np.empty(sum(copy.numel for copy in copies) * size, np.uint8)
        for _, group in groupby(copies, lambda copy: id(copy.source)):
            own = list(group)
            self._source = own[0].source
            self._reader = FragmentReader(self._files, self._source)
            values = np.frombuffer(b"".join(self._decoded()), np.uint8)
            for copy in own:
                copy.place(values, whole, size)
        for start in range(0, len(whole), CHUNK * size):
            yield whole[start : start + CHUNK * size].data

    def _decoded(self) -> Iterator[memoryview]:
        try:
            for values in self._reader.chunks():
                yield values.view(np.uint8).data
        except DamagedError as error:
            raise DamagedError(f"{self._subject('which is damaged')}: {error}") from error
        except UnreachableError:
            raise
        except MissingError as error:
            raise MissingError(f"{self._subject('which is gone')}: {error}") from error
        except StorageError as error:
            raise StorageError(f"{self._subject('which cannot be read')}: {error}") from error

    def _subject(self, fate: str) -> str:
        """Return which fragment failed, and the save of its base if the base's bytes are at fault."""
        source, fault = self._source, self._reader.at_fault
        entry = source.entry
        where = f"{entry.unit} of save {source.part.save}, elements {entry.start} to {entry.stop} of {entry.fqn}"
        return where if fault == source.part.save else f"{where}, the difference to save {fault}, {fate}"


class _CountingFiles:
    """Files that report the bytes read."""

    def __init__(self, files: Readable, progress: Progress) -> None:
        self._files, self._progress = files, progress

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        self._files.read_into(path, offset, target)
        self._progress(len(target))


@dataclass(frozen=True, eq=False)
class Block:
    """``nbytes`` bytes from ``offset`` of a file, correct if ``checksum`` over all of them gives ``digest``.

    ``coded``: decodes ``nbytes`` bytes from those stored at ``offset``; ``digest`` is of the stored bytes."""

    files: Readable
    path: str
    offset: int
    nbytes: int
    checksum: Callable[[], RunningHash]
    digest: str
    name: str  # name in errors
    flaw: Damage | None = None  # the damaged version if the bytes are wrong; None if damage ends the merge
    coded: StoredFragment | None = None

    @property
    def stored_bytes(self) -> int:
        """Bytes that reading the block once reads, including the base of a difference."""
        return self.nbytes if self.coded is None else self.coded.nbytes


@dataclass(frozen=True, eq=False)
class Extent:
    """Elements [start, stop) of a flattened (fqn, slot), from byte ``offset`` of a block, little-endian.

    ``dtype`` is a safetensors name. Implements :class:`store.fragments.Span`."""

    fqn: str
    slot: str
    start: int
    stop: int
    dtype: str
    block: Block
    offset: int
    box: ClassVar[None] = None  # all of a tensor that is stored in boxes is one extent

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * itemsize(self.dtype)

    def require_inside_block(self) -> None:
        """Raise DamagedError unless the block holds all elements: those beyond it would become zeros unnoticed."""
        end = self.offset + self.nbytes
        if self.offset < 0 or end > self.block.nbytes:
            raise DamagedError(
                f"{self.fqn}/{self.slot}: elements {self.start} to {self.stop} do not lie in {self.block.name} of "
                f"{self.block.path}: they would end at byte {end} of {self.block.nbytes}"
            )


def read_chunks(block: Block, buffer: memoryview) -> Iterator[tuple[int, int]]:
    """Fill ``buffer`` with one chunk after another of a block that is stored as is, and yield its (begin, end).

    Raises DamagedError at the end if the bytes do not match the checksum; StorageError."""
    running = block.checksum()
    for begin in range(0, block.nbytes, len(buffer) or 1):
        chunk = buffer[: min(len(buffer), block.nbytes - begin)]
        try:
            block.files.read_into(block.path, block.offset + begin, chunk)
        except OSError as error:  # must not be taken for an error of the output
            raise StorageError(f"{block.name}: cannot read {block.path}: {error.strerror or error}") from error
        running.update(chunk)
        yield begin, begin + len(chunk)
    if running.hexdigest() != block.digest:
        raise DamagedError(
            f"{block.name}: bytes {block.offset} to {block.offset + block.nbytes} of {block.path} do not match their "
            "checksum"
        )
