"""How much room the disk of a store has, for this user."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Disk:
    """Bytes: free for this user, and in all. files: how many more may be made; None where the system does not limit."""

    free: int
    total: int
    files: int | None


def disk_of(root: Path) -> Disk | None:
    """None where the system does not tell."""
    try:
        found = os.statvfs(root)
    except OSError:
        return None
    files = found.f_favail if found.f_files else None
    return Disk(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize, files)
