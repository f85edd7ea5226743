"""Copies host memory beside training, and finds every write to it meanwhile, whatever code makes it.

Autograd counts the in-place operations that it sees, which writes through ``.data``, numpy or a pointer are not. Linux
sees all, from 6.7 on: a page that is write-protected by userfaultfd(2) in its asynchronous mode loses the protection
when it is written, without a signal or a wait, and PAGEMAP_SCAN tells which pages have it (admin-guide/mm/pagemap).

It does not see writes by a device into pinned memory, nor by another process into shared memory. Such memory is
copied at once, and so is what shares a page with other data.
"""

import ctypes
import fcntl
import mmap
import os
import platform
import struct
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache

import torch

_SYSCALL = {"x86_64": 323, "aarch64": 282}  # userfaultfd(2)
_USER_MODE_ONLY = 1
_FEATURES = 1 << 0 | 1 << 13 | 1 << 15  # PAGEFAULT_FLAG_WP, WP_UNPOPULATED, WP_ASYNC
_API, _REGISTER, _PROTECT = 0xC018AA3F, 0xC020AA00, 0xC018AA06  # UFFDIO_API, UFFDIO_REGISTER, UFFDIO_WRITEPROTECT
_WRITES = 2  # UFFDIO_REGISTER_MODE_WP
_SCAN = 0xC0606610  # PAGEMAP_SCAN
_ARM, _REGISTERED_ONLY = 1, 2  # PM_SCAN_WP_MATCHING, PM_SCAN_CHECK_WPASYNC
_PROTECTABLE, _WRITTEN, _OF_FILE, _PRESENT = 1, 2, 4, 8  # PAGE_IS_WPALLOWED, PAGE_IS_WRITTEN, PAGE_IS_FILE, ..._PRESENT
_LEAST = 1 << 18  # bytes; smaller tensors are copied in less time than tracking takes
_MOST = 4096  # registered tensors; each takes up to two more of the 65,530 mappings that Linux allows a process


class WriteTracker:
    """Tracks writes to pages of this process, for one :class:`TrackedCopy` at a time.

    :func:`write_tracker` returns the one of the process. Raises OSError if the kernel does not track writes."""

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise OSError("only Linux tracks writes")
        libc = ctypes.CDLL(None, use_errno=True)
        self._copy = libc.process_vm_readv
        self._copy.restype = ctypes.c_ssize_t
        self._fault = libc.syscall(_SYSCALL.get(platform.machine(), -1), os.O_CLOEXEC | _USER_MODE_ONLY)
        if self._fault < 0:
            raise OSError(ctypes.get_errno(), "userfaultfd is not permitted")
        self._call(_API, 0xAA, _FEATURES, 0)
        self._pages = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self._registered = 0
        self.in_use = threading.Lock()  # held by a copy: protecting its pages again would hide what was written to them
        self._probe()

    def protect(self, tensor: torch.Tensor) -> range | None:
        """Track writes to the pages that lie within a contiguous host tensor, and return their addresses.

        None if they cannot be tracked, or are few. Call :meth:`unprotect` before they are written on purpose: each
        write to a protected page costs a fault."""
        begin, end = _addresses(tensor)
        start, stop = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if stop - start < _LEAST or tensor.device.type != "cpu" or tensor.is_pinned():
            return None
        pages = range(start, stop)
        with suppress(OSError):
            try:
                self._scan(pages, _ARM | _REGISTERED_ONLY)
            except PermissionError:  # not registered, or mapped anew since
                if self._registered == _MOST or not self._all(pages, _PRESENT, but=_OF_FILE):  # others may have it, too
                    return None
                self._registered += 1
                self._call(_REGISTER, start, stop - start, _WRITES, 0)
                self._scan(pages, _ARM | _REGISTERED_ONLY)
            return pages
        return None

    def written(self, pages: range) -> bool:
        """Return whether any page may have been written since :meth:`protect`. Raises OSError.

        All must be known to be protected still, so that pages that were unmapped count as written."""
        return not self._all(pages, _PROTECTABLE, but=_WRITTEN)

    def unprotect(self, pages: range) -> None:
        with suppress(OSError):  # then writing them costs a fault each, and nothing else
            self._call(_PROTECT, pages.start, len(pages), 0)

    def _all(self, pages: range, category: int, *, but: int) -> bool:
        """Return whether all pages are in ``category`` and none is in ``but``."""
        first = (ctypes.c_uint64 * 3)()  # begin, end and categories of the first run of such pages
        found = self._scan(pages, 0, ctypes.addressof(first), 1, 0, but, category | but, 0, category | but)
        return found == 1 and (first[0], first[1]) == (pages.start, pages.stop)

    def _scan(self, pages: range, flags: int, *values: int) -> int:
        scan = bytearray(struct.pack("12Q", 96, flags, pages.start, pages.stop, 0, *(values or [0] * 7)))
        return int(fcntl.ioctl(self._pages, _SCAN, scan))

    def _call(self, request: int, *values: int) -> None:
        fcntl.ioctl(self._fault, request, bytearray(struct.pack(f"{len(values)}Q", *values)))

    def _probe(self) -> None:
        """Raise OSError unless a write is found, and only that."""
        memory = torch.full((2 * _LEAST,), 7, dtype=torch.uint8)
        pages = self.protect(memory)
        if pages is None or self.written(pages):
            raise OSError("the kernel does not protect pages asynchronously")
        memory.data[_LEAST] = 1
        if not self.written(pages):
            raise OSError("the kernel does not tell of writes")
        self.unprotect(pages)
        if not self.copy(memory.data_ptr(), memory.data_ptr() + _LEAST, 1) or memory[0] != 1:
            raise OSError("a process may not read its own memory through the kernel")

    def copy(self, target: int, start: int, nbytes: int) -> bool:
        """Copy memory of this process. Return False if it is gone, which would end the process in a plain copy."""
        while nbytes > 0:
            local, there = ((ctypes.c_size_t * 2)(address, nbytes) for address in (target, start))  # struct iovec
            done = self._copy(os.getpid(), local, ctypes.c_ulong(1), there, ctypes.c_ulong(1), ctypes.c_ulong(0))
            if done <= 0:
                return False
            target, start, nbytes = target + done, start + done, nbytes - done
        return True


