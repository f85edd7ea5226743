"""Control groups with little memory, for real processes; skipped loudly where none can be made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.daemons import until


@contextmanager
def group(nbytes: int) -> Iterator[Path]:
    """A control group that may have so much memory."""
    old, new = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    root, limit = (new, "memory.max") if (new / "cgroup.controllers").exists() else (old, "memory.limit_in_bytes")
    made = root / f"driftpoint-test-{os.getpid()}"
    try:
        made.mkdir()
        (made / limit).write_text(str(nbytes))
        with suppress(OSError):
            (made / "memory.swap.max").write_text("0")
    except OSError as error:
        with suppress(OSError):
            made.rmdir()
        pytest.skip(f"no control group can be made ({error}): what happens at its limit is NOT tested")
    try:
        yield made
    finally:
        until(lambda: not (made / "cgroup.procs").read_text().strip(), "an empty group")
        made.rmdir()
