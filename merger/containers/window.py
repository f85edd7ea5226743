"""A part of an open file that behaves as a file of its own, as blobs inside a larger file need it.

Closing it leaves the file open. It does not know what is in the blob. One thread.
"""

from __future__ import annotations

import io
import os
from typing import BinaryIO


class Window(io.RawIOBase):
    """Bytes from ``start`` of ``file``: ``nbytes`` of them, or, with None, as many as get written."""

    def __init__(self, file: BinaryIO, start: int, nbytes: int | None = None) -> None:
        self._file, self._start = file, start
        self.nbytes = nbytes or 0
        """Size in bytes, as far as is known."""
        self._position = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def writable(self) -> bool:
        """As the file is."""
        return self._file.writable()

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Position from the window's start."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Set the position; beyond the end is allowed."""
        self._position = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.nbytes}[whence] + offset
        return self._position

    def readinto(self, target: object, /) -> int:
        """Fill ``target`` up to the window's end."""
        view = memoryview(target).cast("B")  # type: ignore[arg-type]
        count = max(0, min(len(view), self.nbytes - self._position))
        self._file.seek(self._start + self._position)
        data = self._file.read(count)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def write(self, data: object, /) -> int:
        """Write at the position; what was skipped is zeros."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        self._file.seek(self._start + self._position)
        self._file.write(view)
        self._position += len(view)
        self.nbytes = max(self.nbytes, self._position)
        return len(view)
