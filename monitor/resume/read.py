"""Check that a store matches the live job, and read the fragments that a rank needs into host memory.

Reading intersects the stored fragments with the live ones, so another world size, ZeRO stage or framework is no special
case. Live tensors are not changed. Damaged fragments are reported to the caller, which falls back.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import torch
import xxhash

from monitor.adapters.base import Adapter, FragmentPlace, Piece
from monitor.adapters.module_tensors import torch_dtype
from monitor.adapters.optimizer_state import NOT_STATE
from monitor.save.staging import as_bytes
from store.errors import DamagedError, MissingError, ModelMismatchError, StorageError, UnreachableError
from store.fragments import (
    Copy,
    FragmentIndex,
    FragmentReader,
    Readable,
    ReadAhead,
    Source,
    byte_range,
    stored_slot,
)
from store.layout import payload_path
from store.location import Kind, mount_of
from store.names import BUFFER, FROZEN, RAW, WEIGHTS, Fragment, SaveId
from store.resolve import RejectedVersion, Resolution
from store.schema import ManifestRecord
from store.segment import CHUNK_BYTES, read_chunks, read_entry
from store.storage.local import Files, OpenFile, OpensFiles
from store.text import listed

Slots = dict[str, dict[str, str]]  # fqn -> slot -> dtype as stored

T = TypeVar("T")

_OPTIMIZER_MARKERS = frozenset({"betas", "momentum", "alpha", "rho", "lr_decay", "etas", "lambd", "nesterov"})
"""Hyperparameters that distinguish kinds of optimizers, in all implementations."""

_CHUNK = 1 << 22  # elements checked at once: the checks need several times the memory of their input

_SMALL = 1 << 18
"""Plain fragments of at most these bytes stay in host memory once they are checked, since a read has a cost."""

_THREADS = 2
_MOST_OPEN = 256

_REPEATABLE: frozenset[Kind | None] = frozenset({"local", "passing", "container"})
"""Filesystems that keep what was just read in the memory of this machine. Others may fetch it again."""


def require_model(manifest: ManifestRecord, adapter: Adapter) -> None:
    """Raise ModelMismatchError unless store and model have the same tensors in the same shapes."""
    infos = adapter.tensors()
    live = {fqn: info.shape for fqn, info in infos.items()}
    stored = {fqn: record.shape for fqn, record in manifest.tensors.items()}
    resized = sorted(fqn for fqn in live.keys() & stored.keys() if live[fqn] != stored[fqn])
    differences = [
        *_difference("only in the store", stored.keys() - live.keys()),
        *_difference("only in this model", live.keys() - stored.keys()),
        *_difference("other shapes (store -> model)", [f"{fqn} {stored[fqn]} -> {live[fqn]}" for fqn in resized]),
    ]
    if not differences:
        return
    buffers = [fqn for fqn in resized if infos[fqn].kind == "buffer"]
    advice = "Set another `store:`, or fix the model"
    if buffers and buffers == resized and len(differences) == 1:
        advice = (
            f"Buffers that grow during training need their saved size: give {buffers[0]} the shape "
            f"{stored[buffers[0]]} before resume(), or register it with persistent=False and pass an object in "
            "state=[...] whose load_state_dict creates it"
        )
    raise ModelMismatchError("the store holds another model: " + "; ".join(differences) + ". " + advice)


def _difference(kind: str, names: Collection[str]) -> list[str]:
    return [f"{kind}: {listed(sorted(names))}"] if names else []


def require_slots(stored: Iterable[str], live: Iterable[str]) -> None:
    """Raise ModelMismatchError if stored and live optimizer slots differ, unless one of them has none.

    stored, live: slots over all ranks; the live ones as they will be after the load."""
    plain = {WEIGHTS, FROZEN, BUFFER}
    saved, needed = set(stored) - plain, set(live) - plain
    if saved != needed and saved and needed:
        raise ModelMismatchError(
            f"the store has optimizer state {sorted(saved)}, this optimizer needs {sorted(needed)}: "
            "resume with the optimizer of the run that saved it"
        )


def require_optimizer(saved: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    """Raise ModelMismatchError unless both are the same kind of optimizer, with hyperparameters of the same kinds.

    saved, live: results of :meth:`monitor.adapters.base.Adapter.run_state`."""
    if _markers(saved) != _markers(live):
        raise ModelMismatchError(
            f"the store has the state of optimizer {saved['optimizer']}, this job has {live['optimizer']}: "
            "use the same kind of optimizer, or set another `store:`"
        )
    # Where the live value is a tensor, the adapter checks the shape.
    numbers = {key for key, value in _hyper(live) if isinstance(value, bool | int | float)}
    for key, value in _hyper(saved):
        if key in numbers and not isinstance(value, bool | int | float | torch.Tensor | None):
            raise ModelMismatchError(
                f"the store has the hyperparameter {key} = {value!r}, which is a number in this optimizer: resume with "
                "the optimizer of the run that saved it"
            )


def _hyper(framework: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    return (item for group in framework["param_groups"] for item in group["hyper"].items())


def unused_state(saved: Mapping[str, Any], slots: Slots, adapter: Adapter) -> list[str]:
    """Return the parameters with stored optimizer state that the live optimizer does not hold. The same on all ranks.

    saved: the framework's run state in the store. Parameters without elements have nothing to lose."""
    held = {fqn for group in adapter.run_state()["param_groups"] for fqn in group["params"]}
    stored = {fqn for fqn, by_slot in slots.items() if by_slot.keys() - NOT_STATE}
    stored |= {fqn for fqn, scalars in (saved.get("scalars") or {}).items() if scalars}
    unused = stored - held
    return sorted(fqn for fqn, info in adapter.tensors().items() if fqn in unused and math.prod(info.shape) > 0)


