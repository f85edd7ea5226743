"""Allocate host memory that is filled at once, with its pages present.

The first write to new memory costs a page fault every 4 KiB, which takes longer than the write itself. One call for all
pages of a tensor costs less; and pages of 2 MiB, where the kernel has them at hand, less again. It may also have to
compact memory for them, or get them from a hypervisor, which takes several times as long. So both kinds are timed while
they are used, and the next tensor gets the kind that was cheaper.
"""

import ctypes
import mmap
import sys
import time

import torch

_LEAST = 1 << 20  # bytes of a tensor; smaller ones often get memory that was in use before
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


class PresentMemory:
    """Allocates tensors. Any thread."""

    def __init__(self) -> None:
        self._advise = ctypes.CDLL(None).madvise if sys.platform == "linux" else None
        self._costs: dict[bool, float] = {}  # of small and of huge pages: seconds of processor time a byte

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-d tensor in memory of its own, with undefined values. Raises as ``torch.empty``."""
        tensor = torch.empty(numel, dtype=dtype)
        if self._advise is None or tensor.nbytes < _LEAST:
            return tensor
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        place, nbytes = ctypes.c_void_p(first), ctypes.c_size_t(tensor.data_ptr() + tensor.nbytes - first)
        huge = min((False, True), key=lambda kind: self._costs.get(kind, 0.0))
        if huge:
            self._advise(place, nbytes, mmap.MADV_HUGEPAGE)
        began = time.thread_time()
        if self._advise(place, nbytes, _POPULATE_WRITE):
            self._advise = None  # an old kernel; or no memory, and then the write to it tells
        self._costs[huge] = (time.thread_time() - began) / tensor.nbytes
        return tensor
