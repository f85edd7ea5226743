"""Move tensors: read every block of the sources once, front to back, check it, and write each part where it belongs.

A block passes through memory piece by piece, decoded if necessary, so memory does not grow with a tensor, a rank or a
model. A block is known to be correct only at its end; the output has no name until all blocks are. Blocks are spread
over threads. A thread holds one piece, one more if a dtype changes, and the decoder's chunks."""

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from isal import isal_zlib

from merger.io.blocks import READ, Block, BlockPass, Damage, Extent, Progress
from merger.io.output_file import Hole, OutFiles, read_back_error
from merger.tensors import Implausibles, implausible_values, memory_of, torch_dtype, whole_elements
from store.errors import DamagedError, MergeError, StorageError, UnreachableError, UsageError
from store.fragments import FragmentIndex

_EXPORT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # dtypes that `--dtype` accepts


@dataclass(frozen=True)
class Move:
    """``nbytes`` bytes from ``start`` of a block, elements of ``source``, go to ``offset`` of a file as ``target``."""

    start: int
    nbytes: int
    source: torch.dtype
    file: int
    offset: int
    target: torch.dtype
    finite: str | None = None  # the elements' name if finite values must stay finite, else None
    checked: tuple[str, str] | None = None  # (fqn, slot) of elements to be checked for implausible values, else None


@dataclass(frozen=True)
class TransferPlan:
    """Moves by block, sorted by their start in it."""

    moves: Mapping[Block, Sequence[Move]]

    @property
    def bytes_to_read(self) -> int:
        """Stored bytes of all blocks, each whole and once, and the base of each difference with it."""
        return sum(block.stored_bytes for block in self.moves)

    @property
    def memory(self) -> int:
        """Most bytes that one thread takes."""
        return 2 * READ + max((block.coded.memory for block in self.moves if block.coded is not None), default=0)


def plan_transfer(index: FragmentIndex[Extent], holes: Iterable[tuple[int, Hole]]) -> TransferPlan:
    """Plan the moves that fill (file number, hole) pairs.

    Raises MergeError if no extent holds a needed element, DamagedError if an extent is not inside its block."""
    moves: dict[Block, list[Move]] = {}
    for file, hole in holes:
        for placed in hole.stored.placed:
            try:
                copies = index.cover(placed.fragment)
            except DamagedError as error:
                raise MergeError(str(error)) from error
            for copy in copies:
                extent, source = copy.source, torch_dtype(copy.source.dtype)
                extent.require_inside_block()
                at = hole.offset + (placed.offset + copy.target_start) * hole.stored.dtype.itemsize
                start = extent.offset + copy.source_start * source.itemsize
                finite = extent.fqn if hole.stored.stays_finite else None
                checked = (extent.fqn, extent.slot) if extent.is_checked else None
                move = Move(start, copy.numel * source.itemsize, source, file, at, hole.stored.dtype, finite, checked)
                moves.setdefault(extent.block, []).append(move)
    for found in moves.values():
        found.sort(key=lambda move: move.start)
    return TransferPlan(moves)


@dataclass(frozen=True, order=True)
class Piece:
    """``nbytes`` bytes from ``offset`` of a file, with their CRC-32."""

    offset: int
    nbytes: int
    crc: int


@dataclass
class TransferResult:
    """Result of a transfer."""

    pieces: dict[int, list[Piece]]  # written, by file
    flaws: dict[Damage, str]  # damaged versions with their errors
    implausible: Implausibles  # kinds of implausible values by (fqn, slot), of intact blocks


