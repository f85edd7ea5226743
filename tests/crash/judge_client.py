"""Stand for a Python process: have ``judge_server.py`` fork it, share streams with it, end as it does.

Usage: python -I -S judge_client.py SOCKET SCRIPT ARGUMENTS. If this process is killed, the server kills the other.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def main(address: str, *words: str) -> None:
    asked = {"words": words, "environment": dict(os.environ), "directory": os.getcwd()}  # noqa: PTH109 - starts faster
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b" "], [1, 2])
        connection.sendall(json.dumps(asked).encode() + b"\n")
        answer = connection.makefile().readline()
    code = int(answer) if answer else 1
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
