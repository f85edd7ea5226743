"""Tells whether a live job on this machine owns a store, and refuses a second one.

A POSIX record lock on ``LOCK``: the kernel drops it when the process dies however it dies, and forked children
(data-loader workers) do not inherit it. It is a courtesy between jobs of one machine; what protects the data
everywhere is the epoch. Nothing else may open ``LOCK`` in a process that holds it: closing any descriptor of
the file would drop the lock.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from store.errors import StorageError, StoreInUseError
from store.layout import LOCK

_held: dict[Path, int] = {}
"""Process that holds each lock: a forked child has a copy of this, but not of the lock."""


class StoreLock:
    """Held from construction until :meth:`release`."""

    def __init__(self, root: Path, wait_seconds: float) -> None:
        self._path = root.resolve() / LOCK
        if _held.get(self._path) == os.getpid():
            raise StoreInUseError(f"{root} is attached already in this process; close the first checkpointer")
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise StorageError(f"cannot open {self._path} for locking: {error.strerror}") from error
        self._acquire(root, time.monotonic() + wait_seconds)
        _held[self._path] = os.getpid()

    def release(self) -> None:
        """Let another job have the store."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            _held.pop(self._path, None)

    def _acquire(self, root: Path, deadline: float) -> None:
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(self._descriptor)
                    raise StoreInUseError(_in_use(root)) from None
                time.sleep(0.05)
            except OSError as error:
                os.close(self._descriptor)
                raise StorageError(f"cannot lock {self._path}: {error.strerror}") from error
            else:
                return


def lock_holder(root: Path) -> int | None:
    """Process id of the job on this machine that holds the store, None where there is none."""
    path = root.resolve() / LOCK
    if _held.get(path) == os.getpid():
        return os.getpid()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        return _holder(descriptor)
    finally:
        os.close(descriptor)


# struct flock of Linux on 64-bit: l_type, l_whence, (padding,) l_start, l_len, l_pid, (padding).
def _holder(descriptor: int) -> int | None:
    import struct

    layout = "hhqqi4x"
    question = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        kind, _, _, _, pid = struct.unpack(layout, fcntl.fcntl(descriptor, fcntl.F_GETLK, question))
    except OSError:
        return None
    return None if kind == fcntl.F_UNLCK else int(pid)


def _in_use(root: Path) -> str:
    holder = lock_holder(root)
    who = f"process {holder}" if holder else "another process"
    return (
        f"the store {root} is in use by {who} on this machine: "
        "wait for it, stop it, or give this job a store of its own (`store:` in the YAML)"
    )
