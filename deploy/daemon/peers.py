"""Who is at the other end of a connection: the process, by the kernel's word, and how its end is seen.

A forked child of a trainer (a data-loader worker) keeps the connection open when the trainer dies, so that the end of
a connection says little. What is watched is the process itself, by a descriptor that no other process can take over.
"""

from __future__ import annotations

import errno
import os
import socket
import struct

from store.errors import DaemonError

_PIDFD = getattr(socket, "SO_PEERPIDFD", 77)
"""Of Linux 6.5; before that the descriptor is opened by number, and a process that ended just now could be missed."""


def peer_of(connection: socket.socket) -> int:
    """The process that connected. DaemonError unless it is of this user, and can be seen from here."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", data)
    if uid != os.getuid():
        raise DaemonError(f"this daemon serves user {os.getuid()}, and the caller is user {uid}: start one of your own")
    if pid <= 0:
        raise DaemonError(
            "the caller's process cannot be seen from here (another container?): run the daemon in the same one"
        )
    return int(pid)


def end_of(connection: socket.socket, pid: int) -> int | None:
    """A descriptor that becomes readable when the process has ended; None where it has. DaemonError: cannot be had."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _PIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    except OSError as error:
        raise DaemonError(f"process {pid} cannot be watched: {error.strerror}") from error
