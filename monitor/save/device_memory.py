"""Pin host memory for CUDA, and make reusable views of device memory.

Into pinned memory, copies from a device run beside training; otherwise the driver copies through a buffer of its own,
and waits. If the runtime refuses, because of a limit on locked memory for example, copies are slower but equally
correct. Torch's own pinned memory would be rounded up to a power of two for each fragment.

Making a view takes microseconds, and a save needs several for each tensor. Views that own no memory can be reused by
later saves, as long as the job's tensors and the buffers stay where they are."""

import ctypes
import logging
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from operator import is_
from typing import Any

import numpy as np
import torch

from monitor.adapters.identity import Integers, versions_of
from monitor.observe.units import LocalUnit, UnitLayout
from monitor.save.write_tracker import sampled

_log = logging.getLogger("driftpoint")

ALIGN = 64  # bytes
_CPU = torch.device("cpu")


def pinned_buffers(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Return 1-d uint8 buffers in one block, which stays pinned until the last of them is freed."""
    ends = list(accumulate((-(-size // ALIGN) * ALIGN for size in sizes), initial=0))
    block = np.frombuffer(mmap.mmap(-1, max(ends[-1], 1)), np.uint8)
    address, whole = block.ctypes.data, torch.from_numpy(block)
    with torch.cuda.device(device):  # the current device of a background thread is the first one
        if pin(address, block.nbytes):
            weakref.finalize(block, unpin, address).atexit = False  # called before the memory is unmapped
    return [whole[start : start + size] for start, size in zip(ends, sizes, strict=False)]


def pin(address: int, nbytes: int) -> bool:
    """Pin memory that stays mapped until it is unpinned. Return False, and log it, if CUDA refuses."""
    code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))  # type: ignore[no-untyped-call]
    if code:
        _clear_error()
        _log.warning("%d bytes of memory cannot be pinned (CUDA error %d): copies into them are slower", nbytes, code)
    return not code


def unpin(address: int) -> None:
    """Unpin memory. No copy into it may be under way."""
    if int(torch.cuda.cudart().cudaHostUnregister(address)):  # type: ignore[no-untyped-call]
        _clear_error()


def _clear_error() -> None:
    """Clear this thread's last CUDA error. Otherwise the next kernel launch raises it."""
    if (library := _runtime()) is not None:
        library.cudaGetLastError()


def _runtime() -> ctypes.CDLL | None:
    """Return the CUDA runtime that torch has loaded. Another one would not have its last error."""
    with suppress(OSError):
        return ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}", os.RTLD_NOLOAD)
    return None


class _Memory:
    """Memory of a CUDA device, for :func:`torch.as_tensor`."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}


def view_of(address: int, nbytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a 1-d tensor of memory that others own, and must keep for as long as the tensor is used."""
    if device.type == "cuda":
        return torch.as_tensor(_Memory(address, nbytes), device=device).view(dtype)
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=dtype)


@torch.inference_mode(False)
def hold(tensors: Sequence[torch.Tensor]) -> Callable[[], bool]:
    """Keep the present memory of tensors. The result tells whether it is in place, and unchanged as autograd counts."""
    held = [one.detach() for one in tensors]
    versions, places = versions_of(held), list(map(torch.Tensor.data_ptr, held))
    return lambda: list(map(torch.Tensor.data_ptr, held)) == places and versions_of(held) == versions


class MemoryViews:
    """Views of the pieces of units on a CUDA device, and of the buffers that they are copied into. They own nothing.

    ``targets`` are the addresses of the buffers, which are in host memory."""

    @torch.inference_mode(False)
    def __init__(self, layouts: Sequence[UnitLayout], targets: Integers, device: torch.device) -> None:
        self.layouts, self.targets, self.device = layouts, targets, device
        dtypes = [dtype for layout in layouts for dtype in layout.dtypes]
        self._sizes = np.concatenate([layout.regions.sizes for layout in layouts])
        self._places = np.concatenate([layout.regions.addresses for layout in layouts])
        sizes, places = self._sizes.tolist(), self._places.tolist()
        self._sources = [view_of(*one, device) for one in zip(places, sizes, dtypes, strict=True)]
        self._buffers = [view_of(*one, _CPU) for one in zip(targets.tolist(), sizes, dtypes, strict=True)]
        self.sampled, self.kept = sampled(self._sources), sampled(self._buffers)
        begins = (self._places - np.concatenate([layout.firsts for layout in layouts])).tolist()
        spans = (index for layout in layouts for index, _ in layout.spans or ())
        self._begins = dict(zip(spans, begins, strict=True))  # index in Identity.tensors -> address
        # False if torch made copies, as it does of memory that is not on the device.
        self.show_memory = [view.data_ptr() for view in self._sources] == places

    def hold(self, tensors: Sequence[torch.Tensor]) -> Callable[[], bool] | None:
        """Keep the sources' memory alive. tensors: ``Identity.tensors``. None if they have other memory by now."""
        held = [tensors[index] for index in self._begins]
        return hold(held) if list(map(torch.Tensor.data_ptr, held)) == [*self._begins.values()] else None

    def copy(self) -> None:
        """Queue the copies in the current stream: all by one call, where the CUDA runtime has such a call.

        One call per tensor takes five times as long. After an error, the runtime is not asked again."""
        call = _copy_batch() if self.device.type == "cuda" else None
        if call is not None:
            arrays = (ctypes.c_void_p(one.ctypes.data) for one in (self.targets, self._places, self._sizes))
            count, one = ctypes.c_size_t(len(self._sizes)), ctypes.c_size_t(1)
            stream = ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
            with torch.cuda.device(self.device):
                code = call(*arrays, count, _IN_STREAM_ORDER, (ctypes.c_size_t * 1)(), one, stream)
            if not code:
                return
            _clear_error()
            _log.warning("copies are queued one by one from now on: CUDA error %d for all at once", code)
            _refused.append(code)
        torch._foreach_copy_(self._buffers, self._sources, non_blocking=True)


_IN_STREAM_ORDER = (ctypes.c_int * 6)(1)
"""``cudaMemcpyAttributes``: sources are read in the order of the stream; no location hints, and no flags."""

_refused: list[int] = []  # codes of errors


def _copy_batch() -> Any:
    """Return ``cudaMemcpyBatchAsync``, which has these arguments from CUDA 13 on, or None."""
    if _refused or int((torch.version.cuda or "0").partition(".")[0]) < 13:
        return None
    return getattr(_runtime(), "cudaMemcpyBatchAsync", None)


class LastViews:
    """The views of the last copies: a job mostly copies the same memory into the same buffers."""

    def __init__(self) -> None:
        self._known = deque[MemoryViews](maxlen=4)  # of saves, and of snapshots, whose buffers take turns

    def of(self, units: Sequence[tuple[LocalUnit, Integers]]) -> MemoryViews | None:
        """Return views of units, with the addresses of their buffers. None unless all lie on one device."""
        layouts = [part.layout for part, _ in units]
        targets = np.concatenate([addresses for _, addresses in units])
        for one in self._known:
            same = len(one.layouts) == len(layouts) and all(map(is_, one.layouts, layouts))
            if same and np.array_equal(one.targets, targets):
                return one
        devices = {device for layout in layouts for device in layout.regions.devices}
        if len(devices) != 1 or any(layout.spans is None for layout in layouts):
            return None  # without spans, layouts are made anew at each decision
        views = MemoryViews(layouts, targets, *devices)
        if not views.show_memory:
            return None
        self._known.appendleft(views)
        return views
