"""Starting the node's daemon where none answers, for whoever is there before the trainers are.

The same command as a trainer's link gives (:mod:`monitor.daemon_link`), so that either finds the other's. It does not
wait for the daemon: where it cannot begin, its log says why, and the trainers will.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from store.daemon.place import connected, log_path, make_home
from store.errors import DaemonError, StorageError

_ANSWERS = 1.0
"""Seconds in which a daemon that is there answers."""


def ensure_daemon(base: Path, port: int, exit_idle: float, more: Sequence[str] = ()) -> str | None:
    """Have a daemon at ``base``. What is to be told: that it was started, or why it could not be; None where it ran.

    more: options of ``daemon run``."""
    try:
        make_home(base)
        connected(base, _ANSWERS).close()
    except StorageError as error:
        return f"no daemon: {error}"
    except DaemonError:
        return _started(base, port, exit_idle, more)
    return None


def _started(base: Path, port: int, exit_idle: float, more: Sequence[str]) -> str:
    command = [sys.executable, "-m", "deploy.cli", "daemon", "run", "--memory", str(base), "--port", str(port)]
    command += ["--exit-idle", str(exit_idle), "--log", str(log_path(base)), *more]
    nothing = subprocess.DEVNULL
    try:
        process = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)
    except OSError as error:
        return f"no daemon could be started: {error}"
    return f"started the node's daemon (process {process.pid})"