class TrackedCopy:
    """Copies host tensors, most of them in :meth:`finish`, and tells whether any was written before it was copied.

    Tensors that cannot be tracked are copied at once.

    Args:
        tracker: Its ``in_use`` is held; :meth:`finish` releases it.
        pairs: 1-d contiguous sources, and buffers of the same sizes.
    """

    def __init__(self, tracker: WriteTracker, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._tracker = tracker
        # Sources, their addresses, targets, and pages.
        self._left: list[tuple[torch.Tensor, tuple[int, int], int, range]] = []
        try:
            for source, buffer in pairs:
                self._begin(source, buffer)
        except BaseException:
            self._end()
            raise

    def finish(self) -> bool:
        """Copy the rest. Return whether the copies hold the values that the sources had in the beginning."""
        try:
            whole = all([self._copied(*one) for one in self._left])  # noqa: C419 - all memory is to be unprotected
            for source, addresses, _, pages in self._left:  # once all are known: sources may share pages
                if _addresses(source) == addresses:
                    self._tracker.unprotect(pages)
        finally:
            self._end()
        return whole

    def _copied(self, source: torch.Tensor, addresses: tuple[int, int], target: int, pages: range) -> bool:
        """Copy one source. Return whether it was not written, and its storage has the memory that it had.

        A storage may get other memory, as by ``share_memory_()`` or ``resize_()``. Pages must be read before they are
        looked at: reading memory that was given back to the system makes a page that was never protected."""
        try:
            copied = self._tracker.copy(target, pages.start, len(pages)) and not self._tracker.written(pages)
        except OSError:
            return False
        return copied and _addresses(source) == addresses

    def _begin(self, source: torch.Tensor, buffer: torch.Tensor) -> None:
        pages = self._tracker.protect(source)
        if pages is None:
            buffer.copy_(source)
            return
        begin, end = _addresses(source)
        self._left.append((source, (begin, end), buffer.data_ptr() + pages.start - begin, pages))
        for start, stop in ((begin, pages.start), (pages.stop, end)):  # they share their pages with other data
            ctypes.memmove(buffer.data_ptr() + start - begin, start, stop - start)

    def _end(self) -> None:
        self._left.clear()  # pages that an error left protected only cost a fault each when they are written
        self._tracker.in_use.release()


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size()


def write_tracker() -> WriteTracker | None:
    """Return the tracker of this process, None where the system has none."""
    return _tracker_of(os.getpid())  # a forked child's memory is another one


@lru_cache(maxsize=1)
def _tracker_of(_: int) -> WriteTracker | None:
    try:
        return WriteTracker()
    except (OSError, AttributeError):  # another system, an older kernel, or a sandbox that does not permit it
        return None
