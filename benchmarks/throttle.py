"""Reads from a disk slowed down to a rate, as of storage that a node shares with others. Linux, root."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/blkio")
_V2 = Path("/sys/fs/cgroup")


@contextmanager
def throttled(folder: Path, rate: float) -> Iterator[bool]:
    """This process, and what it starts inside, read the disk of ``folder`` at ``rate`` bytes/s together.

    Gives False, and says why, where that cannot be had."""
    device = os.stat(folder).st_dev  # noqa: PTH116
    disk = f"{os.major(device)}:{os.minor(device)}"
    if _V1.is_dir():
        home, name, line = _V1, "blkio.throttle.read_bps_device", f"{disk} {int(rate)}"
    else:
        home, name, line = _V2, "io.max", f"{disk} rbps={int(rate)}"
    group = home / f"driftpoint-bench-{os.getpid()}"
    try:
        group.mkdir()
        (group / name).write_text(line)
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        print(f"NOT MEASURED: a slow disk. No control group can limit reads here: {error}", file=sys.stderr)
        if group.is_dir():
            group.rmdir()
        yield False
        return
    try:
        yield True
    finally:
        (home / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()