def transfer(plan: TransferPlan, paths: Sequence[Path], workers: int, progress: Progress) -> TransferResult:
    """Execute a plan. Continues after a damaged version of a store, so that all damage is found in one pass.

    Raises DamagedError or StorageError for a block without an older version to use, OutputError if the system refused
    to write, UsageError if a value that must stay finite does not."""
    result, lock = TransferResult({}, {}, {}), threading.Lock()

    def move(block: Block, stop: threading.Event) -> None:
        def report(count: int) -> None:
            with lock:
                check_cancelled(stop)
                progress(count)

        reading = BlockPass(report)
        try:
            pieces, implausible = _move_block(block, reading.pieces(block), plan.moves[block], paths)
        except UnreachableError:
            raise
        except (DamagedError, StorageError) as error:
            if reading.flaw is None:
                raise
            with lock:
                result.flaws.setdefault(reading.flaw, str(error))
            return
        with lock:
            for file, piece in pieces:
                result.pieces.setdefault(file, []).append(piece)
            for name, kinds in implausible.items():
                result.implausible.setdefault(name, set()).update(kinds)

    run_parallel(move, sorted(plan.moves, key=lambda block: (block.path, block.offset)), workers)
    return result


def _move_block(
    block: Block, read: Iterable[memoryview], moves: Sequence[Move], paths: Sequence[Path]
) -> tuple[list[tuple[int, Piece]], Implausibles]:
    """Write all moves of a block. Returns (pieces by file, implausible values).

    Errors that ``read`` raises at its end, after the last write, count as well."""
    pieces, first, position = [], 0, 0
    with closing(OutFiles(paths)) as files:
        sink = _Sink(files)
        for data in read:
            while first < len(moves) and moves[first].start + moves[first].nbytes <= position:
                first += 1
            for i in range(first, len(moves)):
                if moves[i].start >= position + len(data):
                    break
                piece = sink.put(moves[i], data, position)
                if piece is not None:
                    pieces.append((moves[i].file, piece))
            position += len(data)
    if position != block.nbytes:
        raise DamagedError(f"{block.name} of {block.path} decoded to {position} bytes instead of {block.nbytes}")
    if sink.overflows:
        raise sink.overflows[0]
    return pieces, sink.implausible


@dataclass(frozen=True)
class _Sink:
    """Writes elements of a block. ``overflows`` of casts and ``implausible`` values count only if it is intact."""

    files: OutFiles
    rests: dict[Move, bytes] = field(default_factory=dict)  # bytes so far of an element that ends in the next piece
    overflows: list[UsageError] = field(default_factory=list)
    implausible: Implausibles = field(default_factory=dict)

    def put(self, move: Move, read: memoryview, begin: int) -> Piece | None:
        """Write the elements of a move that end in what was ``read`` from byte ``begin`` of the block."""
        start, stop = max(move.start, begin), min(move.start + move.nbytes, begin + len(read))
        if start >= stop:
            return None
        first, cut = divmod(start - move.start, move.source.itemsize)
        rest = self.rests.pop(move) if cut else b""
        data, rest = whole_elements(rest, read[start - begin : stop - begin], move.source.itemsize)
        if rest:
            self.rests[move] = rest
        if not data:
            return None
        values = torch.frombuffer(data, dtype=move.source)
        if move.checked is not None and (kinds := implausible_values(values, move.checked[1])):
            self.implausible.setdefault(move.checked, set()).update(kinds)
        if move.source != move.target:
            cast = values.to(move.target)
            if move.finite is not None and not self.overflows:
                self.overflows.extend(overflow_errors(move.finite, values, cast))
            data = memory_of(cast)
        offset = move.offset + first * move.target.itemsize
        self.files.write(move.file, offset, data)
        return Piece(offset, len(data), isal_zlib.crc32(data))


def checksums(pieces: Iterable[Piece], holes: Sequence[Hole]) -> dict[int, int]:
    """Return the CRC-32 of every hole of a file by offset. MergeError unless the pieces fill the holes as planned."""
    found = sorted(pieces)
    starts = [piece.offset for piece in found]
    out, position = {}, 0
    for hole in sorted(holes, key=lambda hole: hole.offset):
        after = bisect_left(starts, hole.offset + hole.stored.nbytes)
        own, position = found[position:after], after
        written = sum(piece.nbytes for piece in own)
        planned = sum(placed.fragment.numel for placed in hole.stored.placed) * hole.stored.dtype.itemsize
        if written < planned:
            raise MergeError(f"only {written} of {planned} bytes were written to the tensor at byte {hole.offset}")
        out[hole.offset] = combine_crcs(hole.offset, hole.stored.nbytes, own)
    combine_crcs(0, 0, found[position:])  # raises if a piece is left over
    return out


