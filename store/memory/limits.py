"""How much memory the tier may take: asked, and taken, before anything is written to it.

Shared memory that is not there kills: a page of a file that the filesystem cannot back raises SIGBUS, and one that
the control group cannot pay for brings the out-of-memory killer. So room is looked for first and then reserved, a
little at a time: the other ranks of the node do the same at the same moment, and each is to see what the others took.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from store.errors import StorageError

_SPARE = 0.05
"""Of the memory that there is: left to everybody else."""

_STEP = 8 << 20
"""Bytes that are reserved at a time."""

_AT_ONCE = 16 * _STEP
"""What may be taken before anybody who looked a moment earlier knows of it: left in a control group."""

_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
"""Of control groups: the files with what is allowed and used, and the cached pages in ``memory.stat``."""


def reserve(descriptor: int, nbytes: int, path: Path) -> None:
    """Have the file be ``nbytes`` long, all of it backed. StorageError, saying what to do, where there is no room."""
    before = os.fstat(descriptor).st_size
    _require(_lacking(descriptor, nbytes), path)
    try:
        os.ftruncate(descriptor, nbytes)
        for start in range(0, nbytes, _STEP):
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
    """Bytes of the file that are not backed yet."""
    return max(0, nbytes - os.fstat(descriptor).st_blocks * 512)


def free_bytes(folder: Path) -> int:
    """What may be taken below ``folder`` now, in bytes: the least of what anything allows."""
    return min(found for found, _ in _limits(folder))


def _require(nbytes: int, path: Path, wanted: int | None = None) -> None:
    """Room for so many bytes, of ``wanted`` in all. StorageError."""
    for free, what in _limits(path.parent) if nbytes else ():
        if nbytes > free:
            raise StorageError(_no_room(wanted or nbytes, path, f"{what} {_size(max(0, free))}"))


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
    """Bytes left to this process's control group and to those above it; None where there is no limit."""
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
    """Of one hierarchy: version 2, which has no controllers in its name, or the memory controller of version 1."""
    if controllers and "memory" not in controllers.split(","):
        return
    top = root / controllers
    limit, used, cached = _VERSION_1 if controllers else _VERSION_2
    folder = top / path
    for place in (folder, *folder.parents):
        with suppress(OSError, ValueError):
            allowed = int((place / limit).read_text())
            yield allowed - int((place / used).read_text()) + _reclaimable(place, cached)
        if place == top:
            break


def _reclaimable(place: Path, cached: str) -> int:
    """Cached pages of files on disk: the kernel gives them up first."""
    with suppress(OSError, ValueError):
        for line in (place / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == cached:
                return int(value)
    return 0


def _no_room(nbytes: int, path: Path, why: str) -> str:
    return (
        f"no room in memory for {_size(nbytes)} more at {path.parent}: {why}. Give the job more (docker run "
        "--shm-size, in Kubernetes an emptyDir with `medium: Memory` at /dev/shm), or set `memory: {versions: 1}`, "
        "which takes half of it, or `memory: {enabled: false}`"
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"
