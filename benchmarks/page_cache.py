"""Files out of the page cache and into it, and how much of them is there: asked of the kernel, not assumed."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy

_LEFT = 0.01
"""Share of a folder that may stay in the page cache when it counts as cold."""


def chill(folder: Path) -> str | None:
    """Have the files below a folder read from the disk the next time. How it was done, None where nothing worked.

    First file by file, which leaves everything else as it is; else the whole cache, which needs root. What lies below
    the kernel, as a hypervisor's cache, is not reached by either."""
    os.sync()
    for path in _files(folder):
        _advised(path, os.POSIX_FADV_DONTNEED)
    if cached_share(folder) <= _LEFT:
        return "posix_fadvise(DONTNEED) on each file"
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        return None
    return "drop_caches" if cached_share(folder) <= _LEFT else None


def warm(folder: Path) -> None:
    """Read all files below a folder once."""
    for path in _files(folder):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def cached_share(folder: Path) -> float:
    """Share of the pages of all files below a folder that are in the page cache; 0 of nothing."""
    there = pages = 0
    for path in _files(folder):
        found = _resident(path)
        there, pages = there + int(found.sum()), pages + len(found)
    return there / pages if pages else 0.0


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size)


def _advised(path: Path, advice: int) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, advice)
    finally:
        os.close(descriptor)


def _resident(path: Path) -> numpy.ndarray:
    """For each page of a file, whether it is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        found = numpy.zeros(-(-len(mapped) // mmap.PAGESIZE), dtype=numpy.uint8)
        view = numpy.frombuffer(mapped, dtype=numpy.uint8)
        address, length = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(mapped))
        failed = libc.mincore(address, length, ctypes.c_void_p(found.ctypes.data))
        del view
        if failed:
            raise OSError(ctypes.get_errno(), f"mincore refuses {path}")
    return found & 1
