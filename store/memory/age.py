"""How long ago a rank's memory was last written, by a clock that nobody sets: seconds since the machine started.

It stands where a file's time of change does, on the file that the rank's process locks: that can be set without opening
the file, which would cost the process its lock. What stands there may also be of the wall's clock, which is ahead of
the machine's by decades, or of a start of the machine before this one: then the wall's clock has to do.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from store.memory.tier import Generation


def boot_seconds() -> float:
    """Since the machine started, while it slept, too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def date(owner: Path) -> None:
    """What the rank has counts as written now. OSError."""
    now = boot_seconds()
    os.utime(owner, (now, now))


def age(place: Generation, rank: int, now: float) -> float:
    """Seconds since a rank's memory was written. now: see :func:`boot_seconds`."""
    written = _changed(place.owner(rank))
    if 0.0 < written <= now:
        return now - written
    return time.time() - max(_changed(path) for path in place.of(rank))


def _changed(path: Path) -> float:
    with suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0
