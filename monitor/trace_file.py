"""The file of a drift trace: lines appended by a thread of its own, so that a slow disk is nobody's wait.

Whole lines, one write each, at the end of whatever is there; a torn line that a crash left is closed off first. Nothing
is synced: what a power cut takes is the end of a log, not state. A file that cannot be written is told once and given
up, so that it ends early but has no gap. It does not know what lines say.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

from monitor.metrics import Metrics
from monitor.writer import Writer
from store.errors import StorageError

_BACKLOG = 1000
"""Lines that may wait for a disk that does not answer."""

_PATIENCE = 10.0
"""Seconds that closing waits for the last lines, at most."""


class TraceFile:
    """Opened at the first line. One thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1

    def append(self, line: bytes) -> None:
        """Add a line, its end included. StorageError where it is not all in the file afterwards."""
        try:
            if self._descriptor < 0:
                self._descriptor, torn = _opened(self.path)
                line = b"\n" * torn + line
            written = os.write(self._descriptor, line)
        except OSError as error:
            raise StorageError(f"cannot write {self.path}: {error.strerror or error}") from error
        if written != len(line):
            raise StorageError(
                f"only {written} of {len(line)} bytes of a line went into {self.path}: is the disk full?"
            )

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class TraceWriter:
    """Appends beside training. All methods but the thread's own are the training thread's."""

    def __init__(self, path: Path, metrics: Metrics) -> None:
        self._file = TraceFile(path)
        self._metrics = metrics
        self._thread: Writer[None] = Writer("driftpoint-trace")
        self._waiting = 0
        self._torn = self._over = False

    def put(self, make: Callable[[], bytes]) -> None:
        """Have a line made and appended, after those before it. Nothing once the file was given up."""
        self._look()
        if self._waiting >= _BACKLOG:
            self._give_up(StorageError(f"{self._waiting} lines wait for {self._file.path}: its disk does not answer"))
        if not self._over:
            self._waiting += 1
            self._thread.submit(lambda: self._append(make))

    def close(self, timeout: float) -> None:
        """Wait until the last lines are written and the file is let go of, at most so many seconds."""
        self._thread.submit(self._file.close)
        if not self._thread.join(min(timeout, _PATIENCE)):
            self._give_up(StorageError(f"{self._waiting} lines wait for {self._file.path}: its disk does not answer"))
        self._look()
        self._over = True
        self._thread.stop()

    def stop(self) -> None:
        """Take no more lines, and wait for none."""
        self._over = True
        self._thread.submit(self._file.close)
        self._thread.stop()

    def _append(self, make: Callable[[], bytes]) -> None:
        if self._torn:
            return  # what follows a lost line would be read as if nothing were missing
        self._torn = True
        self._file.append(make())
        self._torn = False

    def _look(self) -> None:
        for done in self._thread.finished():
            self._waiting -= 1
            if done.error is not None:
                self._give_up(done.error)

    def _give_up(self, error: BaseException) -> None:
        if not self._over:
            self._over = True
            what = "the drift trace of this run ends here, training and saves go on: writing"
            self._metrics.background_failure(what, error)


def _opened(path: Path) -> tuple[int, bool]:
    """A descriptor that appends, and whether the last line in the file has no end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise StorageError(f"{path} is no regular file: set `trace: {{path: ...}}` to another one")
        _lock(descriptor, path)
        torn = found.st_size > 0 and os.pread(descriptor, 1, found.st_size - 1) != b"\n"
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, torn


def _lock(descriptor: int, path: Path) -> None:
    """Until the file is closed, or the process ends however it does. Lines of two jobs would pass for those of one."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise StorageError(f"another job writes {path}: set `trace: {{path: ...}}` to a file of its own") from error
        # Where a filesystem has no locks, nothing is known of other jobs: then it is written.
