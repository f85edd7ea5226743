"""Trees of processes: who catches a signal, who is left when the command has ended, and how they are ended.

Linux. Knows nothing of jobs and stores. A process that is gone in the meantime is no error anywhere here.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> bool:
    """From now on what this process's descendants leave behind becomes its child. False where the system refuses."""
    return ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0  # type: ignore[no-any-return]


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for the signal, so that it does not simply die of it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def catching(top: int, number: signal.Signals) -> list[psutil.Process]:
    """The processes of the tree under ``top``, itself included, that catch the signal; nothing below one that does.

    Forked children (data-loader workers) inherit their parent's handler, and a launcher that has one passes it on.
    """
    with suppress(psutil.NoSuchProcess):
        return list(_catching(psutil.Process(top), number))
    return []


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> int:
    """Send a signal to each; returns to how many."""
    sent = 0
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(number)
            sent += 1
    return sent


def is_daemon(process: psutil.Process) -> bool:
    """Whether it is the daemon of a node, which a trainer may have started: see :mod:`monitor.daemon_link`."""
    with suppress(psutil.Error):
        return process.cmdline()[1:5] == ["-m", "deploy.cli", "daemon", "run"]
    return False


def children() -> frozenset[psutil.Process]:
    """The children of this process. One that was started by ``exec`` keeps those of the shell before it."""
    return frozenset(psutil.Process().children())


def below(but: Collection[psutil.Process] = ()) -> list[psutil.Process]:
    """All descendants of this process that still run, except those children and what is below them.

    Daemons are not among them: those are there for what comes after."""
    found, spared = psutil.Process().children(recursive=True), set(but)
    for one in but:
        with suppress(psutil.NoSuchProcess):
            spared.update(one.children(recursive=True))
    return [process for process in found if process not in spared and _runs(process) and not is_daemon(process)]


def reap(but: int) -> None:
    """Take note of the end of adopted processes. ``but``: a child that someone else waits for."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == but:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def end_below(term_seconds: float, kill_seconds: float, but: Collection[psutil.Process] = ()) -> tuple[int, int]:
    """End what :func:`below` finds: SIGTERM, then SIGKILL. Returns how many there were and how many will not go."""
    left = below(but)
    if not left:
        reap(but=0)
        return 0, 0
    send(left, signal.SIGTERM)
    psutil.wait_procs(left, timeout=term_seconds)
    last = time.monotonic() + kill_seconds
    while survivors := below(but):  # again: one may fork between being seen and being killed
        send(survivors, signal.SIGKILL)
        psutil.wait_procs(survivors, timeout=max(0.0, last - time.monotonic()))
        if time.monotonic() >= last:
            break
    reap(but=0)
    return len(left), len(below(but))


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _catching(process: psutil.Process, number: signal.Signals) -> Iterator[psutil.Process]:
    if is_daemon(process):
        return
    if catches(process.pid, number):
        yield process
        return
    with suppress(psutil.NoSuchProcess):
        for child in process.children():
            yield from _catching(child, number)
