"""Where the daemon of a node is reached: a socket beside the memory of all stores, one for each user and base.

It knows names and permissions, and how to connect. The folder is this user's own (mode 0700), so that what answers
there is of this user.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from store.daemon.messages import (
    ANSWER_LIMIT,
    Leaving,
    Message,
    Refused,
    Report,
    Welcome,
    heard_from_daemon,
    to_line,
)
from store.errors import DaemonError, StorageError
from store.memory.tier import home, require_own

_LONGEST = 107
"""Bytes of a socket's path that Linux takes."""


def socket_path(base: Path) -> Path:
    """Of the daemon's socket. DaemonError where no socket can have such a path."""
    path = home(base) / "daemon.sock"
    if len(os.fsencode(path)) > _LONGEST:
        raise DaemonError(
            f"{path} is too long for a socket, which may have {_LONGEST} bytes: set a shorter `memory: {{path: ...}}`"
        )
    return path


def lock_path(base: Path) -> Path:
    """Locked by the daemon as long as it lives."""
    return home(base) / "daemon.lock"


def log_path(base: Path) -> Path:
    """Where a daemon that a job started writes its log."""
    return home(base) / "daemon.log"


def make_home(base: Path) -> Path:
    """The folder of this user below ``base``, made where it is not there. StorageError where it is not its own."""
    place = home(base)
    try:
        place.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot make {place}: {error.strerror}") from error
    require_own(place)
    return place


def connected(base: Path, timeout: float) -> socket.socket:
    """A connection to the daemon. DaemonError where there is none."""
    path = socket_path(base)
    require_own(path.parent)
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.settimeout(timeout)
        _connect(found, path, time.monotonic() + timeout)
    except OSError as error:
        found.close()
        raise DaemonError(
            f"no daemon answers at {path} ({error.strerror or error}): start one with `driftpoint daemon run`"
        ) from error
    return found


def _connect(link: socket.socket, path: Path, deadline: float) -> None:
    while True:
        try:
            link.connect(str(path))
        except BlockingIOError:  # too many wait to be accepted; the system does not let us wait with them
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.02)
        else:
            return


def asked(base: Path, question: Message, timeout: float) -> Welcome | Refused | Leaving | Report:
    """The daemon's answer to one question. DaemonError where there is none."""
    with connected(base, timeout) as link:
        try:
            link.sendall(to_line(question))
            with link.makefile("rb") as stream:
                line = stream.readline(ANSWER_LIMIT + 1)
        except OSError as error:
            raise DaemonError(f"the daemon did not answer within {timeout:g} s: {error}") from error
    if not line.endswith(b"\n"):
        raise DaemonError("the daemon ended before it had answered")
    return heard_from_daemon(line)
