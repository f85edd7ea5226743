"""Read the fragments that a rank needs, check them, and load them into the live tensors.

Reading intersects stored fragments with live ones, so another world size, ZeRO stage or framework is no special case.
Nothing live changes before :meth:`ReadResult.load`. Damaged fragments are reported to the caller, which falls back."""

import ctypes
import mmap
import os
import sys
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from monitor.adapters.base import FragmentPlace, Piece
from monitor.adapters.module_tensors import as_bytes, torch_dtype
from store.errors import DamagedError, MissingError, ModelMismatchError, StorageError, UnreachableError
from store.fragments import Copy, FragmentIndex, FragmentReader, Readable, ReadAhead, Source, byte_range, stored_slot
from store.location import Kind, mount_of
from store.names import BUFFER, FROZEN, RAW, WEIGHTS, Fragment, SaveId, payload_path
from store.resolve import RejectedVersion
from store.schema import digest
from store.segment import CHUNK_BYTES, read_chunks
from store.storage.local import Files, OpensFiles, fill

Slots = dict[str, dict[str, str]]  # fqn -> slot -> dtype as stored

T = TypeVar("T")

_SMALL = 1 << 18
"""Checked fragments up to these bytes stay in host memory: rereading costs more. Adjacent ones are read at once."""

_CHUNK = 1 << 22  # elements checked at once: the checks need several times the memory of their input
_LOADED_AT_ONCE = 1024  # small tensors

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of madvise(2), Linux 5.14
_THREADS = 2
_MOST_OPEN = 256

_REPEATABLE: frozenset[Kind | None] = frozenset({"local", "passing", "container"})
"""Filesystems that keep what was just read in the memory of this machine. Others may fetch it again."""


def encoding_loss(host: torch.Tensor, place: FragmentPlace) -> str | None:
    """Describe the loss of converting values to the live dtype; None if it holds all of them, NaN included.

    Rounding is described, as is a mask value that becomes infinite (:func:`_is_mask_value`). Raises ModelMismatchError
    if values would change otherwise: too large, fractions in an integer tensor, complex values in a real one."""
    if place.dtype == host.dtype:
        return None
    where = f"{place.fragment.fqn}/{place.fragment.slot}"
    chunks = (host[start : start + _CHUNK] for start in range(0, host.numel(), _CHUNK))
    losses = {_chunk_loss(chunk, place.dtype, place.fragment.slot == BUFFER) for chunk in chunks}
    if _Loss.CHANGED in losses:
        raise ModelMismatchError(
            f"{where}: values of {host.dtype} are too large for the live {place.dtype}, or of a kind that it cannot "
            "represent; resume with a wider dtype"
        )
    if _Loss.INFINITE in losses:
        return f"the extremes of {host.dtype} in {where} became infinite in {place.dtype}"
    return f"{where} was rounded from {host.dtype} to {place.dtype}" if _Loss.ROUNDED in losses else None


class _Loss(Enum):
    NONE, ROUNDED, INFINITE, CHANGED = range(4)


def _chunk_loss(host: torch.Tensor, dtype: torch.dtype, buffer: bool) -> _Loss:
    if host.is_complex():
        return _Loss.CHANGED
    live = host.to(dtype)
    back = live.to(host.dtype)
    lost = (back != host) & ~(back.isnan() & host.isnan())
    if not bool(lost.any()):
        return _Loss.NONE
    if not dtype.is_floating_point:
        return _Loss.CHANGED
    before, after = host[lost], live[lost]
    distorted = _is_distorted(before, after)
    if not bool(distorted.any()):
        return _Loss.ROUNDED
    only_masks = buffer and not bool((distorted & ~_is_mask_value(before, after)).any())
    return _Loss.INFINITE if only_masks else _Loss.CHANGED


