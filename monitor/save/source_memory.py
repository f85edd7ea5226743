"""The memory that a save copies: views of it that are made once, what keeps it, and a sample that tells of changes.

To make a view of a tensor takes microseconds, and a save needs several of each. Views that own nothing can stay between
saves, for as long as the job's tensors and the buffers stay where they are.
"""

import ctypes
import logging
from collections import deque
from collections.abc import Sequence
from operator import is_
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from monitor.adapters.identity import versions_of
from monitor.observe.units import LocalUnit, UnitLayout
from monitor.save.staging_pool import clear_error, runtime

_log = logging.getLogger("driftpoint")

_CPU = torch.device("cpu")
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAMPLED = 64


class HeldMemory:
    """Keeps the memory of tensors from being freed, and tells whether it is still theirs.

    A storage may get other memory, as by ``share_memory_()`` or ``resize_()``."""

    def __init__(self, owners: Sequence[torch.Tensor]) -> None:
        self._owners = owners
        self._versions = versions_of(self._owners)
        self._storages = [owner.untyped_storage() for owner in self._owners]
        self._places = self._addresses()

    def in_place(self) -> bool:
        """Return whether all memory is where it was."""
        return self._addresses() == self._places

    def unchanged(self) -> bool:
        """Return whether it is, and autograd counted no change."""
        return versions_of(self._owners) == self._versions and self.in_place()

    def _addresses(self) -> list[int]:
        return [storage.data_ptr() for storage in self._storages]


class _Memory:
    """Memory of a CUDA device, for :func:`torch.as_tensor`."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            **{"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}
        }


def view_of(address: int, nbytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a 1-d tensor of memory that others own, and must keep for as long as the tensor is used."""
    if device.type == "cuda":
        return torch.as_tensor(_Memory(address, nbytes), device=device).view(dtype)
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=dtype)


class MemoryViews:
    """Views of the pieces of units on a CUDA device, and of the buffers that they are copied into. They own nothing.

    ``targets`` are the addresses of the buffers, which are in host memory."""

    @torch.inference_mode(False)
    def __init__(self, layouts: Sequence[UnitLayout], targets: npt.NDArray[np.int64], device: torch.device) -> None:
        self.layouts, self.targets, self.device = layouts, targets, device
        self._owners = sorted({index for layout in layouts for index, _ in layout.spans or ()})
        dtypes = [dtype for layout in layouts for dtype in layout.dtypes]
        self._sizes = np.concatenate([layout.regions.sizes for layout in layouts])
        self._places = np.concatenate([layout.regions.addresses for layout in layouts])
        sizes, places = self._sizes.tolist(), self._places.tolist()
        self._sources = [view_of(*one, device) for one in zip(places, sizes, dtypes, strict=True)]
        self._buffers = [view_of(*one, _CPU) for one in zip(targets.tolist(), sizes, dtypes, strict=True)]
        self.sampled, self.kept = _sampled(self._sources), _sampled(self._buffers)

    def hold(self, tensors: Sequence[torch.Tensor]) -> HeldMemory:
        """Keep the memory of the sources. tensors: of the job's identity."""
        return HeldMemory([tensors[index] for index in self._owners])

    def copy(self) -> None:
        """Queue the copies in the current stream: all by one call, where the CUDA runtime has such a call.

        A call for each takes five times as long. A runtime that refuses it is not asked again."""
        call = _copy_batch() if self.device.type == "cuda" else None
        if call is not None:
            arrays = (ctypes.c_void_p(one.ctypes.data) for one in (self.targets, self._places, self._sizes))
            count, one = ctypes.c_size_t(len(self._sizes)), ctypes.c_size_t(1)
            stream = ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
            with torch.cuda.device(self.device):
                code = call(*arrays, count, _IN_STREAM_ORDER, (ctypes.c_size_t * 1)(), one, stream)
            if not code:
                return
            clear_error()
            _log.warning("copies are queued one by one from now on: CUDA error %d for all at once", code)
            _refused.append(code)
        torch._foreach_copy_(self._buffers, self._sources, non_blocking=True)


_IN_STREAM_ORDER = (ctypes.c_int * 6)(1)
"""``cudaMemcpyAttributes``: sources are read in the order of the stream; no hints where memory lies, and no flags."""

