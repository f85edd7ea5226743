"""Output files that bytes are put into at their places, and the one error for what the system refuses there.

It does not know what the bytes are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

OPEN_FILES = 64
"""Files that one thread keeps open at a time."""


class OutputError(Exception):
    """The system refused to write or to read back an output file. Not a StorageError: that is about sources."""

    def __init__(self, path: Path, error: OSError, verb: str = "write") -> None:
        super().__init__(f"cannot {verb} {path}: {error.strerror or error}")


class OutFiles:
    """Output files that one block is written to, a bounded number of them open at a time. One thread."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._open: dict[int, int] = {}

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Put all of ``data`` at byte ``offset`` of the file of that number, which exists. OutputError."""
        try:
            if file not in self._open:
                if len(self._open) >= OPEN_FILES:
                    self.close()
                self._open[file] = os.open(self._paths[file], os.O_WRONLY | os.O_CLOEXEC)
            written = 0
            while written < len(data):
                written += os.pwrite(self._open[file], data[written:], offset + written)
        except OSError as error:
            raise OutputError(self._paths[file], error) from error

    def close(self) -> None:
        """Close all; they open again when they are written to."""
        while self._open:
            os.close(self._open.popitem()[1])
