"""Copy host memory beside training, and detect every write to it before it is copied, whatever code makes it.

Autograd counts the in-place operations that it sees, which writes through ``.data``, numpy or a pointer are not. Linux
sees all, from 6.7 on: a page that is write-protected by userfaultfd(2) in its asynchronous mode loses the protection
when it is written, without a signal or a wait, and PAGEMAP_SCAN lists protected pages (admin-guide/mm/pagemap).

It sees no writes by devices into pinned memory, nor by other processes into shared memory. These are copied at once, as
is what shares a page with other data. Elsewhere :class:`SourceSample` finds most writes autograd does not count."""

import ctypes
import fcntl
import mmap
import os
import platform
import struct
import sys
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, chain, groupby
from operator import attrgetter, is_
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from monitor.adapters.identity import Integers, MemoryRegions
from monitor.background import Beside, Once, alone
from monitor.observe.units import LocalUnit, UnitLayout

_SYSCALL = {"x86_64": 323, "aarch64": 282}  # userfaultfd(2)
_USER_MODE_ONLY = 1
_FEATURES = 1 << 0 | 1 << 13 | 1 << 15  # PAGEFAULT_FLAG_WP, WP_UNPOPULATED, WP_ASYNC
_API, _REGISTER, _PROTECT = 0xC018AA3F, 0xC020AA00, 0xC018AA06  # UFFDIO_API, UFFDIO_REGISTER, UFFDIO_WRITEPROTECT
_WRITES = 2  # UFFDIO_REGISTER_MODE_WP
_SCAN = 0xC0606610  # PAGEMAP_SCAN
_ARM, _REGISTERED_ONLY = 1, 2  # PM_SCAN_WP_MATCHING, PM_SCAN_CHECK_WPASYNC
_PROTECTABLE, _WRITTEN, _OF_FILE, _PRESENT = 1, 2, 4, 8  # PAGE_IS_WPALLOWED, PAGE_IS_WRITTEN, PAGE_IS_FILE, ..._PRESENT
_HUGE, _COLLAPSE = 1 << 21, 25  # bytes of a huge page; MADV_COLLAPSE, from Linux 6.1 on
_SMALL, _TOGETHER = 1 << 13, 1 << 24  # bytes of regions that are copied together: of each, and of all at most
_LEAST, _PART = 3 << 16, 3 << 13  # bytes of whole pages; less is copied in less time than tracked, alone or near others
_GAP = 1 << 16  # bytes at most between blocks that are protected as one
_STEP = 1 << 22  # bytes of blocks that are copied together, and then checked
_BATCH, _BYTES = 1024, 1 << 30  # regions (IOV_MAX) and bytes that one call copies; Linux stops below 2 GiB
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
        self._advise = libc.madvise
        self._consolidated: dict[tuple[int, int], int] = {}  # how far each range is on huge pages
        self._fault = libc.syscall(_SYSCALL.get(platform.machine(), -1), os.O_CLOEXEC | _USER_MODE_ONLY)
        if self._fault < 0:
            raise OSError(ctypes.get_errno(), "userfaultfd is not permitted")
        self._call(_API, 0xAA, _FEATURES, 0)
        self._pages = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self._registered = 0
        self.in_use = threading.Lock()  # held by a copy: protecting its pages again would hide what was written to them
        self._probe()

    def protect(self, pages: range) -> range | None:
        """Track writes to pages of host memory, each at the cost of a fault. Return them; None if it cannot be done."""
        with suppress(OSError):
            try:
                self._scan(pages, _ARM | _REGISTERED_ONLY)
            except PermissionError:  # not registered, or mapped anew since
                if self._registered == _MOST or not self._all(pages, _PRESENT, but=_OF_FILE):  # others may have it, too
                    return None
                self._call(_REGISTER, pages.start, len(pages), _WRITES, 0)
                self._registered += 1
                self._consolidated.pop((pages.start, pages.stop), None)  # that was other memory
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

    def consolidate(self, pages: range, stop: Callable[[], bool]) -> None:
        """Move memory to huge pages, once, until ``stop()``: then protecting it is 500 times as fast. Any thread."""
        key = pages.start, pages.stop
        first = self._consolidated.get(key, -(-pages.start // _HUGE) * _HUGE)
        for at in range(first, pages.stop // _HUGE * _HUGE, _HUGE):
            if stop():
                return
            self._advise(ctypes.c_void_p(at), ctypes.c_size_t(_HUGE), _COLLAPSE)  # where it fails, pages stay small
            self._consolidated[key] = at + _HUGE

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
        memory = torch.full((2 * _LEAST,), 7, dtype=torch.uint8, device="cpu")
        begin = memory.data_ptr()
        start, stop = (-(-at // mmap.PAGESIZE) * mmap.PAGESIZE for at in (begin, begin + _LEAST))
        pages = self.protect(range(start, stop))
        if pages is None or self.written(pages):
            raise OSError("the kernel does not protect pages asynchronously")
        memory.data[_LEAST // 2] = 1
        if not self.written(pages):
            raise OSError("the kernel does not tell of writes")
        self.unprotect(pages)
        if not self.copy(begin, begin + _LEAST // 2, 1) or memory[0] != 1:
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

    def copy_all(self, sources: Integers, sizes: Integers, targets: Integers) -> None:
        """Copy many regions of this process, in few calls. Raises OSError if one is gone."""
        chosen = sizes > 0
        there, here = (np.stack([which[chosen], sizes[chosen]], axis=1) for which in (sources, targets))  # struct iovec
        for first in range(0, len(there), _BATCH):
            count, expected = len(there[first : first + _BATCH]), int(there[first : first + _BATCH, 1].sum())
            if expected <= _BYTES:
                local, remote = (ctypes.c_void_p(one[first:].ctypes.data) for one in (here, there))
                number = ctypes.c_ulong(count)
                done = self._copy(os.getpid(), local, number, remote, number, ctypes.c_ulong(0))
                if done == expected:
                    continue
            batch = (one[first:][:count].tolist() for one in (there, here))
            for (start, nbytes), (target, _) in zip(*batch, strict=True):
                if not self.copy(target, start, nbytes):
                    raise OSError(ctypes.get_errno(), "memory to be copied is gone")


class CopyPlan:
    """Sources and targets of a copy, and the pages in which most of the sources lie. Saves of the same memory share it.

    ``targets`` are addresses, one for each of ``regions``."""

    def __init__(self, regions: MemoryRegions, targets: Integers) -> None:
        self.regions, self.targets = regions, targets
        order = np.argsort(regions.addresses, kind="stable")
        begins, ends = regions.addresses[order], (regions.addresses + regions.sizes)[order]
        self._order, self._all = order, (begins, ends, targets[order])
        runs = _runs(_blocks(*self._all, regions.pageable[order]))
        self.runs = [run for run in runs if sum(len(block.pages) for block in run) >= _LEAST]
        self._whole = self._parts([block for run in self.runs for block in run])

    def parts(self, blocks: Sequence["_Block"]) -> "_Parts":
        """Return how to copy ``blocks``, and the regions beside them."""
        if len(blocks) < sum(map(len, self.runs)):
            return self._parts(blocks)
        steps, held, (outside, small, views) = found = self._whole
        if views is None:  # these hold no memory. Not at the first call, as many plans are used once
            small = [one for one in outside if one[2] <= _SMALL]
            few = bisect_right(list(accumulate(size for *_, size in small)), _TOGETHER)
            views = [_view(source, size, 0x100) for _, source, size in small[:few]]
            self._whole = steps, held, ([one for one in outside if one[2] > _SMALL] + small[few:], small[:few], views)
        return found

    def _parts(self, blocks: Sequence["_Block"]) -> "_Parts":
        begins, ends, targets = self._all
        first, last = ends.copy(), ends.copy()
        held: list[int] = []
        for block in blocks:  # their edges share pages with other data
            first[block.members], last[block.members] = block.pages.start, block.pages.stop
            held += self._order[block.members].tolist()
        heads, tails = np.minimum(ends, first) - begins, ends - np.maximum(begins, last)
        sizes = np.maximum(np.concatenate([heads, tails]), 0)
        sources = np.concatenate([begins, ends - tails])
        where = np.concatenate([targets, targets + ends - tails - begins])
        outside = zip(*(which[sizes > 0].tolist() for which in (where, sources, sizes)), strict=True)
        return _steps(blocks), held, (list(outside), [], None)


class LastPlans:
    """Keeps the regions of units and the plans of their copies: mostly the same memory goes into the same buffers."""

    def __init__(self) -> None:
        self._regions = deque[tuple[Sequence[UnitLayout], MemoryRegions, Integers, list[int] | None]](maxlen=2)
        self._plans = deque[CopyPlan](maxlen=4)  # of saves, and of snapshots, whose buffers take turns

    def sources(self, parts: Sequence[LocalUnit]) -> tuple[MemoryRegions, Sequence[torch.Tensor], Integers]:
        """Return for all pieces: regions, the tensors that they lie in, and at which byte of these they begin."""
        layouts = list(map(attrgetter("layout"), parts))
        same = (one for one in self._regions if len(layouts) == len(one[0]) and all(map(is_, layouts, one[0])))
        if (found := next(same, None)) is None:
            regions = MemoryRegions.joined([layout.regions for layout in layouts])
            firsts = np.concatenate([layout.firsts for layout in layouts])
            spans = [layout.spans for layout in layouts]
            places = None if None in spans else [index for span in spans for index, _ in span or ()]
            found = layouts, regions, firsts, places
            self._regions.appendleft(found)
        _, regions, firsts, places = found
        if not places:  # pieces do not all lie in tensors of the job's identity
            return regions, list(chain(*(part.sources for part in parts))), firsts
        return regions, list(map(parts[0].owners.__getitem__, places)), firsts

    def plan(self, regions: MemoryRegions, targets: Integers) -> CopyPlan:
        for plan in self._plans:
            if plan.regions is regions and np.array_equal(plan.targets, targets):
                return plan
        self._plans.appendleft(CopyPlan(regions, targets))
        return self._plans[0]


_Region = tuple[int, int, int]  # target, source, size
_Outside = tuple[list[_Region], list[_Region], list[memoryview] | None]  # others, small ones, their views
_Parts = tuple[Sequence["_Step"], list[int], _Outside]  # how to copy blocks, indices of their regions, others


class TrackedCopy:
    """Copies host memory, most of it in :meth:`finish`, and detects whether any was written before it was copied.

    Memory that cannot be tracked is copied at once. The caller has acquired the tracker's ``in_use``; :meth:`finish`
    releases it. ``owners``: for each region the tensor in whose memory it lies; a script may give it other memory."""

    def __init__(self, tracker: WriteTracker, plan: CopyPlan, owners: Sequence[torch.Tensor]) -> None:
        self._tracker = tracker
        self._protected: list[range] = []  # the blocks, and what little lies between them
        self._steps: Sequence[_Step] = ()
        self._storages: list[torch.UntypedStorage] = []  # keeps the memory from being freed
        self._small: tuple[list[_Region], bytes] = [], b""  # regions, and their values
        try:
            self._begin(plan, owners)
        except BaseException:
            self._end()
            raise

    def finish(self, beside: Beside = alone) -> bool:
        """Copy the rest. Return whether the copies hold the values that the sources had in the beginning.

        They do not if a storage got other memory meanwhile, as by ``share_memory_()`` or ``resize_()``."""
        try:
            at = ctypes.cast(ctypes.c_char_p(self._small[1]), ctypes.c_void_p).value or 0
            for target, _, size in self._small[0]:
                _move(target, at, size)
                at += size
            calls = [Once(partial(self._copy, step)) for step in self._steps]
            whole = beside(calls, lambda: all(call() for call in calls))
            whole = whole and self._places == list(map(torch.UntypedStorage.data_ptr, self._storages))
            for pages in self._protected:  # once all are known: blocks may share pages
                self._tracker.unprotect(pages)
        finally:
            self._end()
        return whole

    def consolidate(self, stop: Callable[[], bool]) -> None:
        """Make the next copy of the same memory begin faster. Call it after :meth:`finish`, in the background."""
        for pages in self._protected:
            self._tracker.consolidate(pages, stop)

    def _copy(self, step: "_Step") -> bool:
        """Copy blocks. Return False if one was written, or is gone.

        Copy before asking for writes: reading memory that was given back to the system creates a page that was never
        protected, so it counts as written."""
        try:
            self._tracker.copy_all(*step.regions)
            return not self._tracker.written(step.pages) or not any(map(self._tracker.written, step.blocks))
        except OSError:
            return False

    def _begin(self, plan: CopyPlan, owners: Sequence[torch.Tensor]) -> None:
        blocks: list[_Block] = []
        for run in plan.runs:
            tracked = [self._tracker.protect(range(run[0].pages.start, run[-1].pages.stop))]
            if tracked[0] is None and len(run) > 1:  # there may be other memory between the blocks
                tracked = [self._tracker.protect(b.pages) if len(b.pages) >= _LEAST else None for b in run]
            self._protected += [pages for pages in tracked if pages is not None]
            blocks += [b for b, pages in zip(run, tracked * (len(run) // len(tracked)), strict=True) if pages]
        self._steps, held, (others, small, views) = plan.parts(blocks)
        self._storages = list(map(torch.Tensor.untyped_storage, map(owners.__getitem__, held)))
        self._places = list(map(torch.UntypedStorage.data_ptr, self._storages))
        self._small = small, b"".join(views or ())  # to one place first, which takes half the time of a call for each
        for target, source, size in others:  # of memory that is not gone, and visible to this host
            (_move if size < _LEAST else ctypes.memmove)(target, source, size)

    def _end(self) -> None:
        self._steps = ()  # pages that an error left protected only cost a fault each when they are written
        self._storages.clear()
        self._small = [], b""
        self._tracker.in_use.release()


@dataclass(frozen=True)
class _Block:
    """Regions without gaps between them, and the pages that lie within.

    begins, ends, targets: of all regions, by address. members: those of the block."""

    pages: range
    members: slice
    begins: Integers
    ends: Integers
    targets: Integers

    def inner(self) -> tuple[Integers, Integers, Integers]:
        """Return sources, sizes and targets of what the pages hold of each region."""
        begins, ends = self.begins[self.members], self.ends[self.members]
        sources = np.maximum(begins, self.pages.start)
        sizes = np.minimum(ends, self.pages.stop) - sources
        return sources, np.maximum(sizes, 0), self.targets[self.members] + sources - begins


def _blocks(begins: Integers, ends: Integers, targets: Integers, pageable: npt.NDArray[np.bool_]) -> list[_Block]:
    """Return the blocks of pageable regions that have enough pages to be tracked."""
    if not len(begins):
        return []
    apart = np.flatnonzero((begins[1:] != ends[:-1]) | (pageable[1:] != pageable[:-1])) + 1
    firsts, afters = np.concatenate(([0], apart)), np.concatenate((apart, [len(begins)]))
    starts = -(-begins[firsts] // mmap.PAGESIZE) * mmap.PAGESIZE
    stops = ends[afters - 1] // mmap.PAGESIZE * mmap.PAGESIZE
    large = pageable[firsts] & (stops - starts >= _PART)
    found = np.stack((starts, stops, firsts, afters), axis=1)[large].tolist()
    return [_Block(range(start, stop), slice(one, after), begins, ends, targets) for start, stop, one, after in found]


def _runs(blocks: Sequence[_Block]) -> list[list[_Block]]:
    """Group blocks that are near each other. Protected as one, they can be on huge pages.

    Writes between them cost a fault for each page, and do not count as writes to them: what lies between is less."""
    runs: list[list[_Block]] = []
    for block in blocks:
        last = runs[-1][-1].pages if runs else block.pages
        if 0 <= block.pages.start - last.stop <= min(_GAP, len(last) // 4, len(block.pages) // 4):
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


@dataclass(frozen=True)
class _Step:
    """Blocks near each other that one call copies. pages: with those between. regions: sources, sizes, targets."""

    pages: range
    blocks: Sequence[range]
    regions: Sequence[Integers]


def _steps(blocks: Sequence[_Block]) -> list[_Step]:
    groups = (list(some) for run in _runs(blocks) for _, some in groupby(run, lambda one: one.pages.start // _STEP))
    return [
        _Step(
            range(some[0].pages.start, some[-1].pages.stop),
            [block.pages for block in some],
            list(map(np.concatenate, zip(*(block.inner() for block in some), strict=True))),
        )
        for some in groups
    ]


_move = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)
"""``memmove`` that keeps the interpreter's lock: a small copy takes less time than to get the lock back."""

_prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view = _prototype(("PyMemoryView_FromMemory", ctypes.pythonapi))  # of address, size, 0x100 (PyBUF_READ)


def write_tracker() -> WriteTracker | None:
    """Return the tracker of this process; None if the system does not support it."""
    return _tracker_of(os.getpid())  # a forked child has other memory, so it needs its own


@lru_cache(maxsize=1)
def _tracker_of(_: int) -> WriteTracker | None:
    try:
        return WriteTracker()
    except (OSError, AttributeError):  # another system, an older kernel, or a sandbox that does not permit it
        return None


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAMPLED = 64

Pair = tuple[torch.Tensor, torch.Tensor]  # a source and its buffer
Words = dict[int, list[Any]]
"""Views by the size of an element: of numpy in host memory, where many small ones cost less, else of torch."""


class SourceSample:
    """Elements of tensors on one device, at most 64 of each, evenly spread, compared bit by bit with what they were.

    It finds what autograd's version counters miss: writes through ``.data``, or by code outside PyTorch. A change
    between the sampled elements is not found. Built and compared in the stream of the copies. ``pairs`` are sources
    copied as they are, and their host buffers; ``views`` are sampled views of more of these; ``others`` are encoded."""

    def __init__(
        self, pairs: Sequence[Pair], others: Sequence[torch.Tensor], views: tuple[Words, Words] | None = None
    ) -> None:
        self._pairs, self._views = pairs, views
        copied = sampled([source for source, _ in pairs])
        self._copied = _joined(copied, views[0]) if views else copied
        self._encoded = sampled(others)
        self._before = self._after = _values(self._copied), _values(self._encoded)

    def read_again(self) -> None:
        """Read the sources, after their copies and before anything that may change them."""
        self._after = _values(self._copied), _values(self._encoded)

    def holds(self) -> bool:
        """Return whether the sources, when last read, and the filled buffers have the values of the beginning."""
        kept = sampled([buffer for _, buffer in self._pairs])
        buffers = _values(_joined(kept, self._views[1]) if self._views else kept)
        found = (self._before[0], buffers), *zip(self._before, self._after, strict=True)
        return all(_equal(before, now) for before, now in found)


def sampled(tensors: Sequence[torch.Tensor]) -> Words:
    """Return views of the sampled elements of each tensor."""
    views: Words = {}
    for tensor in tensors:
        last = tensor.numel() - 1
        if last >= 0:
            size = tensor.element_size()
            bits = tensor.view(_WORDS[size])  # integers are equal where all bits are, those of NaN too
            words: Any = bits if bits.is_cuda else bits.numpy()
            stride = max(1, -(-last // (_SAMPLED - 2)))
            views.setdefault(size, []).extend((words[:1], words[last % stride :: stride]))
    return views


def _joined(one: Words, other: Words) -> Words:
    return {size: [*one.get(size, ()), *other.get(size, ())] for size in one | other}


def _values(views: Words) -> dict[int, Any]:
    return {
        size: torch.cat(found) if isinstance(found[0], torch.Tensor) else np.concatenate(found)
        for size, found in views.items()
    }


def _equal(one: dict[int, Any], other: dict[int, Any]) -> bool:
    return all(np.array_equal(_on_host(values), _on_host(other[size])) for size, values in one.items())


def _on_host(values: Any) -> Any:
    return values.cpu().numpy() if isinstance(values, torch.Tensor) else values