def require_state_used(unused: Sequence[str]) -> None:
    """Raise ModelMismatchError if there are parameters whose stored optimizer state would be dropped."""
    if unused:
        raise ModelMismatchError(
            f"the store has optimizer state of {listed(unused)}, and this optimizer does not hold "
            f"{'that parameter' if len(unused) == 1 else 'these parameters'}, so it would be lost. If the run that was "
            "saved unfroze layers on its way, do the same (optimizer.add_param_group) before resume(); a parameter may "
            "be in a param group and stay frozen. To go on without that state, set `resume: {unused_state: drop}`"
        )


def _markers(framework: Mapping[str, Any]) -> set[str]:
    return {key for group in framework["param_groups"] for key in group["hyper"] if key in _OPTIMIZER_MARKERS}


def encoding_loss(host: torch.Tensor, place: FragmentPlace) -> str | None:
    """Describe the values that the live dtype cannot hold; None if it holds all of them, NaN included.

    Rounding is described, and so is a mask value that becomes infinite (see :func:`_is_mask_value`).

    Raises:
        ModelMismatchError: Values would change otherwise: too large, fractions in an integer tensor, complex values in
            a real tensor.
    """
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
    """Keeps payloads of this machine open while a resume reads them. Those that are removed meanwhile stay readable."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self._open: dict[str, OpenFile | None] = {}
        self._kinds: dict[int, Kind | None] = {}

    def __enter__(self) -> OpenPayloads:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            if file is not None:
                file.close()
        self._open.clear()

    def repeatable(self, path: str) -> bool:
        """Return whether a payload is open, on a filesystem where a second read soon after costs no transfer."""
        if path not in self._open:
            self._open[path] = self._opened(path)
        return self._open[path] is not None

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset``. Raises DamagedError if the file ends early, StorageError. Any thread."""
        file = self._open.get(path)
        if file is None:
            self.files.read_into(path, offset, target)
        else:
            file.read_into(offset, target)

    def _opened(self, path: str) -> OpenFile | None:
        if not isinstance(self.files, OpensFiles) or len(self._open) >= _MOST_OPEN:
            return None
        try:
            file = self.files.open_file(path)
        except (DamagedError, StorageError):  # reading it says so
            return None
        if file is None or self._kind(file.descriptor) in _REPEATABLE:
            return file
        file.close()
        return None

    def _kind(self, descriptor: int) -> Kind | None:
        device = os.fstat(descriptor).st_dev
        if device not in self._kinds:
            mount = mount_of(f"/proc/self/fd/{descriptor}")
            self._kinds[device] = None if mount is None else mount.kind
        return self._kinds[device]


@dataclass(frozen=True)
class CheckedValues:
    """Values whose bytes were checked, to be read again from the open payloads into the live tensor.

    The hash is checked again, so that bytes which changed after the first check cannot pass."""

    payloads: OpenPayloads
    copies: Sequence[Copy[Source]]

    def check(self, copy: Copy[Source]) -> None:
        """Read the bytes of one of the copies. Raises DamagedError unless they match their hash."""
        for _ in self._chunks(copy, None):
            pass

    def load(self, tensor: torch.Tensor) -> None:
        """Fill a live tensor. Raises DamagedError unless the bytes match their hash; values are then undefined."""
        for copy in self.copies:
            target = tensor[copy.target_start : copy.target_start + copy.numel].view(torch.uint8)
            read_with_retries(lambda: self._load(copy, target))  # noqa: B023
        tensor[:0].zero_()  # counts as a change in place: autograd does not see the writes

    def _load(self, copy: Copy[Source], target: torch.Tensor) -> None:
        if not target.is_cuda:
            memory = as_bytes(target)
            for _ in self._chunks(copy, lambda start, stop: memory[start:stop]):
                pass
            return
        pinned = torch.empty(min(CHUNK_BYTES, target.numel()), dtype=torch.uint8, pin_memory=True)
        room = as_bytes(pinned)
        for start, chunk in self._chunks(copy, lambda start, stop: room[: stop - start]):
            target[start : start + len(chunk)].copy_(pinned[: len(chunk)])

    def _chunks(
        self, copy: Copy[Source], room: Callable[[int, int], memoryview] | None
    ) -> Iterator[tuple[int, memoryview]]:
        part, entry = copy.source.part, copy.source.entry
        return read_chunks(self.payloads, payload_path(part.save, part.rank), part.header_bytes, entry, room)


