"""Read blocks as streams for an import: front to back, once, cut into fragments, checked at their end.

Fragments must be drawn in the given order, one after another, by one thread. Memory holds one chunk, and the decoder's
chunks if a block is decoded. A block's bytes are known to be correct only when its last fragment is drawn to the end;
nothing made of them is complete before."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from merger.io.blocks import Block, BlockPass, Extent, Progress
from merger.io.transfer import is_checked
from merger.tensors import Implausible, implausible_values, torch_dtype, whole_elements
from store.errors import DamagedError

FRAGMENT_BYTES = 1 << 25  # largest fragment: a rank that needs a part of a tensor reads whole fragments


@dataclass(frozen=True)
class FragmentStream:
    """At most ``FRAGMENT_BYTES`` of an extent, read on demand. Implements :class:`store.segment.StreamedData`."""

    extent: Extent
    reading: "Reading"
    last: bool  # nothing of the reading follows it
    implausible: dict[tuple[str, str], set[Implausible]]  # gets the kinds by (fqn, slot); complete when the reading is

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
        if not is_checked(extent):
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
            found = next(self._chunks, None)
            if found is None:
                raise DamagedError(
                    f"{self._block.name} of {self._block.path} ends at byte {self._position} of {self._block.nbytes}"
                )
            self._chunk = found
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
    extents: Iterable[Extent], progress: Progress, implausible: dict[tuple[str, str], set[Implausible]] | None = None
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
            small = [piece for extent in run for piece in _cut(extent)]
            found += [FragmentStream(piece, reading, piece is small[-1], implausible) for piece in small]
    return found


def bytes_to_read(streams: Iterable[FragmentStream]) -> int:
    """Return the bytes that drawing all streams reads: every block whole, mostly once, with the bases."""
    return sum(stream.extent.block.stored_bytes for stream in streams if stream.last)


def _without_overlaps(extents: Sequence[Extent]) -> list[list[Extent]]:
    """Group extents into runs without overlaps: one, unless two names share the same bytes."""
    runs: list[list[Extent]] = []
    for extent in sorted(extents, key=lambda extent: extent.offset):
        free = (run for run in runs if run[-1].offset + run[-1].nbytes <= extent.offset)
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
