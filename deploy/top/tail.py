"""The newest lines of a trace, read as they come: the end of the file at first, then only what was appended.

However long a trace is, the first look reads a few megabytes of its end, and what goes before it only to find the line
that names its units. A file that was replaced or cut is begun anew. Owned by one thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from deploy.safety.believable import Sceptic
from deploy.safety.pulse import Listener, Pulse
from store.trace import each_line

_END = 4 << 20
"""Bytes of the end that are read at first."""

_BLOCK = 1 << 20
_JOB = b'\n{"kind":"job"'


class Tail:
    """Of the trace at ``path``, which need not be there yet."""

    def __init__(self, path: Path, end: int = _END) -> None:
        self.path = path
        self.trouble = ""
        self._end = end
        self._begin()

    def look(self) -> Pulse | None:
        """What it says now; None where there is no trace, or none that can be read, and ``trouble`` says why."""
        try:
            with self.path.open("rb") as file:
                self._read(file)
        except OSError as error:
            self._begin()
            self.trouble = error.strerror or str(error)
            return None
        self.trouble = ""
        return self._listener.pulse()

    def _begin(self) -> None:
        self._listener, self._sceptic = Listener(), Sceptic()
        self._offset = 0
        self._torn = b""
        self._inode = -1

    def _read(self, file: BinaryIO) -> None:
        size, inode = file.seek(0, os.SEEK_END), os.fstat(file.fileno()).st_ino
        if inode != self._inode or size < self._offset:
            self._begin()
            self._inode = inode
            self._skip(file, size)
        file.seek(self._offset)
        data = self._torn + file.read()
        self._offset = file.tell()
        whole, newline, self._torn = data.rpartition(b"\n")
        if newline:
            self._hear(whole.split(b"\n"))

    def _skip(self, file: BinaryIO, size: int) -> None:
        """To the end of a long file, having heard of the job that it is of."""
        start = size - self._end
        if start <= 0:
            return
        file.seek(start)
        start += len(file.readline())
        self._hear([_job_before(file, start)])
        self._offset = start

    def _hear(self, raw: Iterable[bytes]) -> None:
        for line in self._sceptic.believe(each_line(raw)):
            if line is not None:
                self._listener.hear(line)


def _job_before(file: BinaryIO, end: int) -> bytes:
    """The last job line that begins before ``end``; empty where there is none."""
    stop = end
    while stop > 0:
        start = max(0, stop - _BLOCK)
        file.seek(start)
        block = file.read(min(end, stop + len(_JOB)) - start)
        block = b"\n" + block if start == 0 else block
        found = block.rfind(_JOB)
        if found >= 0:
            file.seek(start + found + (0 if start == 0 else 1))
            return file.readline()
        stop = start
    return b""
