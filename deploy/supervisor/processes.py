"""Signal and end the command's process tree: pass signals on, escalate, and end orphans. Linux only.

A process that ends meanwhile is never an error. :class:`ProcessStopper` is owned by the supervisor's thread; it sends
signals and does not wait. The trainer's own handler gets its preemption signal (SIGUSR1 by default) before anything
gets SIGTERM, because launchers give their workers little time after SIGTERM."""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from deploy.supervisor.restart_policy import INTERRUPTED
from store.errors import PREEMPTED
from store.text import counted

_PR_SET_CHILD_SUBREAPER = 36
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
KILL_AFTER = 10.0  # seconds from SIGTERM to SIGKILL
ATTRIBUTION_SECONDS = 600.0
"""Seconds after a preemption signal, besides the grace period, in which the command's end counts as its result.

Launchers hide the exit code. After this time, the end has another cause."""


def adopt_orphans() -> bool:
    """Become the parent of orphaned descendants. Returns False if the system refuses."""
    return ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0  # type: ignore[no-any-return]


def handles_signal(pid: int, number: signal.Signals) -> bool:
    """Return whether the process has a handler for the signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def processes_handling(top: int, number: signal.Signals) -> list[psutil.Process]:
    """Return the processes in the tree of ``top`` that handle the signal, but none below such a process or a daemon.

    Forked children (data-loader workers) inherit their parent's handler; a launcher with one forwards the signal."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(top)
        if is_daemon(process):
            return []
        if handles_signal(top, number):
            return [process]
        return [one for child in process.children() for one in processes_handling(child.pid, number)]
    return []


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> int:
    """Send a signal to each process and return the number reached."""
    sent = 0
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(number)
            sent += 1
    return sent


def is_daemon(process: psutil.Process) -> bool:
    """Return whether the process is the node daemon, which a trainer may have started."""
    with suppress(psutil.Error):
        return process.cmdline()[1:5] == ["-m", "deploy.cli", "daemon", "run"]
    return False


def children() -> frozenset[psutil.Process]:
    """Return the children of this process. A process started by ``exec`` keeps those of the shell."""
    return frozenset(psutil.Process().children())


def descendants(but: Collection[psutil.Process] = ()) -> list[psutil.Process]:
    """Return all running descendants except ``but``, their descendants, and daemons, which later attempts use."""
    found, spared = psutil.Process().children(recursive=True), set(but)
    for one in but:
        with suppress(psutil.NoSuchProcess):
            spared.update(one.children(recursive=True))
    return [process for process in found if process not in spared and _runs(process) and not is_daemon(process)]


def reap(but: int) -> None:
    """Reap adopted processes, except ``but``, for which another caller waits."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == but:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def end_descendants(term_seconds: float, kill_seconds: float, but: Collection[psutil.Process] = ()) -> tuple[int, int]:
    """End all descendants with SIGTERM, then SIGKILL. Returns how many there were and how many remain."""
    left = descendants(but)
    if not left:
        reap(but=0)
        return 0, 0
    send(left, signal.SIGTERM)
    psutil.wait_procs(left, timeout=term_seconds)
    last = time.monotonic() + kill_seconds
    while survivors := descendants(but):  # repeat: a process may fork before it is killed
        send(survivors, signal.SIGKILL)
        psutil.wait_procs(survivors, timeout=max(0.0, last - time.monotonic()))
        if time.monotonic() >= last:
            break
    reap(but=0)
    return len(left), len(descendants(but))


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


class ProcessStopper:
    """Handles the signals during one attempt of the command, whose process is ``pid``.

    ``grace``: seconds for its final save. ``notice``: signal that the trainer handles. ``others``: children of this
    process that are not the command's. ``clock`` is monotonic."""

    def __init__(
        self,
        pid: int,
        say: Callable[[str], None],
        *,
        grace: float = 30.0,
        notice: signal.Signals = signal.SIGUSR1,
        others: Collection[psutil.Process] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pid, self._say, self._clock = pid, say, clock
        self._grace, self._notice, self._others = grace, notice, others
        self._exit_request: int | None = None
        self._noticed: float | None = None
        self._asked = 0
        self._due: list[tuple[float, Callable[[], None]]] = []  # clock times and what to do then

    @property
    def seconds(self) -> float | None:
        """Return the seconds until the next action, None if none is scheduled."""
        return max(0.0, min(at for at, _ in self._due) - self._clock()) if self._due else None

    def exit_request(self, code: int) -> int | None:
        """Return the exit code that a received signal demands after the command ended with ``code``, or None."""
        if self._exit_request is not None or self._noticed is None:
            return self._exit_request
        answers = code == PREEMPTED or self._clock() - self._noticed <= self._grace + ATTRIBUTION_SECONDS
        return PREEMPTED if answers else None

    def act(self) -> None:
        now = self._clock()
        ready = [act for at, act in self._due if at <= now]
        self._due = [(at, act) for at, act in self._due if at > now]
        for act in ready:
            act()

    def take(self, number: signal.Signals) -> None:
        if number in NOTICES:
            self._notify(number)
            return
        self._asked += 1
        if self._exit_request is None or number == signal.SIGINT:
            self._exit_request = INTERRUPTED if number == signal.SIGINT else PREEMPTED
        if self._asked == 1:
            self._ask(number)
        elif self._asked == 2:
            self._terminate(f"a second {number.name}")
        else:
            self._kill(f"a third {number.name}")

    def _notify(self, number: signal.Signals) -> None:
        told = send(processes_handling(self._pid, number), number)
        if told == 0:
            self._say(f"{number.name}: no process of the command handles it; not forwarded")
            return
        self._noticed = self._clock()
        self._say(f"{number.name}: forwarded to {counted(told, 'process', 'processes')}")

    def _ask(self, number: signal.Signals) -> None:
        if number == signal.SIGINT:
            self._send(number)
            self._say("SIGINT: forwarded; a second one sends SIGTERM to the command, a third SIGKILL")
            return
        grace, notice = self._grace, self._notice
        told = send(processes_handling(self._pid, notice), notice) if notice != signal.SIGTERM else 0
        if told:
            asked = counted(told, "process", "processes")
            self._say(f"{number.name}: {notice.name} to {asked}; SIGTERM in {grace:g} s")
            self._later(grace, lambda: self._terminate(f"the grace period of {grace:g} s is over"))
            return
        self._send(signal.SIGTERM)
        self._say(f"{number.name}: forwarded; SIGKILL in {grace + KILL_AFTER:g} s")
        self._later(grace + KILL_AFTER, lambda: self._kill("it did not end"))

    def _terminate(self, why: str) -> None:
        self._say(f"{why}: SIGTERM to the command; SIGKILL in {KILL_AFTER:g} s")
        self._send(signal.SIGTERM)
        self._due = []
        self._later(KILL_AFTER, lambda: self._kill("it did not end"))

    def _kill(self, why: str) -> None:
        self._say(f"{why}: SIGKILL to all processes of the command")
        self._due = []
        send(descendants(self._others), signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        with suppress(psutil.NoSuchProcess):
            send([psutil.Process(self._pid)], number)

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        self._due.append((self._clock() + seconds, act))
