"""Whether the process that writes a rank's memory still lives.

A POSIX record lock, as for a store: the kernel drops it when the process dies however it dies, and forked children
(data-loader workers) do not inherit it. Nothing else may open the file in a process that holds it: closing any
descriptor of it would drop the lock, so what this process owns is remembered here.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

from store.errors import MissingError, StorageError

_FLOCK = "hhqqi4x"
"""C's struct flock on 64-bit Linux: type, whence, start, length, process."""

_held: dict[Path, int] = {}
"""Process that holds each lock: a forked child has a copy of this, but not of the lock."""


class Owner:
    """Held from construction until :meth:`release`. StorageError where another process holds it; MissingError where
    its folder is not there, or the file was removed in between: then the lock would be on nothing that others see."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if _held.get(path) == os.getpid():
            raise StorageError(f"{path} is held by this process already: close the first checkpointer")
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError as error:
            raise MissingError(f"{path.parent} is not there") from error
        except OSError as error:
            raise StorageError(f"cannot open {path}: {error.strerror}") from error
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            raise StorageError(f"{path} is held by another process: two jobs on one store?") from error
        if not _names(path, self._descriptor):
            os.close(self._descriptor)
            raise MissingError(f"{path} was removed by its owner before")
        _held[path] = os.getpid()

    def release(self) -> None:
        """Let others take what is there. A second call changes nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            _held.pop(self._path, None)


def _names(path: Path, descriptor: int) -> bool:
    """Whether the file is still the one of that name."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except OSError:
        return False


def is_owned(path: Path) -> bool:
    """Whether a living process holds it. Asks only: who tried to take the lock might be in the owner's way."""
    if _held.get(path) == os.getpid():
        return True
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # what cannot be told is left alone
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
