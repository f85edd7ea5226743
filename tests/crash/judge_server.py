"""Fork the processes that ckpt-chaos starts from one that has imported torch and transformers already.

ckpt-chaos starts two jobs for each event. Importing would take most of their time. Its command line names
``judge_client.py``, which asks this server for a process, and lives as long as it does.

A forked process becomes ``python SCRIPT ARGUMENTS``: environment, import path, directory and streams as asked for.
ckpt-chaos arms a process in a ``sitecustomize`` that Python imports at its start. Here that same file runs after the
fork, before the script.

Usage: judge_server.py SOCKET. It prints a line when it listens, and ends with its standard input.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from ckpt_chaos.byo import BOOT

from tests.support.preloaded import become

PRELOADED = (
    "torch.distributed",
    "torch._dynamo",
    "deepspeed",  # the Trainer imports it where it is installed
    "accelerate",
    "safetensors.torch",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "monitor.api",
    "monitor.huggingface.callback",
)


def main(address: str) -> None:
    """Fork a process for each connection, which forks the one that was asked for."""
    for name in PRELOADED:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        print("listening", flush=True)
        while True:
            ready, _, _ = select.select([listening, 0], [], [])
            if 0 in ready:
                return
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                _serve(connection)
            connection.close()


def _serve(connection: socket.socket) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(connection, 1, 2)
    asked = json.loads(connection.makefile().readline())
    pid = os.fork()
    if pid == 0:
        _become(asked["words"], asked["environment"], asked["directory"], streams)
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(pid)
    ready, _, _ = select.select([ended, connection], [], [])
    if ended not in ready:  # the client was killed
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with suppress(OSError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _become(words: list[str], environment: dict[str, str], directory: str, streams: list[int]) -> NoReturn:
    os.setsid()
    os.chdir(directory)
    for descriptor, stream in zip((1, 2), streams, strict=True):
        os.dup2(stream, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(environment)
    runpy.run_path(str(Path(BOOT) / "sitecustomize.py"))
    become(words, dict(os.environ))


if __name__ == "__main__":
    main(sys.argv[1])
