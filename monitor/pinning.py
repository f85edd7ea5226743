"""Pinned shared memory: copies from an accelerator into it run beside training, as into buffers torch has pinned.

Memory that the CUDA driver does not know is copied to through a buffer of the driver's own, and the copy waits. On a
machine without CUDA nothing here does anything. Where pinning is refused (a limit on locked memory, say) copies are
slower and as right.
"""

from __future__ import annotations

import logging
import mmap

import torch

_log = logging.getLogger("driftpoint")


class Pins:
    """What this process has pinned. Training thread."""

    def __init__(self) -> None:
        self._pinned: dict[int, torch.Tensor] = {}
        self._refused = False

    def pin(self, memory: mmap.mmap) -> None:
        """Pin all of it, once; it stays where it is as long as it is pinned."""
        view = torch.frombuffer(memory, dtype=torch.uint8)
        address = view.data_ptr()
        if address in self._pinned or self._refused:
            return
        code = int(torch.cuda.cudart().cudaHostRegister(address, view.numel(), 0))  # type: ignore[no-untyped-call]
        if code:
            self._refused = True
            _log.warning("shared memory cannot be pinned (CUDA error %d): copies into it are slower", code)
            return
        self._pinned[address] = view

    def release(self) -> None:
        """Unpin everything; before the memory goes. A second call changes nothing."""
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._pinned.clear()