_refused: list[int] = []  # codes of errors


def _copy_batch() -> Any:
    """Return ``cudaMemcpyBatchAsync``, which has these arguments from CUDA 13 on, or None."""
    if _refused or int((torch.version.cuda or "0").partition(".")[0]) < 13:
        return None
    return getattr(runtime(), "cudaMemcpyBatchAsync", None)


class LastViews:
    """The views of the last copies: a job mostly copies the same memory into the same buffers."""

    def __init__(self) -> None:
        self._known = deque[MemoryViews](maxlen=4)  # of saves, and of snapshots into one memory after the other

    def of(self, units: Sequence[tuple[LocalUnit, npt.NDArray[np.int64]]]) -> MemoryViews | None:
        """Return views of units, with the addresses of their buffers. None unless all lie on one CUDA device."""
        if not units or not any(map(_has_views, units[0][0].layout.regions.devices)):
            return None
        layouts = [part.layout for part, _ in units]
        targets = np.concatenate([addresses for _, addresses in units])
        for one in self._known:
            same = len(one.layouts) == len(layouts) and all(map(is_, one.layouts, layouts))
            if same and np.array_equal(one.targets, targets):
                return one
        devices = {device for layout in layouts for device in layout.regions.devices}
        if len(devices) != 1 or not _has_views(*devices) or any(layout.spans is None for layout in layouts):
            return None  # without spans, the layouts are other ones at each decision
        self._known.appendleft(MemoryViews(layouts, targets, *devices))
        return self._known[0]


def _has_views(device: torch.device) -> bool:
    return device.type == "cuda"


Words = dict[int, list[Any]]
"""Views by the size of an element: of numpy in host memory, where many small ones cost less, else of torch."""


class SourceSample:
    """Elements of tensors on one device, compared bit by bit with what they were.

    At most 64 of each tensor, evenly spread, the first and the last among them.

    It finds what autograd's version counters do not count: writes through ``.data``, or by code outside PyTorch. A
    change between the sampled elements is not found. Built and compared in the stream of the copies. ``pairs`` are
    sources that are copied as they are, and their buffers in host memory, and so are those of ``views``; ``others`` are
    encoded."""

    def __init__(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        others: Sequence[torch.Tensor],
        views: MemoryViews | None = None,
    ) -> None:
        self._pairs, self._views = pairs, views
        copied = _sampled([source for source, _ in pairs])
        self._copied = _joined(copied, views.sampled) if views else copied
        self._encoded = _sampled(others)
        self._before = self._after = _values(self._copied), _values(self._encoded)

    def read_again(self) -> None:
        """Read the sources, after their copies and before anything that may change them."""
        self._after = _values(self._copied), _values(self._encoded)

    def holds(self) -> bool:
        """Return whether the sources, when last read, and the filled buffers have the values of the beginning."""
        kept = _sampled([buffer for _, buffer in self._pairs])
        buffers = _values(_joined(kept, self._views.kept) if self._views else kept)
        found = (self._before[0], buffers), *zip(self._before, self._after, strict=True)
        return all(_equal(before, now) for before, now in found)


def _sampled(tensors: Sequence[torch.Tensor]) -> Words:
    found: Words = {}
    for tensor in tensors:
        last = tensor.numel() - 1
        if last >= 0:
            size = tensor.element_size()
            bits = tensor.view(_WORDS[size])  # integers are equal where all bits are, those of NaN too
            words: Any = bits if bits.is_cuda else bits.numpy()
            stride = max(1, -(-last // (_SAMPLED - 2)))
            found.setdefault(size, []).extend((words[:1], words[last % stride :: stride]))
    return found


def _joined(one: Words, other: Words) -> Words:
    return {size: [*one.get(size, ()), *other.get(size, ())] for size in one | other}


def _values(sampled: Words) -> dict[int, Any]:
    return {
        size: torch.cat(views) if isinstance(views[0], torch.Tensor) else np.concatenate(views)
        for size, views in sampled.items()
    }


def _equal(one: dict[int, Any], other: dict[int, Any]) -> bool:
    return all(np.array_equal(_on_host(values), _on_host(other[size])) for size, values in one.items())


def _on_host(values: Any) -> Any:
    return values.cpu().numpy() if isinstance(values, torch.Tensor) else values
