"""Move every block once, in parallel.

CRC-32 of a run of bytes put together from the CRC-32s of its pieces, in whatever order they were written.

Finite values that another dtype cannot hold: found, and said with the way out. Pure.

Work spread over threads, of which the first error ends all. It does not know what the work is.

Moving tensors: every block of the sources is read once, front to back, checked, and put wherever it belongs.

A block goes through memory a chunk at a time, decoded where it has to be, so memory does not grow with a tensor, a
rank or a model. Whether a block was right is known only at its end; until everything is known to be right the output
has no name yet. Blocks are spread over threads; a thread holds one chunk, one more where a dtype changes, and what
decoding takes.
It does not know what a checkpoint or a layout is.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from isal import isal_zlib

from merger.io.blocks import Block, Damage, Decoding, Extent, Progress
from merger.io.output_file import Hole, OutFiles
from merger.tensors import memory_of, torch_dtype
from store.errors import DamagedError, MergeError, StorageError, UnreachableError, UsageError
from store.fragments import FragmentIndex

_NAMED = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes that ``--dtype`` takes, by what they hold."""

T = TypeVar("T")

CHUNK = 1 << 22
"""Bytes read at a time: enough for the device, small enough for a processor's cache."""

_TAIL = 16
"""Bytes of the chunk before that are kept: the beginning of an element that ends in this one. The largest dtype's."""


@dataclass(frozen=True, order=True)
class Piece:
    """``nbytes`` bytes from ``offset`` of a file have the CRC-32 ``crc``."""

    offset: int
    nbytes: int
    crc: int


def combined(offset: int, nbytes: int, pieces: Iterable[Piece]) -> int:
    """CRC-32 of the ``nbytes`` bytes from ``offset``; what no piece covers is zeros. Pieces must not overlap."""
    crc, position = 0, offset
    for piece in sorted(pieces):
        if piece.offset < position or piece.offset + piece.nbytes > offset + nbytes:
            raise MergeError(
                f"bytes {piece.offset} to {piece.offset + piece.nbytes} were written twice or in a wrong place"
            )
        crc = isal_zlib.crc32_combine(crc, crc_of_zeros(piece.offset - position), piece.offset - position)
        crc = isal_zlib.crc32_combine(crc, piece.crc, piece.nbytes)
        position = piece.offset + piece.nbytes
    rest = offset + nbytes - position
    return isal_zlib.crc32_combine(crc, crc_of_zeros(rest), rest)


def crc_of_zeros(nbytes: int) -> int:
    """CRC-32 of ``nbytes`` zero bytes, in a number of steps that grows with the logarithm."""
    crc, power, size = 0, isal_zlib.crc32(b"\0"), 1
    while nbytes:
        if nbytes & 1:
            crc = isal_zlib.crc32_combine(crc, power, size)
        power = isal_zlib.crc32_combine(power, power, size)
        nbytes >>= 1
        size <<= 1
    return crc


def overflow(name: str, before: torch.Tensor, after: torch.Tensor) -> Iterator[UsageError]:
    """The error for a cast of the elements ``name`` that lost a finite value; none where all are as finite as before.

    before, after: the same elements in two dtypes.
    """
    if not (before.is_floating_point() and after.is_floating_point()):
        return
    lost = ~_finite(after)
    if not lost.any() or not (lost := lost & _finite(before)).any():
        return
    value, largest = float(before[lost][0]), torch.finfo(after.dtype).max
    wider = [_text(dtype) for dtype in _NAMED if torch.finfo(dtype).max > largest]
    way = f"name --dtype {' or '.join(wider)}" if wider else "leave --dtype out"
    yield UsageError(
        f"{name} holds {value:g}, which {_text(after.dtype)} cannot (it ends at {largest:g}) and which would become "
        f"infinite: {way}"
    )


