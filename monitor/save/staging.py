"""Host buffers, async copies, encode-while-copying.

Encoding while staging: where state lies on a device its encoded bytes are made there, and only they are copied.

One fragment each. The values stand still until the copy is finished, like those of any copy; what the encoding cannot
hold is copied as it is after all. The encoded bytes and what was lost are known once it is finished; decoding them
into host memory is left to the background thread.

Staging: copies of live state in host memory that stand still while the background thread writes them.

Buffers are kept and used again: fresh memory costs a page fault every 4 KiB, which is several times the copy.
The training thread takes and gives; whoever holds a buffer owns it.

State stands still between two optimizer steps. So the copies may be made at once (``eager``), or beside the next
forward and backward (``lazy``), where the next optimizer step waits for what is not copied yet.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from monitor.save.torch_codecs import encoder_named
from store.encoding import CHUNK, chunk_sizes, encoding_named
from store.encoding.base import Bytes
from store.errors import SaveError
from store.names import Unit

_HUGE = 3.3e38
"""What is larger may round to infinity; rather store it raw."""


def in_range(values: torch.Tensor, unsigned: bool) -> torch.Tensor:
    """Whether no encoding rounds any of the values to infinity, and, if it is ``unsigned``, none is negative; False for
    NaN. On their device."""
    least, largest = torch.aminmax(values)
    return ((least >= 0) if unsigned else (least > -_HUGE)) & (largest < _HUGE)


@dataclass
class EncodingLoss:
    """Squared L2 norms over a unit's fragments on this rank: of what encoding lost, and of what decoding gives."""

    error_sq: float = 0.0
    decoded_sq: float = 0.0


@dataclass
class EncodedCopy:
    """A fragment on its way to host memory.

    source: 1-d float32, on any device. encoded: 1-d uint8 host memory of the encoded size, pinned where the source is
    on CUDA. copy: 1-d float32 host memory: the values, where they cannot be held; else for what decoding gives. Empty:
    neither is wanted.
    held, lost: once :meth:`finish` has returned."""

    source: torch.Tensor
    encoding: str
    encoded: torch.Tensor
    copy: torch.Tensor
    held: bool = False
    lost: EncodingLoss = field(default_factory=EncodingLoss)
    _told: torch.Tensor | None = None

    def begin(self) -> None:
        """Queue the work, on CUDA in the current stream; elsewhere it is done on return."""
        try:
            self._encode()
        except (torch.OutOfMemoryError, MemoryError):  # there is room for a plain copy, and that was reserved
            self._told = None

    @torch.no_grad()
    def _encode(self) -> None:
        encoding, encoder, device = encoding_named(self.encoding), encoder_named(self.encoding), self.source.device
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        held, at = torch.ones((), dtype=torch.bool, device=device), 0
        scratch = torch.empty(min(CHUNK, self.source.numel()), dtype=torch.float32, device=device)
        for values in torch.split(self.source, CHUNK):
            stop = at + encoding.stored_bytes(values.numel(), "F32")
            out = torch.empty(stop - at, dtype=torch.uint8, device=device)
            decoded = scratch[: values.numel()]
            held &= encoder.encode(values, out) & in_range(values, encoder.unsigned)
            encoder.decode(out, decoded)
            sums[1] += decoded.double().square().sum()
            sums[0] += decoded.sub_(values).double().square().sum()
            self.encoded[at:stop].copy_(out, non_blocking=True)
            at = stop
        told = torch.cat((held.double().view(1), sums))
        self._told = torch.empty(3, dtype=torch.float64, pin_memory=told.is_cuda).copy_(told, non_blocking=True)

    def finish(self) -> None:
        """After whatever ran :meth:`begin` is through with it."""
        held, error_sq, decoded_sq = (0.0, 0.0, 0.0) if self._told is None else self._told.tolist()
        self.held = held == 1.0
        if self.held:
            self.lost = EncodingLoss(error_sq, decoded_sq)
        elif self.copy.numel():
            self.copy.copy_(self.source)

    def chunks(self) -> Iterator[Bytes]:
        """The encoded chunks, each decoded into ``copy`` as it comes. Background thread."""
        encoding, encoder, at, start = encoding_named(self.encoding), encoder_named(self.encoding), 0, 0
        for size in chunk_sizes(self.copy.numel()):
            stop = at + encoding.stored_bytes(size, "F32")
            encoder.decode(self.encoded[at:stop], self.copy[start : start + size])
            yield self.encoded[at:stop].numpy()
            at, start = stop, start + size


