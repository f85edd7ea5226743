"""Describe the bytes that a merge or an import reads: blocks, each with a checksum, and extents that lie in them.

This is all that the rest of the merger sees of tensors in a source, be it a store or a framework's own files.
Encoded, packed or delta fragments of a store are blocks that are decoded chunk by chunk while they are read, each
stored byte once, so memory does not grow with a fragment.

An import reads blocks as streams: front to back, once, cut into fragments, which must be drawn in the given order, one
after another, by one thread. Memory holds one chunk, and the decoder's chunks if a block is decoded. A block's bytes
are known to be correct only when its last fragment is drawn to the end; nothing made of them is complete before."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import xxhash
from isal import isal_zlib

from merger.tensors import Implausibles, implausible_values, torch_dtype, whole_elements
from store.encoding import CHUNK, itemsize
from store.errors import DamagedError, MissingError, StorageError, UnreachableError
from store.fragments import FragmentIndex, FragmentReader, Readable, Source
from store.names import BUFFER, Box, Fragment
from store.resolve import RejectedVersion
from store.schema import digest

READ = 1 << 22  # bytes read at a time: enough for the device, few enough for a processor's cache
FRAGMENT_BYTES = 1 << 25  # largest fragment: a rank that needs a part of a tensor reads whole fragments
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
        return sum(one.entry.nbytes for one in self.source.chain())

    @property
    def memory(self) -> int:
        """Most bytes of memory that one pass takes."""
        return _CHUNKS_PER_PASS * min(CHUNK, self.source.entry.numel) * itemsize(self.source.dtype)


ReadExtents = Callable[["Sequence[Extent]"], bytearray]  # reads the values of extents that are whole blocks, in order


@dataclass(frozen=True)
class Computed:
    """Bytes that a pass computes from those of other blocks by ``values``; else as :class:`StoredFragment`."""

    values: Callable[[ReadExtents], Iterator[memoryview]]
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
        if isinstance(block.coded, Computed):
            yield from block.coded.values(self._read)
        elif block.coded is not None:
            yield from self._decoded(block.coded)
        else:
            buffer = memoryview(bytearray(min(READ, block.nbytes)))
            for begin, end in read_chunks(block, buffer):
                self.progress(end - begin)
                yield buffer[: end - begin]

    def _read(self, extents: "Sequence[Extent]") -> bytearray:
        values = bytearray()
        for extent in extents:
            for piece in self.pieces(extent.block):
                values += piece
        return values

    def _decoded(self, coded: StoredFragment) -> Iterator[memoryview]:
        entry, save = coded.source.entry, coded.source.part.save
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
            where = f"{entry.unit} of save {save}, elements {entry.start} to {entry.stop} of {entry.fqn}"
            where += "" if reader.at_fault == save else f", the difference to save {reader.at_fault}, which {fate}"
            raise kind(f"{where}: {error}") from error


class _CountingFiles:
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
    coded: StoredFragment | Computed | None = None  # makes ``nbytes`` bytes from those stored, of which ``digest`` is

    @property
    def stored_bytes(self) -> int:
        """Bytes that reading the block once reads, including the base of a difference."""
        return self.nbytes if self.coded is None else self.coded.nbytes


@dataclass(frozen=True, eq=False)
class Extent:
    """Elements of a (fqn, slot), little-endian, from byte ``offset`` of a block: a :class:`store.fragments.Span`."""

    fqn: str
    slot: str
    start: int
    stop: int
    dtype: str  # safetensors name
    block: Block
    offset: int
    box: Box | None = None  # in a checkpoint None: see `put_together`

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * itemsize(self.dtype)

    @property
    def is_checked(self) -> bool:
        """Whether values are checked: of foreign files, which no saver checked, but no buffers, such as masks."""
        return self.block.flaw is None and self.slot != BUFFER

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

    def values(read: ReadExtents) -> Iterator[memoryview]:
        size = itemsize(first.dtype)
        whole = np.empty(nbytes, np.uint8)
        for _, group in groupby(copies, lambda copy: id(copy.source)):
            of_source = list(group)
            stored = np.frombuffer(read([of_source[0].source]), np.uint8)
            for copy in of_source:
                copy.place(stored[copy.source.offset :], whole, size)
        for start in range(0, nbytes, CHUNK * size):
            yield whole[start : start + CHUNK * size].data

    known = digest("".join(block.digest for block in blocks).encode())
    coded = Computed(values, sum(block.stored_bytes for block in blocks), memory)
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


@dataclass(frozen=True)
class FragmentStream:
    """At most ``FRAGMENT_BYTES`` of an extent, read on demand. Implements :class:`store.segment.StreamedData`."""

    extent: Extent
    reading: "Reading"
    last: bool  # nothing of the reading follows it
    implausible: Implausibles  # gets the kinds by (fqn, slot); complete when the reading is

    @property
    def nbytes(self) -> int:
        return self.extent.nbytes

    @property
    def exact(self) -> bool:
        return True

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes. DamagedError if the block does not match its checksum."""
        self.reading.go_to(self.extent.offset)
        left, rest = self.nbytes, b""
        while left:
            piece = self.reading.take(left)
            left -= len(piece)
            rest = self._check(rest, piece)
            yield piece
        if self.last:
            self.reading.finish()

    def _check(self, rest: bytes, piece: memoryview) -> bytes:
        extent, dtype = self.extent, torch_dtype(self.extent.dtype)
        if not extent.is_checked:
            return b""
        data, rest = whole_elements(rest, piece, dtype.itemsize)
        if data and (kinds := implausible_values(torch.frombuffer(data, dtype=dtype), extent.slot)):
            self.implausible.setdefault((extent.fqn, extent.slot), set()).update(kinds)
        return rest


