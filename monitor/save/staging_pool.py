"""Keeps the host buffers that saves copy into, and pins host memory for CUDA.

Pinned, copies from a device run beside training; otherwise the driver copies through a buffer of its own, and
waits. If the runtime refuses, because of a limit on locked memory for example, copies are slower but equally correct.
Torch's own pinned memory would be rounded up to a power of two for each fragment."""

import ctypes
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from monitor.adapters.identity import addresses_of
from monitor.observe.units import UnitLayout
from store.names import Unit

_log = logging.getLogger("driftpoint")

_ALIGN = 64  # bytes

WavePiece = tuple[int, torch.Tensor, torch.Tensor]  # waves that come after its own, elements of the state, a buffer


class StagingPool:
    """Reuses host buffers, by unit. The caller owns a buffer from ``take`` to ``give``.

    New memory costs a page fault every 4 KiB, which takes several times as long as the copy."""

    def __init__(self) -> None:
        self._free: dict[Unit, list[tuple[UnitLayout, tuple[torch.Tensor, ...]]]] = {}  # layouts that they fit
        self._addresses: dict[Unit, tuple[tuple[torch.Tensor, ...], npt.NDArray[np.int64]]] = {}
        self._bytes: dict[Unit, list[torch.Tensor]] = {}
        self._known: set[Unit] = set()
        self._untouched: dict[Unit, tuple[torch.Tensor, ...]] = {}
        self._lock = threading.Lock()
        self._block: torch.Tensor | None = None  # of waves

    @torch.inference_mode(False)
    def take_waves(self, groups: Sequence[Sequence[torch.Tensor]], most: int) -> list[WavePiece]:
        """Return a piece for each tensor, in order, with buffers in ``most`` bytes for all. Groups stay together."""
        if self._block is None:  # of the host's memory, only pages that are written count
            cuda = next((tensor.device for group in groups for tensor in group if tensor.is_cuda), None)
            self._block = _pinned_buffers([most], cuda)[0] if cuda else torch.empty(most, dtype=torch.uint8)
        left, room, pieces = 0, most, list[WavePiece]()
        for group in reversed(groups):  # so that the last wave, for which training waits least, is the fullest
            if padded_bytes(group) > room:
                left, room = left + 1, most
            for tensor in reversed(group):
                room = (room - tensor.nbytes) // _ALIGN * _ALIGN
                pieces.append((left, tensor, self._block[room : room + tensor.nbytes].view(tensor.dtype)))
        return pieces[::-1]

    def take_bytes(self, unit: Unit, sizes: Sequence[int], cuda: torch.device | None) -> list[torch.Tensor]:
        """Return 1-d uint8 buffers of these sizes, contents undefined; pinned for copies from ``cuda``, if given."""
        free = self._bytes.pop(unit, None)
        if free is not None and [buffer.numel() for buffer in free] == list(sizes):
            return free
        return _pinned_buffers(sizes, cuda) if cuda else [torch.empty(size, dtype=torch.uint8) for size in sizes]

    def give_bytes(self, unit: Unit, buffers: Sequence[torch.Tensor]) -> None:
        self._bytes[unit] = list(buffers)

    def reserve(self, unit: Unit, layout: UnitLayout) -> None:
        """Allocate one set of buffers. :meth:`prepare` touches its pages, unless pinning has done so."""
        self._known.add(unit)
        buffers = _allocate(layout)
        if layout.regions.cuda is None:
            self._untouched[unit] = buffers
        self.give(unit, buffers, layout)

    def prepare(self, unit: Unit, layout: UnitLayout) -> None:
        """Touch the pages of the first set of buffers, unless a save has taken it. Any thread."""
        with self._lock:
            if unit not in self._known:
                self.reserve(unit, layout)
            for buffer in self._untouched.pop(unit, ()):
                buffer.zero_()

    def take(self, unit: Unit, layout: UnitLayout) -> tuple[torch.Tensor, ...]:
        """Return buffers of the same dtypes and sizes, contents undefined."""
        with self._lock:  # what is being touched is not being filled
            self._known.add(unit)
            self._untouched.pop(unit, None)
        for index, (known, buffers) in enumerate(self._free.get(unit, [])):
            if known is layout or (known == layout and known.regions.cuda == layout.regions.cuda):
                self._free[unit] = self._free[unit][index + 1 :]  # those before fit an earlier shape
                return buffers
        self._free.pop(unit, None)  # they fit an earlier shape of the unit
        return _allocate(layout)

    def give(self, unit: Unit, buffers: tuple[torch.Tensor, ...], layout: UnitLayout) -> None:
        """Take buffers back, which were taken for ``layout``."""
        self._free.setdefault(unit, []).append((layout, buffers))

    def addresses(self, unit: Unit, buffers: tuple[torch.Tensor, ...]) -> npt.NDArray[np.int64]:
        """Return the first byte of each buffer. Keeps those of the last call: a unit mostly gets the same buffers."""
        known = self._addresses.get(unit)
        if known is None or known[0] is not buffers:
            known = self._addresses[unit] = buffers, addresses_of(buffers)
        return known[1]


def padded_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes that buffers for tensors take in one block, at most."""
    return sum(tensor.nbytes + _ALIGN for tensor in tensors)


@torch.inference_mode(False)
def _allocate(layout: UnitLayout) -> tuple[torch.Tensor, ...]:
    numels, cuda = [fragment.numel for fragment in layout.fragments], layout.regions.cuda
    if cuda is None:
        return tuple(torch.empty(n, dtype=dtype) for n, dtype in zip(numels, layout.dtypes, strict=True))
    sizes = [n * dtype.itemsize for n, dtype in zip(numels, layout.dtypes, strict=True)]
    return tuple(buffer.view(dtype) for buffer, dtype in zip(_pinned_buffers(sizes, cuda), layout.dtypes, strict=True))


def _pinned_buffers(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Return 1-d uint8 buffers in one block, which is pinned once, and until the last of them is gone."""
    ends = list(accumulate((-(-size // _ALIGN) * _ALIGN for size in sizes), initial=0))
    block = np.frombuffer(mmap.mmap(-1, max(ends[-1], 1)), np.uint8)
    address, whole = block.ctypes.data, torch.from_numpy(block)
    with torch.cuda.device(device):  # that of a background thread would be the first one
        if pin(address, block.nbytes):
            weakref.finalize(block, unpin, address).atexit = False  # called before the memory is unmapped
    return [whole[start : start + size] for start, size in zip(ends, sizes, strict=False)]


def pin(address: int, nbytes: int) -> bool:
    """Pin memory that stays mapped until it is unpinned. Return False, and log it, if CUDA refuses."""
    code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))  # type: ignore[no-untyped-call]
    if code:
        clear_error()
        _log.warning("%d bytes of memory cannot be pinned (CUDA error %d): copies into them are slower", nbytes, code)
    return not code


def unpin(address: int) -> None:
    """Unpin memory that no copy is under way into."""
    if int(torch.cuda.cudart().cudaHostUnregister(address)):  # type: ignore[no-untyped-call]
        clear_error()


def clear_error() -> None:
    """Clear this thread's last CUDA error. Otherwise the next kernel launch raises it."""
    if (library := runtime()) is not None:
        library.cudaGetLastError()


def runtime() -> ctypes.CDLL | None:
    """Return the CUDA runtime that torch has loaded. Another one has errors of its own."""
    with suppress(OSError):
        return ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}", os.RTLD_NOLOAD)
    return None