@dataclass(frozen=True)
class ReadResult:
    """The values that a rank needs, verified."""

    values: Mapping[Fragment, torch.Tensor | CheckedValues]
    """Of each live fragment: 1-d in host memory, in the dtype as stored, or still in the open payloads."""
    bad: frozenset[RejectedVersion]
    """Versions that are damaged or cannot be read. If not empty, ``values`` must not be used."""
    notes: tuple[str, ...]  # slots that the store does not have
    rounded: tuple[str, ...]  # values that the live dtypes cannot hold

    def load(self, pieces: Iterable[Piece]) -> None:
        """Copy the values into the live tensors. Raises an error if values have no live tensor."""
        found = [(self.values[piece.fragment], piece) for piece in pieces if piece.fragment in self.values]
        if len(found) < len(self.values):
            raise RuntimeError(f"{len(self.values) - len(found)} of {len(self.values)} fragments have no live tensor")
        with torch.no_grad():
            for values, piece in found:
                if isinstance(values, torch.Tensor) and values.data_ptr() != piece.tensor.data_ptr():
                    with torch.inference_mode() if piece.tensor.is_inference() else nullcontext():
                        piece.tensor.copy_(values)
        run_in_threads([partial(_load, values, piece.tensor) for values, piece in found if not _on_host(values)])


def _on_host(values: torch.Tensor | CheckedValues) -> bool:
    return isinstance(values, torch.Tensor)


def _load(values: CheckedValues, tensor: torch.Tensor) -> None:
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():  # both are of one thread
        values.load(tensor)


def run_in_threads(tasks: Sequence[Callable[[], None]]) -> None:
    """Run tasks, begun in order, in threads. Reading, hashing and copying leave the interpreter to other threads.

    Raises the error of the first task that has one; those not begun are dropped."""
    with ThreadPoolExecutor(_THREADS, "driftpoint-resume") as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@dataclass(frozen=True)
class _Wanted:
    """A live fragment, and the stored ones that fill it."""

    place: FragmentPlace
    dtype: torch.dtype  # as stored
    copies: Sequence[Copy[Source]]
    plain: bool  # whole fragments, stored as they are, in open payloads

    @property
    def nbytes(self) -> int:
        return sum(copy.source.entry.nbytes for copy in self.copies)

    @property
    def first(self) -> tuple[str, int]:
        """Payload and offset of the first byte."""
        return byte_range(self.copies[0].source)[:2]


def read_fragments(payloads: OpenPayloads, resolution: Resolution, places: Sequence[FragmentPlace]) -> ReadResult:
    """Read and verify the values of ``places``. Large plain ones are only hashed, and stay in the open payloads.

    Raises:
        ModelMismatchError: The live dtypes cannot represent the values.
        UnreachableError: The object store cannot be reached.
    """
    index = FragmentIndex(resolution.sources())
    notes: list[str] = []
    wanted: list[_Wanted] = []
    for place in places:
        stored = _stored_fragment(index, place.fragment, notes)
        if stored is not None:
            copies, dtype = index.cover(stored), torch_dtype(index.dtype(stored.fqn, stored.slot) or "")
            wanted.append(_Wanted(place, dtype, copies, all(_is_plain(payloads, copy) for copy in copies)))
    wanted.sort(key=lambda one: one.first)
    reader = _Reader(payloads, (copy.source for one in wanted for copy in one.copies))
    run_in_threads([partial(reader.read, batch) for batch in _batches(wanted)])
    return ReadResult(reader.values, frozenset(reader.bad), tuple(notes), tuple(sorted(reader.rounded)))


def _is_plain(payloads: OpenPayloads, copy: Copy[Source]) -> bool:
    part, entry = copy.source.part, copy.source.entry
    whole = entry.encoding == RAW and entry.packing is None and copy.numel == entry.numel
    return whole and payloads.repeatable(payload_path(part.save, part.rank))


