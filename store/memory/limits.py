"""Check the limits of shared memory and reserve it before anything is written.

Missing memory kills: a page that the filesystem cannot back raises SIGBUS, one over the control group's limit brings
the out-of-memory killer. Memory is reserved in small, checked steps, as a node's ranks reserve at the same time."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from store.errors import StorageError

_SPARE = 0.05  # share of the machine's memory that is left to other processes
_STEP = 8 << 20  # bytes reserved at a time
_AT_ONCE = 16 * _STEP  # bytes left free in a control group, because other processes may reserve at the same moment
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
"""Control groups: files with the limit and the usage, and the key of cached pages in ``memory.stat``."""


def reserve(descriptor: int, nbytes: int, path: Path) -> None:
    """Resize a file to ``nbytes`` with all pages reserved. Raises StorageError, saying what to do, if that fails."""
    before = os.fstat(descriptor).st_size
    _require(_lacking(descriptor, nbytes), path)
    try:
        os.ftruncate(descriptor, nbytes)
        there = not _lacking(descriptor, nbytes) and os.lseek(descriptor, 0, os.SEEK_HOLE) == nbytes
        for start in range(0, 0 if there else nbytes, _STEP):
            size = min(_STEP, nbytes - start)
            _require(min(size, _lacking(descriptor, nbytes)), path, nbytes)
            os.posix_fallocate(descriptor, start, size)
    except (OSError, StorageError) as error:
        with suppress(OSError):
            os.ftruncate(descriptor, min(nbytes, before))
        if isinstance(error, StorageError):
            raise
        raise StorageError(_no_room(nbytes, path, f"it refused: {error.strerror}")) from error


def _lacking(descriptor: int, nbytes: int) -> int:
    return max(0, nbytes - os.fstat(descriptor).st_blocks * 512)


def free_bytes(folder: Path) -> int:
    """Return the bytes that may be reserved below ``folder`` now: the lowest of all limits."""
    return min(free for free, _ in _limits(folder))


def _require(nbytes: int, path: Path, wanted: int | None = None) -> None:
    """Raise StorageError unless ``nbytes``, of ``wanted`` in all, may be reserved."""
    for free, what in _limits(path.parent) if nbytes else ():
        if nbytes > free:
            raise StorageError(_no_room(wanted or nbytes, path, f"{what} {size_text(max(0, free))}"))


def _limits(folder: Path) -> list[tuple[int, str]]:
    found = []
    with suppress(OSError):
        status = os.statvfs(folder)
        found.append((status.f_bavail * status.f_frsize, "the filesystem has"))
    memory = psutil.virtual_memory()
    found.append((int(memory.available - _SPARE * memory.total), "the machine has, beside what is kept for others,"))
    group = cgroup_free_bytes()
    if group is not None:
        found.append((group - _AT_ONCE, "the control group may take, beside what is kept for others,"))
    return found


def cgroup_free_bytes(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return the bytes left to this process's control group and its ancestors; None without a limit."""
    with suppress(OSError):
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
        left = [
            found
            for _, controllers, path in (line for line in lines if len(line) == 3)
            for found in _left(root, controllers, path.lstrip("/"))
        ]
        return min(left, default=None)
    return None


def _left(root: Path, controllers: str, path: str) -> Iterator[int]:
    """Yield the bytes left in one hierarchy: version 2 (no controllers) or the memory controller of version 1."""
    if controllers and "memory" not in controllers.split(","):
        return
    top = root / controllers
    limit, used, cached = _VERSION_1 if controllers else _VERSION_2
    folder = top / path
    for place in (folder, *folder.parents):
        with suppress(OSError, ValueError):
            yield int((place / limit).read_text()) - int((place / used).read_text()) + _reclaimable(place, cached)
        if place == top:
            break


def _reclaimable(place: Path, cached: str) -> int:
    with suppress(OSError, ValueError):
        for line in (place / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == cached:
                return int(value)
    return 0


def _no_room(nbytes: int, path: Path, why: str) -> str:
    return (
        f"no room in memory for {size_text(nbytes)} more at {path.parent}: {why}. Give the job more (docker run "
        "--shm-size, in Kubernetes an emptyDir with `medium: Memory` at /dev/shm), or set `memory: {versions: 1}`, "
        "which takes half of it, or `memory: {enabled: false}`"
    )


def size_text(nbytes: int) -> str:
    """Return a number of bytes in MB or GB."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"