def check_hole(path: Path, hole: Hole, expected: int, stop: threading.Event | None = None) -> None:
    """Read a filled hole back. MergeError unless its CRC-32 is ``expected``."""
    crc, buffer = 0, memoryview(bytearray(min(READ, hole.stored.nbytes)))
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
        raise read_back_error(path)


def combine_crcs(offset: int, nbytes: int, pieces: Iterable[Piece]) -> int:
    """Return the CRC-32 of ``nbytes`` bytes from ``offset``: pieces that must not overlap, zeros elsewhere."""
    crc, position = 0, offset
    for piece in sorted(pieces):
        if piece.offset < position or piece.offset + piece.nbytes > offset + nbytes:
            raise MergeError(f"bytes {piece.offset} to {piece.offset + piece.nbytes} were written twice, or outside")
        crc = isal_zlib.crc32_combine(crc, crc_of_zeros(piece.offset - position), piece.offset - position)
        crc = isal_zlib.crc32_combine(crc, piece.crc, piece.nbytes)
        position = piece.offset + piece.nbytes
    rest = offset + nbytes - position
    return isal_zlib.crc32_combine(crc, crc_of_zeros(rest), rest)


def crc_of_zeros(nbytes: int) -> int:
    """Return the CRC-32 of ``nbytes`` zero bytes: the initial register advanced by them, with the final inversion."""
    return isal_zlib.crc32_combine(0xFFFFFFFF, 0, nbytes) ^ 0xFFFFFFFF


def overflow_errors(name: str, before: torch.Tensor, after: torch.Tensor) -> Iterator[UsageError]:
    """Yield the error for a cast of the elements ``name`` that made a finite value infinite."""
    if not (before.is_floating_point() and after.is_floating_point()):
        return
    lost = ~_finite(after)
    if not lost.any() or not (lost := lost & _finite(before)).any():
        return
    value, largest = float(before[lost][0]), torch.finfo(after.dtype).max
    wider = [str(dtype).removeprefix("torch.") for dtype in _EXPORT_DTYPES if torch.finfo(dtype).max > largest]
    remedy = f"name --dtype {' or '.join(wider)}" if wider else "leave --dtype out"
    target = str(after.dtype).removeprefix("torch.")
    yield UsageError(f"{name} holds {value:g}, which {target} cannot hold (its largest value is {largest:g}): {remedy}")


def _finite(values: torch.Tensor) -> torch.Tensor:
    # Dtypes of one byte have few operations of their own.
    return (values.float() if values.dtype.itemsize == 1 else values).isfinite()


T = TypeVar("T")


class _CancelledError(Exception):
    """Ends a task because another one failed; never reported itself."""


def check_cancelled(stop: threading.Event) -> None:
    """Raise, in a task of :func:`run_parallel`, if the work was cancelled."""
    if stop.is_set():
        raise _CancelledError


def run_parallel(work: Callable[[T, threading.Event], None], items: Sequence[T], workers: int) -> None:
    """Run ``work`` on every item in threads; the first error cancels the rest and is raised.

    Long work calls :func:`check_cancelled` with its event now and then, so that neither an error elsewhere nor Ctrl-C
    waits for it. No thread is running on return."""
    stop = threading.Event()

    def one(item: T) -> None:
        try:
            check_cancelled(stop)
            work(item, stop)
        except BaseException:
            stop.set()
            raise

    futures: list[Future[None]] = []
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
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
        if error is not None and not isinstance(error, _CancelledError):
            raise error