def _stored_fragment(index: FragmentIndex[Source], fragment: Fragment, notes: list[str]) -> Fragment | None:
    """Return the fragment in the store that a live one needs; None and a note if its slot is not stored."""
    slot = stored_slot(index, fragment)
    if slot is None and fragment.slot in (WEIGHTS, FROZEN, BUFFER):
        raise ModelMismatchError(f"the store lists {fragment.fqn} but has no values of it")
    if slot is None:
        notes.append(f"{fragment.fqn}/{fragment.slot} is not in the store and keeps its initial value")
        return None
    return Fragment(fragment.fqn, slot, fragment.start, fragment.numel)


def _batches(wanted: Iterable[_Wanted]) -> Iterator[list[_Wanted]]:
    """Yield them in order, small ones together."""
    batch: list[_Wanted] = []
    nbytes = 0
    for one in wanted:
        if batch and nbytes + one.nbytes > CHUNK_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(one)
        nbytes += one.nbytes
    if batch:
        yield batch


class _Reader:
    """Reads and verifies fragments in several threads."""

    def __init__(self, payloads: OpenPayloads, sources: Iterable[Source]) -> None:
        self.values: dict[Fragment, torch.Tensor | CheckedValues] = {}
        self.bad: set[RejectedVersion] = set()
        self.rounded: set[str] = set()
        self._payloads = payloads
        self._ahead = ReadAhead(payloads.files, sources)
        self._lock = threading.Lock()

    def read(self, batch: Sequence[_Wanted]) -> None:
        """Read a batch, neighbours in a payload at once."""
        with self._lock:
            self._ahead.reading(sum(one.nbytes for one in batch))
        run: list[_Wanted] = []
        for one in batch:
            if run and one.first != byte_range(run[-1].copies[-1].source)[::2]:
                self._read_run(run)
                run = []
            if one.plain and one.nbytes <= _SMALL and len(one.copies) == 1:
                run.append(one)
            elif one.plain and one.dtype == one.place.dtype and not one.place.new:
                self._check(one)
            else:
                self._fill(one)
        self._read_run(run)

    def _read_run(self, run: Sequence[_Wanted]) -> None:
        if not run:
            return
        path, first = run[0].first
        bytes_read = torch.empty(sum(one.nbytes for one in run), dtype=torch.uint8)
        memory, position = as_bytes(bytes_read), 0
        try:
            self._payloads.read_into(path, first, memory)
        except (DamagedError, StorageError):  # which of them is to be found
            memory = memory[:0]
        for one in run:
            start, position = position, position + one.nbytes
            if xxhash.xxh3_128_hexdigest(memory[start:position]) != one.copies[0].source.entry.xxh3_128:
                self._fill(one)
                continue
            found = bytes_read[start:position]
            self._keep(one, (found.clone() if start % one.dtype.itemsize else found).view(one.dtype))

    def _check(self, one: _Wanted) -> None:
        values = CheckedValues(self._payloads, one.copies)
        if all([self._attempt(copy, lambda _: values.check(copy)) for copy in one.copies]):  # noqa: B023, C419
            self.values[one.place.fragment] = values

    def _fill(self, one: _Wanted) -> None:
        host = torch.empty(one.place.fragment.numel, dtype=one.dtype)
        found = []
        for copy in one.copies:
            target = host[copy.target_start : copy.target_start + copy.numel]
            found.append(self._attempt(copy, lambda fault: _fetch(self._payloads, copy, target, fault)))  # noqa: B023
        if all(found):
            self._keep(one, host)

    def _keep(self, one: _Wanted, host: torch.Tensor) -> None:
        loss = encoding_loss(host, one.place)
        if loss is not None:
            self.rounded.add(loss)
        self.values[one.place.fragment] = host

    def _attempt(self, copy: Copy[Source], read: Callable[[_Fault], None]) -> bool:
        fault = _Fault(copy.source.part.save)
        try:
            read_with_retries(lambda: read(fault))
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


def _fetch(files: Readable, copy: Copy[Source], target: torch.Tensor, fault: _Fault) -> None:
    part, entry = copy.source.part, copy.source.entry
    if entry.encoding == RAW and entry.packing is None and copy.numel == entry.numel:
        read_entry(files, part, entry, as_bytes(target))
        return
    reader, position = FragmentReader(files, copy.source), -copy.source_start
    try:
        for chunk in reader.chunks():
            values = torch.from_numpy(chunk).view(target.dtype)
            first, after = max(0, -position), min(values.numel(), target.numel() - position)
            if first < after:
                target[position + first : position + after] = values[first:after]
            position += values.numel()
    except (DamagedError, StorageError):
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