def _finite(values: torch.Tensor) -> torch.Tensor:
    # Dtypes of one byte have few operations of their own.
    return (values.float() if values.dtype.itemsize == 1 else values).isfinite()


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _StoppedError(Exception):
    """Something else ended the work; this is never the error to tell."""


def check_cancelled(stop: threading.Event) -> None:
    """Leave the work, by an exception that :func:`run_parallel` keeps to itself, where it was told to stop."""
    if stop.is_set():
        raise _StoppedError


def run_parallel(work: Callable[[T, threading.Event], None], items: Sequence[T], workers: int) -> None:
    """Run ``work`` on every item; the first error ends it and is raised.

    Work that takes long asks :func:`check_cancelled` now and then with the event that it is given, so that an error
    elsewhere, or Ctrl-C, need not wait for it. No thread is at work on return.
    """
    stop = threading.Event()

    def one(item: T) -> None:
        try:
            check_cancelled(stop)
            work(item, stop)
        except BaseException:
            stop.set()
            raise

    futures: list[Future[None]] = []
    with ThreadPoolExecutor(workers, initializer=_one_thread_each) as pool:
        try:
            futures.extend(pool.submit(one, item) for item in items)
            wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:
            stop.set()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=stop.is_set())
    errors = [future.exception() for future in futures if not future.cancelled()]
    for error in errors:
        if error is not None and not isinstance(error, _StoppedError):
            raise error


def _one_thread_each() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Move:
    """``nbytes`` bytes from ``start`` of a block, elements of ``source``, go to ``offset`` of a file as ``target``.

    finite: what to call the elements where finite ones must stay so, None where they need not.
    """

    start: int
    nbytes: int
    source: torch.dtype
    file: int
    offset: int
    target: torch.dtype
    finite: str | None = None


@dataclass(frozen=True)
class TransferPlan:
    """What is read and where it goes. moves: by block, sorted by where they start in it."""

    moves: Mapping[Block, Sequence[Move]]

    @property
    def bytes_to_read(self) -> int:
        """All blocks, each whole and once, and with each difference its base: as stored."""
        return sum(block.stored_bytes for block in self.moves)

    @property
    def memory(self) -> int:
        """Bytes that a thread takes at most."""
        decoding = max((block.coded.memory for block in self.moves if block.coded is not None), default=0)
        return 2 * CHUNK + decoding


def plan_transfer(index: FragmentIndex[Extent], holes: Iterable[tuple[int, Hole]]) -> TransferPlan:
    """The moves that fill (file number, hole) pairs.

    MergeError where a wanted element is in no extent, DamagedError where an extent is not inside its block.
    """
    moves: dict[Block, list[Move]] = {}
    for file, hole in holes:
        for placed in hole.stored.placed:
            try:
                copies = index.cover(placed.fragment)
            except DamagedError as error:
                raise MergeError(str(error)) from error
            for copy in copies:
                extent, source = copy.source, torch_dtype(copy.source.dtype)
                _require_inside(extent, source.itemsize)
                at = hole.offset + (placed.offset + copy.target_start) * hole.stored.dtype.itemsize
                start = extent.offset + copy.source_start * source.itemsize
                finite = extent.fqn if hole.stored.stays_finite else None
                move = Move(start, copy.numel * source.itemsize, source, file, at, hole.stored.dtype, finite)
                moves.setdefault(extent.block, []).append(move)
    for found in moves.values():
        found.sort(key=lambda move: move.start)
    return TransferPlan(moves)


def _require_inside(extent: Extent, itemsize: int) -> None:
    # What lies beyond would stay zero in the output, and its checksum would be right.
    end, block = extent.offset + (extent.stop - extent.start) * itemsize, extent.block
    if extent.offset < 0 or end > block.nbytes:
        raise DamagedError(
            f"{extent.fqn}/{extent.slot}: elements {extent.start} to {extent.stop} do not lie in {block.name} of "
            f"{block.path}: they would end at byte {end} of {block.nbytes}"
        )


