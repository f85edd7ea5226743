"""Staging: copies of live state in host memory that stand still while the background thread writes them.

Buffers are kept and used again: fresh memory costs a page fault every 4 KiB, which is several times the copy.
The training thread takes and gives; whoever holds a buffer owns it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from store.names import Unit


class StagingPool:
    """Host buffers by unit."""

    def __init__(self) -> None:
        self._free: dict[Unit, list[list[torch.Tensor]]] = {}

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

    @property
    def memory_bytes(self) -> int:
        """Bytes in buffers that nobody holds."""
        return sum(
            buffer.numel() * buffer.element_size()
            for sets in self._free.values()
            for buffers in sets
            for buffer in buffers
        )


def copy_to_host(sources: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
    """Start copying live tensors into host buffers; :func:`wait_for_copies` before they are read.

    On CUDA the copies go through a side stream into pinned memory, ordered after all work queued so far."""
    if any(source.is_cuda for source in sources):
        stream = _side_stream(sources[0].device)
        stream.wait_stream(torch.cuda.current_stream(sources[0].device))
        with torch.cuda.stream(stream):
            for source, buffer in zip(sources, buffers, strict=True):
                buffer.copy_(source, non_blocking=True)
        return
    for source, buffer in zip(sources, buffers, strict=True):
        buffer.copy_(source)


def wait_for_copies(device: torch.device) -> None:
    """Return when every copy started on ``device`` is complete."""
    if device.type == "cuda":
        _side_stream(device).synchronize()


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