class StagingPool:
    """Host buffers by unit, and by unit those for encoded bytes."""

    def __init__(self) -> None:
        self._free: dict[Unit, list[list[torch.Tensor]]] = {}
        self._bytes: dict[Unit, list[torch.Tensor]] = {}

    def take_bytes(self, unit: Unit, sizes: Sequence[int], pinned: bool) -> list[torch.Tensor]:
        """1-d uint8 buffers of these sizes, contents undefined."""
        found = self._bytes.pop(unit, None)
        if found is not None and [buffer.numel() for buffer in found] == list(sizes):
            return found
        return [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]

    def give_bytes(self, unit: Unit, buffers: Sequence[torch.Tensor]) -> None:
        """Take them back."""
        self._bytes[unit] = list(buffers)

    def reserve(self, unit: Unit, tensors: Sequence[torch.Tensor]) -> None:
        """Have one set of buffers ready, its pages touched, before the first save needs it."""
        buffers = _allocate(tensors)
        for buffer in buffers:
            buffer.zero_()
        self.give(unit, buffers)

    def take(self, unit: Unit, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Buffers of the same dtypes and sizes, contents undefined."""
        for index, buffers in enumerate(self._free.get(unit, [])):
            if _fits(buffers, tensors):
                return self._free[unit].pop(index)
        self._free.pop(unit, None)  # they fit an earlier shape of the unit
        return _allocate(tensors)

    def give(self, unit: Unit, buffers: Sequence[torch.Tensor]) -> None:
        """Take buffers back."""
        if buffers:
            self._free.setdefault(unit, []).append(list(buffers))

    def keep(self, unit: Unit, tensors: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
        """Take buffers, made elsewhere, if they are just what ``tensors`` need and nothing is at hand for them."""
        pinned = all(buffer.is_pinned() for buffer in buffers) if any(tensor.is_cuda for tensor in tensors) else True
        if pinned and _fits(buffers, tensors) and not self._free.get(unit):
            self.give(unit, buffers)

    @property
    def memory_bytes(self) -> int:
        """Bytes in buffers that nobody holds."""
        return sum(
            buffer.numel() * buffer.element_size()
            for sets in self._free.values()
            for buffers in sets
            for buffer in buffers
        ) + sum(buffer.numel() for buffers in self._bytes.values() for buffer in buffers)


class AsyncCopy:
    """The copies of one save, from live tensors into host buffers.

    The training thread adds and starts. Whichever thread comes first finishes, and the other waits for it: so
    training never depends on a background thread that is stuck. Nobody reads a buffer, and nobody changes a
    source, before that. On CUDA the copies go through a side stream into pinned memory, ordered after all work
    queued when they start. ``finish`` may be called more than once.
    """

    def __init__(self) -> None:
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._torn = False
        self._host: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._devices: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._encoded: list[EncodedCopy] = []
        self._lock = threading.Lock()
        self._done = False

    def add(self, sources: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
        """Have ``sources`` copied into ``buffers``, pair by pair."""
        self._versions += [(source, source._version) for source in sources]
        for pair in zip(sources, buffers, strict=True):
            pairs = self._devices.setdefault(pair[0].device, []) if pair[0].is_cuda else self._host
            pairs.append(pair)

    def add_encoded(self, copies: Sequence[EncodedCopy]) -> None:
        """Have fragments encoded where they are, and their bytes copied."""
        self._versions += [(copy.source, copy.source._version) for copy in copies]
        self._encoded += copies
        for copy in copies:
            if copy.source.is_cuda:
                self._devices.setdefault(copy.source.device, [])

    def start(self) -> None:
        """Queue what runs on a device. Training thread."""
        for device, pairs in self._devices.items():
            stream = _side_stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for source, buffer in pairs:
                    buffer.copy_(source, non_blocking=True)
                for copy in self._encoded:
                    if copy.source.device == device:
                        copy.begin()

    def finish(self) -> None:
        """Copy what is in host memory, and return when every copy is complete."""
        with self._lock:
            if self._done:
                return
            # After an error too: it is the save's to tell, which must then not take the copies for whole.
            self._done = self._torn = True
            for source, buffer in self._host:
                buffer.copy_(source)
            for copy in self._encoded:
                if not copy.source.is_cuda:
                    copy.begin()
            for device in self._devices:
                _side_stream(device).synchronize()
            for copy in self._encoded:
                copy.finish()
            self._torn = any(source._version != version for source, version in self._versions)
            self._versions.clear()

    def require_whole(self) -> None:
        """SaveError where a source was changed in place before its copy was complete.

        A net for what goes around the optimizer. It sees whatever autograd counts; a change through ``.data``
        is not counted."""
        if self._torn:
            raise SaveError(
                "the state was changed between two optimizer steps while it was copied, so this save is given up; "
                "set `staging: eager`, or leave parameters alone after ckpt.step()"
            )


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous 1-d host tensor of at least one element, without a copy."""
    return tensor.view(torch.uint8).numpy().data.cast("B")


def _allocate(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty(t.numel(), dtype=t.dtype, pin_memory=t.is_cuda) for t in tensors]


def _fits(buffers: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> bool:
    return [(b.dtype, b.numel()) for b in buffers] == [(t.dtype, t.numel()) for t in tensors]


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]