@dataclass
class Transferred:
    """What came of a transfer. pieces: what was written, by file. flaws: versions that are not whole, and why."""

    pieces: dict[int, list[Piece]]
    flaws: dict[Damage, str]


def transfer(plan: TransferPlan, paths: Sequence[Path], workers: int, progress: Progress) -> Transferred:
    """Carry out a plan. Raises DamagedError, StorageError for a block that nothing can stand in for; OutputError;
    UsageError where a value that must stay finite does not.

    Goes on after a damaged version of a store, so that all damage is known at once.
    """
    result = Transferred({}, {})
    lock = threading.Lock()

    def move(block: Block, stop: threading.Event) -> None:
        def told(count: int) -> None:
            with lock:
                check_cancelled(stop)
                progress(count)

        decoding = None if block.coded is None else block.coded.decoding(told)
        chunks = _stored(block, told) if decoding is None else _decoded(decoding)
        try:
            pieces = _move_block(block, chunks, plan.moves[block], paths)
        except UnreachableError:
            raise
        except (DamagedError, StorageError) as error:
            flaw = block.flaw if decoding is None else decoding.flaw
            if flaw is None:
                raise
            with lock:
                result.flaws.setdefault(flaw, str(error))
            return
        with lock:
            for file, piece in pieces:
                result.pieces.setdefault(file, []).append(piece)

    blocks = sorted(plan.moves, key=lambda block: (block.path, block.offset))
    run_parallel(move, blocks, workers)
    return result


def checksums(pieces: Iterable[Piece], holes: Sequence[Hole]) -> dict[int, int]:
    """CRC-32 of every hole of a file, by its offset, from the pieces that were written.

    MergeError unless the pieces fill the holes just as planned.
    """
    found = sorted(pieces)
    starts = [piece.offset for piece in found]
    out, position = {}, 0
    for hole in sorted(holes, key=lambda hole: hole.offset):
        after = bisect_left(starts, hole.offset + hole.stored.nbytes)
        own, position = found[position:after], after
        _require_filled(hole, own)
        out[hole.offset] = combined(hole.offset, hole.stored.nbytes, own)
    combined(0, 0, found[position:])  # none is left over
    return out


def _require_filled(hole: Hole, pieces: Sequence[Piece]) -> None:
    written = sum(piece.nbytes for piece in pieces)
    wanted = sum(placed.fragment.numel for placed in hole.stored.placed) * hole.stored.dtype.itemsize
    if written < wanted:
        raise MergeError(f"{written} of {wanted} bytes were written to the tensor at byte {hole.offset}")


def check_hole(path: Path, hole: Hole, expected: int, stop: threading.Event | None = None) -> None:
    """Read a filled hole back. MergeError unless its bytes have the CRC-32 ``expected``."""
    crc, buffer = 0, memoryview(bytearray(min(CHUNK, hole.stored.nbytes)))
    with path.open("rb", buffering=0) as file:
        file.seek(hole.offset)
        left = hole.stored.nbytes
        while left:
            if stop is not None:
                check_cancelled(stop)
            count = file.readinto(buffer[: min(left, len(buffer))])
            if not count:
                break
            crc = isal_zlib.crc32(buffer[:count], crc)
            left -= count
    if left or crc != expected:
        raise MergeError(
            f"{path} does not read back as it was written: the storage under it is not to be trusted; check `dmesg`, "
            "or name an output directory elsewhere"
        )


@dataclass(frozen=True)
class _Chunk:
    """Bytes [begin, end) of a block: in ``buffer`` after ``front`` bytes, which are those before them in the block.

    Stands still until the next one is asked for."""

    buffer: torch.Tensor
    front: int
    begin: int
    end: int


