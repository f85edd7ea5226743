"""Describe the bytes that a merge reads: blocks, each with a checksum, and the extents that lie in them.

This is all that the rest of the merger sees of tensors in a source, be it a store or a framework's own files.
Encoded, packed or delta fragments of a store are blocks that are decoded chunk by chunk while they are read, each
stored byte once, so memory does not grow with a fragment."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash
from isal import isal_zlib

from store.encoding import CHUNK, itemsize
from store.errors import DamagedError, MissingError, StorageError, UnreachableError
from store.fragments import Copy, FragmentIndex, FragmentReader, Readable, Source
from store.names import Box, Fragment
from store.resolve import RejectedVersion
from store.schema import digest

READ = 1 << 22  # bytes read at a time: enough for the device, few enough for a processor's cache
Progress = Callable[[int], None]  # called with the number of stored bytes just read
_CHUNKS_PER_PASS = 14  # most in memory, measured: stored, unpacked, decoded, the base's, and malloc's reserve


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


xxh3: Callable[[], RunningHash] = xxhash.xxh3_128  # the checksum of stores


@dataclass(frozen=True)
class Damage:
    """A damaged version of a unit and its store; an older version can be used instead."""

    store: Path
    bad: RejectedVersion


@dataclass(frozen=True)
class StoredFragment:
    """An encoded fragment of the store at ``root``: stored bytes that decode to a block."""

    files: Readable
    source: Source
    root: Path

    @property
    def nbytes(self) -> int:
        """Stored bytes that a pass reads: its own and those of its base, which each difference to it reads again."""
        return sum(one.entry.nbytes for one in (self.source, self.source.base) if one is not None)

    @property
    def memory(self) -> int:
        """Most bytes of memory that one pass takes."""
        return _CHUNKS_PER_PASS * min(CHUNK, self.source.entry.numel) * itemsize(self.source.dtype)


@dataclass(frozen=True)
class Boxes:
    """All boxes of a tensor, which a pass puts together in memory by ``copies``; else as :class:`StoredFragment`."""

    copies: "Sequence[Copy[Extent]]"
    nbytes: int
    memory: int


@dataclass
class BlockPass:
    """One pass over a block. Belongs to one thread."""

    progress: Progress
    flaw: Damage | None = None  # after an error: the fragment's version, or its base's if the base's bytes are wrong

    def pieces(self, block: "Block") -> Iterator[memoryview]:
        """Yield the block's bytes in order, in pieces that are valid until the next; of whole elements if ``coded``.

        Raises DamagedError, perhaps after the last piece, if the stored bytes are wrong; StorageError."""
        self.flaw = block.flaw
        if isinstance(block.coded, Boxes):
            yield from self._put_together(block.coded.copies)
        elif block.coded is not None:
            yield from self._decoded(block.coded)
        else:
            buffer = memoryview(bytearray(min(READ, block.nbytes)))
            for begin, end in read_chunks(block, buffer):
                self.progress(end - begin)
                yield buffer[: end - begin]

    def _put_together(self, copies: "Sequence[Copy[Extent]]") -> Iterator[memoryview]:
        size = itemsize(copies[0].source.dtype)
        whole = np.empty(sum(copy.numel for copy in copies) * size, np.uint8)
        for _, group in groupby(copies, lambda copy: id(copy.source)):
            own, values = list(group), bytearray()
            for piece in self.pieces(own[0].source.block):
                values += piece
            for copy in own:
                copy.place(np.frombuffer(values, np.uint8)[copy.source.offset :], whole, size)
        for start in range(0, len(whole), CHUNK * size):
            yield whole[start : start + CHUNK * size].data

    def _decoded(self, coded: StoredFragment) -> Iterator[memoryview]:
        entry, own = coded.source.entry, coded.source.part.save
        reader = FragmentReader(_CountingFiles(coded.files, self.progress), coded.source)
        try:
            for values in reader.chunks():
                yield values.view(np.uint8).data
        except UnreachableError:
            raise
        except (DamagedError, StorageError) as error:
            self.flaw = Damage(coded.root, RejectedVersion(reader.at_fault, entry.unit))
            kind = next(kind for kind in (DamagedError, MissingError, StorageError) if isinstance(error, kind))
            fate = {DamagedError: "is damaged", MissingError: "is gone", StorageError: "cannot be read"}[kind]
            where = f"{entry.unit} of save {own}, elements {entry.start} to {entry.stop} of {entry.fqn}"
            where += "" if reader.at_fault == own else f", the difference to save {reader.at_fault}, which {fate}"
            raise kind(f"{where}: {error}") from error


class _CountingFiles:
    """Files that report the bytes read."""

    def __init__(self, files: Readable, progress: Progress) -> None:
        self._files, self._progress = files, progress

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        self._files.read_into(path, offset, target)
        self._progress(len(target))


@dataclass(frozen=True, eq=False)
class Block:
    """``nbytes`` bytes from ``offset`` of a file, correct if ``checksum`` over all of them gives ``digest``."""

    files: Readable
    path: str
    offset: int
    nbytes: int
    checksum: Callable[[], RunningHash]
    digest: str
    name: str  # name in errors
    flaw: Damage | None = None  # the damaged version if the bytes are wrong; None if damage ends the merge
    coded: StoredFragment | Boxes | None = None  # makes ``nbytes`` bytes from those stored, of which ``digest`` is

    @property
    def stored_bytes(self) -> int:
        """Bytes that reading the block once reads, including the base of a difference."""
        return self.nbytes if self.coded is None else self.coded.nbytes


@dataclass(frozen=True, eq=False)
class Extent:
    """Elements [start, stop) of a flattened (fqn, slot), or a box, from byte ``offset`` of a block, little-endian.

    ``dtype`` is a safetensors name. Implements :class:`store.fragments.Span`."""

    fqn: str
    slot: str
    start: int
    stop: int
    dtype: str
    block: Block
    offset: int
    box: Box | None = None  # in a checkpoint None: see `put_together`

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


def put_together(extents: Sequence[Extent]) -> Sequence[Extent]:
    """Return flat ranges as they are; if any is a box, all of the tensor as one extent, put together when it is read.

    Raises DamagedError if they do not fill the tensor, each element once, in one dtype, or lie outside their blocks."""
    box = next((extent.box for extent in extents if extent.box is not None), None)
    if box is None:
        return extents
    first = extents[0]
    for extent in extents:
        extent.require_inside_block()
    if any(extent.dtype != first.dtype for extent in extents):
        raise DamagedError(f"{first.fqn}/{first.slot} is stored in two dtypes at once")
    blocks, numel = [extent.block for extent in extents], prod(box.shape)
    copies = FragmentIndex(extents).cover(Fragment(first.fqn, first.slot, 0, numel))
    nbytes = numel * itemsize(first.dtype)
    memory = max(0 if block.coded is None else block.coded.memory for block in blocks) + 3 * nbytes
    known = digest("".join(block.digest for block in blocks).encode())
    coded = Boxes(copies, sum(block.stored_bytes for block in blocks), memory)
    block = replace(first.block, nbytes=nbytes, digest=known, coded=coded)
    return [replace(first, start=0, stop=numel, offset=0, box=None, block=block)]


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
