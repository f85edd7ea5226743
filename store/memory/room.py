"""How much memory the tier may take: asked, and taken, before anything is written to it.

Shared memory that is not there kills: a page of a file that the filesystem cannot back raises SIGBUS, and one that
the control group cannot pay for brings the out-of-memory killer. So room is looked for first and then reserved.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil

from store.errors import StorageError

_SPARE = 0.05
"""Of the memory that there is: left to everybody else."""


def reserve(descriptor: int, nbytes: int, path: Path) -> None:
    """Have the file be ``nbytes`` long, all of it backed. StorageError, saying what to do, where there is no room."""
    there = os.fstat(descriptor)
    more = nbytes - there.st_blocks * 512
    if more > 0:
        _require(more, path)
    try:
        os.ftruncate(descriptor, nbytes)
        if nbytes:
            os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        with suppress(OSError):
            os.ftruncate(descriptor, min(nbytes, there.st_size))
        raise StorageError(_no_room(nbytes, path, f"it refused: {error.strerror}")) from error


def free_bytes(folder: Path) -> int:
    """What may be taken below ``folder`` now, in bytes: the least of what anything allows."""
    return min(found for found, _ in _limits(folder))


def _require(nbytes: int, path: Path) -> None:
    for free, what in _limits(path.parent):
        if nbytes > free:
            raise StorageError(_no_room(nbytes, path, f"{what} {_size(max(0, free))}"))


def _limits(folder: Path) -> list[tuple[int, str]]:
    found = []
    with suppress(OSError):
        status = os.statvfs(folder)
        found.append((status.f_bavail * status.f_frsize, "the filesystem has"))
    memory = psutil.virtual_memory()
    found.append((int(memory.available - _SPARE * memory.total), "the machine has, beside what is kept for others,"))
    group = _group_room(Path("/sys/fs/cgroup"))
    if group is not None:
        found.append((group, "the control group may take"))
    return found


def _group_room(root: Path) -> int | None:
    """Bytes left to this process's control group (version 2), None where there is no limit."""
    with suppress(OSError, ValueError, IndexError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line.split(":", 2)[2] for line in lines if line.startswith("0::"))
        folder = root / own.strip().lstrip("/")
        found = []
        for place in (folder, *folder.parents):
            if place == root.parent:
                break
            with suppress(OSError, ValueError):
                limit = int((place / "memory.max").read_text())
                found.append(limit - int((place / "memory.current").read_text()) + _reclaimable(place))
        return min(found, default=None)
    return None


def _reclaimable(place: Path) -> int:
    """Cached pages of files on disk: the kernel gives them up first."""
    with suppress(OSError, ValueError, IndexError, StopIteration):
        for line in (place / "memory.stat").read_text().splitlines():
            name, value = line.split()
            if name == "inactive_file":
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