def _move_block(
    block: Block, chunks: Iterable[_Chunk], moves: Sequence[Move], paths: Sequence[Path]
) -> list[tuple[int, Piece]]:
    """Write what ``chunks``, all of the block, are wanted for. Whatever they raise at their end counts as well."""
    pieces, first, position = [], 0, 0
    with ExitStack() as stack:
        sink = _Sink(OutFiles(paths))
        stack.callback(sink.files.close)
        for chunk in chunks:
            while first < len(moves) and moves[first].start + moves[first].nbytes <= chunk.begin:
                first += 1
            for i in range(first, len(moves)):
                if moves[i].start >= chunk.end:
                    break
                piece = sink.put(moves[i], chunk)
                if piece is not None:
                    pieces.append((moves[i].file, piece))
            position = chunk.end
    if position != block.nbytes:
        raise DamagedError(f"{block.name} of {block.path} came to {position} bytes instead of {block.nbytes}")
    if sink.overflows:
        raise sink.overflows[0]
    return pieces


def _stored(block: Block, progress: Progress) -> Iterator[_Chunk]:
    """A block whose bytes are stored as they are. DamagedError at its end where they are not right."""
    running = block.checksum()
    # The end of the chunk before stands in front of each, as if the two were one.
    buffer = torch.empty(_TAIL + min(CHUNK, block.nbytes), dtype=torch.uint8)
    for begin in range(0, block.nbytes, CHUNK):
        end = min(begin + CHUNK, block.nbytes)
        data = memory_of(buffer)[_TAIL : _TAIL + end - begin]
        _read(block, begin, data)
        running.update(data)
        yield _Chunk(buffer, _TAIL, begin, end)
        progress(end - begin)
        buffer[:_TAIL] = buffer[end - begin : end - begin + _TAIL].clone()
    if running.hexdigest() != block.digest:
        raise DamagedError(
            f"{block.name}: bytes {block.offset} to {block.offset + block.nbytes} of {block.path} do not match their "
            "checksum"
        )


def _decoded(decoding: Decoding) -> Iterator[_Chunk]:
    """A block whose bytes are decoded. Its pieces are of whole elements, so nothing is to be kept of the one before."""
    begin = 0
    for piece in decoding.pieces():
        yield _Chunk(torch.frombuffer(piece, dtype=torch.uint8), 0, begin, begin + len(piece))
        begin += len(piece)


def _read(block: Block, begin: int, target: memoryview) -> None:
    try:
        block.files.read_into(block.path, block.offset + begin, target)
    except OSError as error:  # of a reader that does not tell it in our words; never to be taken for the output's
        raise StorageError(f"{block.name}: cannot read {block.path}: {error.strerror or error}") from error


@dataclass(frozen=True)
class _Sink:
    """Where the elements of a block go. overflows: what did not stay finite and must; of a damaged block no news."""

    files: OutFiles
    overflows: list[UsageError] = field(default_factory=list)

    def put(self, move: Move, chunk: _Chunk) -> Piece | None:
        """Write the elements of a move that end in a chunk of the block."""
        size = move.source.itemsize
        first = max(0, (chunk.begin - move.start) // size)
        after = (min(move.start + move.nbytes, chunk.end) - move.start) // size
        if first >= after:
            return None
        data = chunk.buffer.narrow(0, move.start + first * size - chunk.begin + chunk.front, (after - first) * size)
        if move.source != move.target:
            data = self._cast(move, data)
        memory, offset = memory_of(data), move.offset + first * move.target.itemsize
        self.files.write(move.file, offset, memory)
        return Piece(offset, len(memory), isal_zlib.crc32(memory))

    def _cast(self, move: Move, data: torch.Tensor) -> torch.Tensor:
        # A view needs memory aligned to its dtype, which a place in a file need not be.
        data = data.clone() if data.storage_offset() % move.source.itemsize else data
        before = data.view(move.source)
        cast = before.to(move.target)
        if move.finite is not None and not self.overflows:
            self.overflows.extend(overflow(move.finite, before, cast))
        return cast.view(torch.uint8)
