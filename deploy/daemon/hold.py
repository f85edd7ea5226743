"""One daemon for each user and base: the lock that tells, and the socket that stands for it.

Whoever holds the lock is the daemon; a socket that is there already is then a dead one's, and replaced.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from store.daemon.place import lock_path, make_home, socket_path
from store.errors import DaemonError, StorageError
from store.memory.owner import Owner


class Hold:
    """Held from construction until :meth:`release`. DaemonError where a daemon runs already; StorageError."""

    def __init__(self, base: Path) -> None:
        self._path = socket_path(base)
        make_home(base)
        try:
            self._lock = Owner(lock_path(base))
        except StorageError as error:
            raise DaemonError(
                f"a daemon runs already for {base}: see `driftpoint daemon status --memory {base}`"
            ) from error
        try:
            self.socket = _listening(self._path)
            self._inode = self._path.stat().st_ino
        except OSError as error:
            self._lock.release()
            raise StorageError(f"cannot listen at {self._path}: {error.strerror or error}") from error

    def stands(self) -> bool:
        """Whether anybody can still reach it: the socket's name is there, and its own."""
        try:
            return self._path.stat().st_ino == self._inode
        except OSError:
            return False

    def release(self) -> None:
        """Let another daemon take the place."""
        if self.stands():
            with suppress(OSError):
                self._path.unlink()
        self.socket.close()
        self._lock.release()


def _listening(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        before = os.umask(0o177)
        try:
            made.bind(str(path))
        finally:
            os.umask(before)
        made.listen()
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made
