"""Passes connections on to a port of this machine: stopped by a signal, it is a network that fell silent.

Usage: relay.py HOST PORT; prints the port that it listens on, and is killed when its parent ends, also while stopped.
"""

from __future__ import annotations

import ctypes
import signal
import socket
import sys
import threading

_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG."""


def pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        source.close()
        target.close()


def main(host: str, port: int) -> None:
    listener = socket.create_server((host, 0))
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    print(listener.getsockname()[1], flush=True)
    while True:
        one, _ = listener.accept()
        other = socket.create_connection((host, port))
        for pair in ((one, other), (other, one)):
            threading.Thread(target=pump, args=pair, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
