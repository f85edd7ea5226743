"""Blocks of a source as streams: read front to back, once, checked at their end, and cut into fragments on the way.

Whoever writes the fragments draws them in the order given, one after another; memory holds one chunk, and what
decoding takes where a block has to be decoded. The bytes of
a block are known to be right only when its last fragment has been drawn to the end: until then nothing made of them
may be called complete. One thread. It does not know what is written, nor where.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from merger.io.blocks import Block, Extent, Progress
from merger.tensors import torch_dtype
from store.errors import DamagedError, StorageError

CHUNK = 1 << 22
"""Bytes read at a time."""

FRAGMENT_BYTES = 1 << 25
"""Largest fragment: a rank that needs a part of a tensor reads every fragment that the part touches whole."""


@dataclass(frozen=True)
class FragmentStream:
    """An extent, at most ``FRAGMENT_BYTES`` large, as bytes that come while they are written.

    A :class:`store.segment.Produced`. last: nothing of the reading follows it.
    """

    extent: Extent
    reading: Reading
    last: bool

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return _nbytes(self.extent)

    @property
    def exact(self) -> bool:
        return True

    def pieces(self) -> Iterator[memoryview]:
        """See :class:`store.segment.Produced`. DamagedError for a block that does not match its checksum."""
        self.reading.go_to(self.extent.offset)
        left = self.nbytes
        while left:
            piece = self.reading.take(left)
            left -= len(piece)
            yield piece
        if self.last:
            self.reading.finish()


class Reading:
    """One pass over a block."""

    def __init__(self, block: Block, progress: Progress) -> None:
        self._block = block
        self._chunks = _stored(block, progress) if block.coded is None else block.coded.decoding(progress).pieces()
        self._position = 0
        self._chunk = memoryview(b"")

    def take(self, most: int) -> memoryview:
        """The next bytes: at least one, at most ``most``; they stand still until the next call."""
        if not len(self._chunk):
            self._chunk = self._next()
        piece, self._chunk = self._chunk[:most], self._chunk[most:]
        self._position += len(piece)
        return piece

    def go_to(self, offset: int) -> None:
        """Skip to byte ``offset`` of the block; what is skipped counts for the checksum."""
        if offset < self._position:
            raise ValueError(f"{self._block.name}: byte {offset} has gone by")
        while self._position < offset:
            self.take(offset - self._position)

    def finish(self) -> None:
        """Read what is left. DamagedError unless all of the block is what was written."""
        self.go_to(self._block.nbytes)
        self._chunk = memoryview(b"")
        if next(self._chunks, None) is not None:  # asking for more is what has the whole checked
            raise DamagedError(f"{self._block.name} of {self._block.path} does not end at byte {self._block.nbytes}")
        self._chunks = iter(())

    def _next(self) -> memoryview:
        found = next(self._chunks, None)
        if found is None:
            raise DamagedError(
                f"{self._block.name} of {self._block.path} ends at byte {self._position}, and more is to be in it"
            )
        return found


def _stored(block: Block, progress: Progress) -> Iterator[memoryview]:
    """The chunks of a block whose bytes are stored as they are. DamagedError at its end where they are not right."""
    running = block.checksum()
    buffer = memoryview(bytearray(min(CHUNK, block.nbytes)))
    for begin in range(0, block.nbytes, CHUNK):
        chunk = buffer[: min(CHUNK, block.nbytes - begin)]
        try:
            block.files.read_into(block.path, block.offset + begin, chunk)
        except OSError as error:  # of a reader that does not tell it in our words
            raise StorageError(f"{block.name}: cannot read {block.path}: {error.strerror or error}") from error
        running.update(chunk)
        progress(len(chunk))
        yield chunk
    if running.hexdigest() != block.digest:
        raise DamagedError(
            f"{block.name}: bytes {block.offset} to {block.offset + block.nbytes} of {block.path} do not match "
            "their checksum"
        )


def fragment_streams(extents: Iterable[Extent], progress: Progress) -> list[FragmentStream]:
    """All extents with elements, cut small, in the order in which they have to be drawn.

    DamagedError where an extent is not inside its block.
    """
    by_block: dict[Block, list[Extent]] = {}
    for extent in extents:
        _require_inside(extent)
        if extent.stop > extent.start:
            by_block.setdefault(extent.block, []).append(extent)
    found: list[FragmentStream] = []
    for block in sorted(by_block, key=lambda block: (block.path, block.offset)):
        for run in _without_overlaps(by_block[block]):
            reading = Reading(block, progress)
            small = [piece for extent in run for piece in _cut(extent)]
            found += [FragmentStream(piece, reading, last=piece is small[-1]) for piece in small]
    return found


def bytes_to_read(found: Iterable[FragmentStream]) -> int:
    """Bytes that drawing all of them reads: every block whole, mostly once, and with each difference its base."""
    return sum(flow.extent.block.stored_bytes for flow in found if flow.last)


def _nbytes(extent: Extent) -> int:
    return (extent.stop - extent.start) * torch_dtype(extent.dtype).itemsize


def _require_inside(extent: Extent) -> None:
    if extent.offset < 0 or extent.offset + _nbytes(extent) > extent.block.nbytes:
        raise DamagedError(
            f"{extent.fqn}/{extent.slot}: elements {extent.start} to {extent.stop} do not lie in {extent.block.name}"
        )


def _without_overlaps(extents: Sequence[Extent]) -> list[list[Extent]]:
    """Runs of extents that follow one another. One, but where two names share the same bytes."""
    runs: list[list[Extent]] = []
    for extent in sorted(extents, key=lambda extent: extent.offset):
        free = (run for run in runs if run[-1].offset + _nbytes(run[-1]) <= extent.offset)
        run = next(free, None)
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