def _is_distorted(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return where a value changed by more than rounding: became infinite or NaN, or was clipped."""
    wide, narrow = before.double(), after.double()
    clipped = (wide.abs() > 1) & (narrow.abs() < wide.abs() / 2)
    return (wide.isfinite() != narrow.isfinite()) | narrow.isnan() | clipped


def _is_mask_value(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return where a buffer holds the lowest or largest number of its dtype, which becomes infinite in the live dtype.

    Attention masks use that number. ``buffer.to(dtype)`` makes it infinite as well, so the live model would hold the
    same. It is reported and the state is not exact, since a softmax over -inf alone is NaN and one over equal finite
    numbers is not. Any other value that is too large, such as 1e6 in a running variance, is refused as in a weight."""
    if not before.is_floating_point():
        return torch.zeros_like(before, dtype=torch.bool)
    return (before.double().abs() == torch.finfo(before.dtype).max) & after.double().isinf()


class OpenPayloads:
    """Keeps payloads on this machine open while a resume reads them; those that are pruned meanwhile stay readable."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self._open: dict[str, int | None] = {}

    def __enter__(self) -> "OpenPayloads":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            if descriptor is not None:
                os.close(descriptor)

    def repeatable(self, path: str) -> bool:
        """Return whether a payload is open, on a filesystem where a second read soon after needs no transfer."""
        if path not in self._open:
            self._open[path] = self._opened(path) if len(self._open) < _MOST_OPEN else None
        return self._open[path] is not None

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset``. Raises DamagedError if the file ends early, StorageError. Any thread."""
        descriptor = self._open.get(path)
        if descriptor is None:
            self.files.read_into(path, offset, target)
        else:
            fill(descriptor, offset, target, path)

    def _opened(self, path: str) -> int | None:
        with suppress(DamagedError, StorageError):  # reading it raises them
            descriptor = self.files.open_file(path) if isinstance(self.files, OpensFiles) else None
            mount = None if descriptor is None else mount_of(f"/proc/self/fd/{descriptor}")
            if mount is not None and mount.kind in _REPEATABLE:
                return descriptor
            if descriptor is not None:
                os.close(descriptor)
        return None


@dataclass(frozen=True)
class CheckedValues:
    """Values whose bytes were verified, and that are read a second time, from the open payloads into the live tensor.

    The second read checks the hash again: bytes that changed in between do not pass."""

    payloads: OpenPayloads
    copies: Sequence[Copy[Source]]

    def load(self, tensor: torch.Tensor) -> None:
        """Fill a live tensor. After an error its values are undefined."""
        for copy in self.copies:
            target = tensor[copy.target_start : copy.target_start + copy.numel]
            read_with_retries(lambda: _fetch(self.payloads, copy, target))  # noqa: B023
        tensor[:0].zero_()  # autograd counts this as a change in place, and does not see the others


@dataclass(frozen=True)
class ReadResult:
    """The values that a rank needs, verified."""

    values: Mapping[Fragment, torch.Tensor | CheckedValues]
    """Values of each live fragment: 1-d in host memory, in the stored dtype, or still in the open payloads."""
    bad: frozenset[RejectedVersion]  # damaged or unreadable versions. If not empty, `values` must not be used
    notes: tuple[str, ...]  # slots that the store does not have
    rounded: tuple[str, ...]  # values that the live dtypes cannot hold

    def load(self, pieces: Iterable[Piece]) -> list[str]:
        """Fill the live tensors. Return notes on tensors that share memory with another one, and now have its values.

        Raises RuntimeError if values have no tensor."""
        live = [piece for piece in pieces if piece.fragment in self.values]
        if len(live) < len(self.values):
            raise RuntimeError(f"{len(self.values) - len(live)} of {len(self.values)} fragments have no live tensor")
        for device in {piece.tensor.device for piece in live if piece.tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # threads have other streams than the caller
        sharing = _sharing_memory(live)
        _in_threads(self._load, self._batches(live), threads=1 if sharing else _THREADS)
        with torch.no_grad():
            for _, tensor, target in live:
                if target is not None:
                    target.copy_(tensor.view(target.shape))
        return [
            f"{piece.fragment.fqn}/{piece.fragment.slot} shares memory with another tensor, whose values it now has"
            for piece in sharing
            if not self._is_loaded(piece)
        ]

    def _batches(self, pieces: Iterable[Piece]) -> Iterator[Sequence[Piece]]:
        small: list[Piece] = []
        for piece in pieces:
            if piece.tensor.nbytes <= _SMALL and not piece.tensor.is_inference():
                small.append(piece)
                continue
            yield [piece]
        yield from (small[start : start + _LOADED_AT_ONCE] for start in range(0, len(small), _LOADED_AT_ONCE))

    def _is_loaded(self, piece: Piece) -> bool:
        values, live = self.values[piece.fragment], piece.tensor
        if isinstance(values, CheckedValues):
            parts = ((as_bytes(live[c.target_start :][: c.numel].cpu()), c.source.entry) for c in values.copies)
            return all(digest(part) == entry.xxh3_128 for part, entry in parts)
        return torch.equal(values.to(live.dtype).view(torch.uint8), live.cpu().view(torch.uint8))

    def _load(self, pieces: Sequence[Piece]) -> None:
        targets, sources = [], []
        with torch.inference_mode() if pieces[0].tensor.is_inference() else torch.no_grad():
            for piece in pieces:
                values = self.values[piece.fragment]
                if isinstance(values, CheckedValues):
                    values.load(piece.tensor)
                elif values.data_ptr() != piece.tensor.data_ptr():  # a new slot may have taken over the memory
                    targets.append(piece.tensor)
                    sources.append(values)
            if targets:
                torch._foreach_copy_(targets, sources)


def _sharing_memory(pieces: Iterable[Piece]) -> list[Piece]:
    pieces = [piece for piece in pieces if piece.tensor.nbytes]
    starts = np.array([piece.tensor.data_ptr() for piece in pieces], np.int64)
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], (starts + np.array([piece.tensor.nbytes for piece in pieces], np.int64))[order]
    reached = np.maximum.accumulate(ends)  # largest end of each piece and those before it
    overlapping: set[int] = set()
    for place in np.flatnonzero(starts[1:] < reached[:-1]):
        overlapping |= {int(np.argmax(ends[: place + 1])), int(place) + 1}
    return [pieces[order[place]] for place in sorted(overlapping)]


def _in_threads(action: Callable[[T], None], items: Iterable[T], threads: int = _THREADS) -> None:
    """Call ``action`` with all items, in order, in a few threads, until one raises an error.

    Reading, hashing and copying release the interpreter's lock."""
    rest = deque(items)

    def run() -> None:
        while rest:
            try:
                item = rest.popleft()
            except IndexError:  # the other thread took the last one
                return
            try:
                action(item)
            except BaseException:
                rest.clear()
                raise

    with ThreadPoolExecutor(threads, "driftpoint-resume") as pool:
        for future in [pool.submit(run) for _ in range(threads)]:
            future.result()


class _Wanted(NamedTuple):
    """A live fragment to read, and the stored fragments that fill it."""

    place: FragmentPlace
    dtype: torch.dtype  # as stored
    copies: Sequence[Copy[Source]]
    again: bool  # whether it is only verified at first, and read a second time into the live tensor
    small: bool  # one whole stored fragment, which may be read with its neighbours
    span: tuple[str, int, int]  # payload, and where the first of ``copies`` begins and ends there

    @property
    def nbytes(self) -> int:
        return sum(copy.source.entry.nbytes for copy in self.copies)


def read_fragments(payloads: OpenPayloads, index: FragmentIndex[Source], places: Sequence[FragmentPlace]) -> ReadResult:
    """Read and verify the values of ``places``, in the order of the payloads.

    Raises ModelMismatchError if live dtypes cannot hold them, UnreachableError if the object store is not reached."""
    notes: list[str] = []
    stored = [_wanted(payloads, index, place, notes) for place in places]
    wanted = sorted((one for one in stored if one is not None), key=lambda one: one.span)
    reader = _Reader(payloads)
    _in_threads(reader.read_all, _halves(wanted))
    return ReadResult(reader.values, frozenset(reader.bad), tuple(notes), tuple(sorted(reader.rounded)))


def _wanted(
    payloads: OpenPayloads, index: FragmentIndex[Source], place: FragmentPlace, notes: list[str]
) -> _Wanted | None:
    stored = _stored_fragment(index, place.fragment, notes)
    if stored is None:
        return None
    parts, dtype = index.cover(stored), torch_dtype(index.dtype(stored.fqn, stored.slot) or "")
    large = stored.numel * dtype.itemsize > _SMALL
    again = (
        large
        and dtype == place.dtype
        and not place.new
        and all(_is_plain(copy) and payloads.repeatable(byte_range(copy.source)[0]) for copy in parts)
    )
    source = parts[0].source
    small = not large and len(parts) == 1 and dtype == place.dtype == torch_dtype(source.dtype) and _is_plain(parts[0])
    return _Wanted(place, dtype, parts, again, small, byte_range(source))


def _neighbours(run: Iterable[_Wanted]) -> Iterator[list[_Wanted]]:
    """Split a run into batches that are read at once: adjacent small fragments of one dtype, or a single one."""
    batch: list[_Wanted] = []
    for one in run:
        if batch:
            (path, first, _), (_, _, end), last = batch[0].span, batch[-1].span, batch[-1]
            follows = one.small and last.small and one.dtype == last.dtype and one.span[:2] == (path, end)
            if not follows or one.span[2] - first > CHUNK_BYTES:
                yield batch
                batch = []
        batch.append(one)
    if batch:
        yield batch


def _present_memory(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return new host memory with its pages present: one call for all pages costs less than a fault for each."""
    tensor = torch.empty(numel, dtype=dtype, device="cpu")
    if sys.platform == "linux" and tensor.nbytes > _SMALL:
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        nbytes = ctypes.c_size_t(tensor.data_ptr() + tensor.nbytes - first)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), nbytes, _POPULATE_WRITE)  # an older kernel refuses it
    return tensor


def _halves(wanted: Sequence[_Wanted]) -> list[Sequence[_Wanted]]:
    """Split into two runs of about equal bytes, one for each thread, because each thread reads ahead by itself."""
    ends = list(accumulate(one.nbytes for one in wanted))
    middle = bisect_left(ends, ends[-1] / 2) if ends else 0
    return [wanted[:middle], wanted[middle:]]


def _is_plain(copy: Copy[Source]) -> bool:
    entry = copy.source.entry
    return entry.encoding == RAW and entry.packing is None and copy.numel == entry.numel and copy.steps is None


def _stored_fragment(index: FragmentIndex[Source], fragment: Fragment, notes: list[str]) -> Fragment | None:
    """Return the fragment in the store that a live one needs; None and a note if its slot is not stored."""
    slot = stored_slot(index, fragment)
    if slot is None and fragment.slot in (WEIGHTS, FROZEN, BUFFER):
        raise ModelMismatchError(f"the store lists {fragment.fqn} but has no values of it")
    if slot is None:
        notes.append(f"{fragment.fqn}/{fragment.slot} is not in the store and keeps its initial value")
        return None
    return fragment if slot == fragment.slot else fragment._replace(slot=slot)


class _Reader:
    """Reads and verifies fragments. Any thread."""

    def __init__(self, payloads: OpenPayloads) -> None:
        self.values: dict[Fragment, torch.Tensor | CheckedValues] = {}
        self.bad: set[RejectedVersion] = set()
        self.rounded: set[str] = set()
        self._payloads = payloads
        self._failed = False

    def read_all(self, run: Sequence[_Wanted]) -> None:
        """Read fragments that follow each other, until another thread fails."""
        ahead = ReadAhead(self._payloads.files, (copy.source for one in run for copy in one.copies))
        scratch = bytearray(CHUNK_BYTES)
        try:
            for batch in _neighbours(run):
                if self._failed:
                    return
                ahead.reading(sum(one.nbytes for one in batch))
                for one in self._read_at_once(batch) if batch[0].small else batch:
                    self._read(one, scratch)
        except BaseException:
            self._failed = True
            raise

    def _read_at_once(self, batch: Sequence[_Wanted]) -> Sequence[_Wanted]:
        """Read and verify adjacent small fragments. Return those that failed, which must be read one by one."""
        path, first, _ = batch[0].span
        data = torch.empty(batch[-1].span[2] - first, dtype=torch.uint8, device="cpu")
        memory = data.numpy().data
        try:
            self._payloads.read_into(path, first, memory)
        except (DamagedError, StorageError):
            return batch
        failed = []
        parts = torch.split(data.view(batch[0].dtype), [one.place.fragment.numel for one in batch])
        for one, values in zip(batch, parts, strict=True):
            if digest(memory[one.span[1] - first : one.span[2] - first]) == one.copies[0].source.entry.xxh3_128:
                self.values[one.place.fragment] = values
            else:
                failed.append(one)
        return failed

    def _read(self, one: _Wanted, scratch: bytearray) -> None:
        host = one.place.memory
        if host is None or host.dtype != one.dtype:
            host = None if one.again else _present_memory(one.place.fragment.numel, one.dtype)
        if not all([self._fill(copy, host, one.dtype, scratch) for copy in one.copies]):  # noqa: C419 - all damaged ones
            return
        if host is None:
            self.values[one.place.fragment] = CheckedValues(self._payloads, one.copies)
            return
        if (loss := encoding_loss(host, one.place)) is not None:
            self.rounded.add(loss)
        self.values[one.place.fragment] = host

    def _fill(self, copy: Copy[Source], host: torch.Tensor | None, dtype: torch.dtype, scratch: bytearray) -> bool:
        if torch_dtype(copy.source.dtype) is not dtype:
            self.bad.add(RejectedVersion(copy.source.part.save, copy.source.entry.unit, why="stored in two dtypes"))
            return False
        fault, whole = _Fault(copy.source.part.save), copy
        target = None if host is None else host[copy.target_start : copy.target_start + copy.numel]
        if copy.steps is not None:  # elements that are not adjacent: first read the whole fragment into other memory
            whole = Copy(copy.source, 0, 0, copy.source.entry.numel)
            target = torch.empty(whole.numel, dtype=dtype, device="cpu")
        try:
            read_with_retries(lambda: _fetch(self._payloads, whole, target, fault, scratch))
            if whole is not copy and host is not None and target is not None:
                copy.place(target.view(torch.uint8).numpy(), host.view(torch.uint8).numpy(), dtype.itemsize)
        except UnreachableError:
            raise
        except (DamagedError, StorageError):
            self.bad.add(RejectedVersion(fault.save, copy.source.entry.unit))
            return False
        return True


@dataclass
class _Fault:
    """The save whose bytes are damaged: that of the fragment, or of its base."""

    save: SaveId


def _fetch(
    files: Readable,
    copy: Copy[Source],
    target: torch.Tensor | None,
    fault: _Fault | None = None,
    scratch: bytearray | None = None,
) -> None:
    """Read values into ``target``, on any device, and verify them. Without a target, only verify them, through
    ``scratch``: for copies that :func:`_is_plain`."""
    part, entry = copy.source.part, copy.source.entry
    if target is None or _is_plain(copy):
        memory = as_bytes(target) if target is not None and target.device.type == "cpu" else None
        path = payload_path(part.save, part.rank)
        for start, read in read_chunks(files, path, part.header_bytes, entry, memory, scratch=scratch):
            if target is not None and memory is None:
                target.view(torch.uint8)[start : start + len(read)].copy_(torch.frombuffer(read, dtype=torch.uint8))
        return
    reader, position = FragmentReader(files, copy.source), -copy.source_start
    direct = target.numel() == entry.numel and target.dtype == torch.float32 and target.device.type == "cpu"
    try:
        for chunk in reader.chunks(target.numpy() if direct else None):
            values = torch.from_numpy(chunk).view(target.dtype)
            first, after = max(0, -position), min(values.numel(), target.numel() - position)
            if first < after and values.data_ptr() != target[max(0, position) :].data_ptr():
                target[position + first : position + after] = values[first:after]
            position += values.numel()
    except (DamagedError, StorageError):
        if fault is not None:
            fault.save = reader.at_fault
        raise


def read_with_retries(attempt: Callable[[], T]) -> T:
    """Run ``attempt``, retrying storage errors twice. Missing files and unreachable object stores are not retried."""
    for pause in (0.1, 1.0):
        try:
            return attempt()
        except (MissingError, UnreachableError):
            raise
        except StorageError:
            time.sleep(pause)
    return attempt()
