"""Blocks of a source as streams: read front to back, once, checked at their end, and cut into fragments on the way.

Whoever writes the fragments draws them in the order given, one after another; memory holds one chunk. The bytes of
a block are known to be right only when its last fragment has been drawn to the end: until then nothing made of them
may be called complete. One thread. It does not know what is written, nor where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from merger.blocks import Block, Extent
from merger.tensors import torch_dtype
from store.errors import DamagedError, StorageError

CHUNK = 1 << 22
"""Bytes read at a time."""

FRAGMENT_BYTES = 1 << 25
"""Largest fragment: a rank that needs a part of a tensor reads every fragment that the part touches whole."""

Progress = Callable[[int], None]
"""Told the number of stored bytes just read."""


@dataclass(frozen=True)
class Flow:
    """An extent, at most ``FRAGMENT_BYTES`` large, as bytes that come while they are written.

    A :class:`store.payload.Produced`. last: nothing of the reading follows it.
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
        """See :class:`store.payload.Produced`."""
        return True

    def pieces(self) -> Iterator[memoryview]:
        """See :class:`store.payload.Produced`. DamagedError for a block that does not match its checksum."""
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
        self._block, self._progress = block, progress
        self._running = block.checksum()
        self._position = 0
        self._buffer = self._chunk = memoryview(b"")

    def take(self, most: int) -> memoryview:
        """The next bytes: at least one, at most ``most``; they stand still until the next call."""
        if not len(self._chunk):
            self._read()
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
        """Read what is left. DamagedError unless all of the block matches its checksum."""
        block = self._block
        self.go_to(block.nbytes)
        self._buffer = self._chunk = memoryview(b"")
        if self._running.hexdigest() != block.digest:
            raise DamagedError(
                f"{block.name}: bytes {block.offset} to {block.offset + block.nbytes} of {block.path} do not match "
                "their checksum"
            )

    def _read(self) -> None:
        block, begin = self._block, self._position
        if begin == block.nbytes:
            raise DamagedError(f"{block.name} of {block.path} ends at byte {begin}, and more is to be in it")
        if not len(self._buffer):
            self._buffer = memoryview(bytearray(min(CHUNK, block.nbytes)))
        self._chunk = self._buffer[: min(len(self._buffer), block.nbytes - begin)]
        try:
            block.files.read_into(block.path, block.offset + begin, self._chunk)
        except OSError as error:  # of a reader that does not tell it in our words
            raise StorageError(f"{block.name}: cannot read {block.path}: {error.strerror or error}") from error
        self._running.update(self._chunk)
        self._progress(len(self._chunk))


def flows(extents: Iterable[Extent], progress: Progress) -> list[Flow]:
    """All extents with elements, cut small, in the order in which they have to be drawn.

    DamagedError where an extent is not inside its block.
    """
    by_block: dict[Block, list[Extent]] = {}
    for extent in extents:
        _require_inside(extent)
        if extent.stop > extent.start:
            by_block.setdefault(extent.block, []).append(extent)
    found: list[Flow] = []
    for block in sorted(by_block, key=lambda block: (block.path, block.offset)):
        for run in _without_overlaps(by_block[block]):
            reading = Reading(block, progress)
            small = [piece for extent in run for piece in _cut(extent)]
            found += [Flow(piece, reading, last=piece is small[-1]) for piece in small]
    return found


def bytes_to_read(found: Iterable[Flow]) -> int:
    """Bytes that drawing all of them reads: every block whole, mostly once."""
    return sum(flow.extent.block.nbytes for flow in found if flow.last)


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