class Reading:
    """One pass over a block."""

    def __init__(self, block: Block, progress: Progress) -> None:
        self._block = block
        self._chunks = BlockPass(progress).pieces(block)
        self._position, self._chunk = 0, memoryview(b"")

    def take(self, most: int) -> memoryview:
        """Return the next bytes: at least one, at most ``most``; valid until the next call."""
        if not len(self._chunk):
            chunk = next(self._chunks, None)
            if chunk is None:
                raise DamagedError(
                    f"{self._block.name} of {self._block.path} ends at byte {self._position} of {self._block.nbytes}"
                )
            self._chunk = chunk
        piece, self._chunk = self._chunk[:most], self._chunk[most:]
        self._position += len(piece)
        return piece

    def go_to(self, offset: int) -> None:
        """Skip to byte ``offset`` of the block; skipped bytes count for the checksum."""
        if offset < self._position:
            raise ValueError(f"{self._block.name}: byte {offset} was already read; draw fragments in order")
        while self._position < offset:
            self.take(offset - self._position)

    def finish(self) -> None:
        """Read the rest. DamagedError unless all of the block is correct."""
        self.go_to(self._block.nbytes)
        self._chunk = memoryview(b"")
        if next(self._chunks, None) is not None:  # the checksum is compared when the chunks end
            raise DamagedError(f"{self._block.name} of {self._block.path} does not end at byte {self._block.nbytes}")


def fragment_streams(
    extents: Iterable[Extent], progress: Progress, implausible: Implausibles | None = None
) -> list[FragmentStream]:
    """Cut all extents with elements into fragments, in the order in which they must be drawn.

    ``implausible``: as in :class:`FragmentStream`. Raises DamagedError if an extent is not inside its block."""
    implausible = {} if implausible is None else implausible
    by_block: dict[Block, list[Extent]] = {}
    for extent in extents:
        extent.require_inside_block()
        if extent.stop > extent.start:
            by_block.setdefault(extent.block, []).append(extent)
    found: list[FragmentStream] = []
    for block in sorted(by_block, key=lambda block: (block.path, block.offset)):
        for run in _without_overlaps(by_block[block]):
            reading = Reading(block, progress)
            pieces = [piece for extent in run for piece in _cut(extent)]
            found += [FragmentStream(piece, reading, piece is pieces[-1], implausible) for piece in pieces]
    return found


def bytes_to_read(streams: Iterable[FragmentStream]) -> int:
    """Return the bytes that drawing all streams reads: every block whole, mostly once, with the bases."""
    return sum(stream.extent.block.stored_bytes for stream in streams if stream.last)


def _without_overlaps(extents: Sequence[Extent]) -> list[list[Extent]]:
    """Group extents into runs without overlaps: one, unless two names share the same bytes."""
    runs: list[list[Extent]] = []
    for extent in sorted(extents, key=lambda extent: extent.offset):
        run = next((run for run in runs if run[-1].offset + run[-1].nbytes <= extent.offset), None)
        if run is None:
            runs.append([extent])
        else:
            run.append(extent)
    return runs


def _cut(extent: Extent) -> Iterator[Extent]:
    size = torch_dtype(extent.dtype).itemsize
    step = max(1, FRAGMENT_BYTES // size)
    for start in range(extent.start, extent.stop, step):
        stop, offset = min(start + step, extent.stop), extent.offset + (start - extent.start) * size
        yield replace(extent, start=start, stop=stop, offset=offset)
