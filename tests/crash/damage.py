"""Hands that reach into a simulated disk behind the store's back: flip, cut, swap, forge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from store.schema import seal
from tests.crash.simulated import Op, SimulatedFiles
from tests.support.records import unseal

WHOLE = 1 << 30


def put(files: SimulatedFiles, path: str, data: bytes) -> None:
    """Write a file, in place of the one that is there."""
    if files.disk.find(path) is not None:
        remove(files, path)
    file = files.create(path)
    file.write(data)
    file.sync()


def remove(files: SimulatedFiles, path: str) -> None:
    """Take a name away."""
    files.disk.apply(Op("unlink", path))


def edit(files: SimulatedFiles, path: str, change: Callable[[bytes], bytes]) -> None:
    """Replace a file's bytes."""
    put(files, path, change(files.read(path, WHOLE)))


def flip(files: SimulatedFiles, path: str, at: int, mask: int = 0x01) -> None:
    """Flip bits of one byte; ``at`` may count from the end."""
    data = bytearray(files.read(path, WHOLE))
    data[at] ^= mask
    put(files, path, bytes(data))


def forge(files: SimulatedFiles, path: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a record's values and make its checksum right again. ``change`` edits in place or returns a new body."""
    body = unseal(files.read(path, WHOLE), path)
    put(files, path, seal(change(body) or body))


def swap(files: SimulatedFiles, one: str, other: str) -> None:
    """Exchange two files."""
    first, second = files.read(one, WHOLE), files.read(other, WHOLE)
    put(files, one, second)
    put(files, other, first)
