"""Filesystems for the time of a test: small ones of their own, and shared memory."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def tmpfs(place: Path, size: str) -> Iterator[Path]:
    """A tmpfs of ``size`` (as ``mount`` takes it) at ``place``. Skips, loudly, where nothing can be mounted."""
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here, so a small filesystem is NOT tested: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@contextmanager
def shared_memory(prefix: str = "driftpoint-") -> Iterator[Path]:
    """A new folder in shared memory, or on the disk where there is none."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix=prefix, dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


def fill(disk: Path, leave: int) -> Path:
    """Write a file that leaves ``leave`` bytes free, and return it."""
    ballast = disk / "ballast"
    status = os.statvfs(disk)
    ballast.write_bytes(bytes(status.f_bavail * status.f_bsize - leave))
    return ballast
