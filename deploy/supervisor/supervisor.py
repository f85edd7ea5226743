"""Run a command until it is done: start it, forward signals, clean up, and restart it by the restart policy.

One thread, which receives signals by ``sigtimedwait`` and never in a handler, so that none is lost. It writes nothing
to the store except suspect marks. If this process is killed, the command continues by itself.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from deploy.supervisor.events import EventLog
from deploy.supervisor.processes import (
    ENDS,
    NOTICES,
    ProcessStopper,
    StopOptions,
    adopt_orphans,
    children,
    end_below,
    reap,
)
from deploy.supervisor.restart_policy import (
    INTERRUPTED,
    Attempt,
    GiveUp,
    Limits,
    Restart,
    RestartHistory,
    StoreSnapshot,
    decide_restart,
)
from deploy.supervisor.store_probe import StoreProbe
from store.errors import PREEMPTED, StoreInUseError, UsageError

_ORPHANS_TERM = 5.0
_ORPHANS_KILL = 10.0
_OTHER_NODES = 1800.0
"""Seconds to wait for the store before a restart.

Some file servers show the lock of rank 0 on another node, which may hang in a collective until its timeout.
"""
_CANNOT_START = 127
"""Exit code of a command that could not be started, as in shells."""
_LOOK_UP = 60.0
"""Longest wait for a signal, in seconds, as a safeguard against missed ones."""


@dataclass(frozen=True)
class RunOptions:
    """Command and limits of a supervised job.

    Attributes:
        grace: seconds for the trainer's final save after a signal.
        wait: seconds to wait for a store in use.
        notice: preemption signal that the trainer handles.
    """

    command: Sequence[str]
    limits: Limits = field(default_factory=Limits)
    grace: float = 30.0
    wait: float = 0.0
    notice: signal.Signals = signal.SIGUSR1


class Supervisor:
    """Supervises one job on one store."""

    def __init__(self, orders: RunOptions, store: StoreProbe, teller: EventLog) -> None:
        self._orders = orders
        self._store = store
        self._teller = teller
        self._signals = {number for number in (*ENDS, *NOTICES) if signal.getsignal(number) != signal.SIG_IGN}
        self._mask: set[signal.Signals] = set()
        self._known = StoreSnapshot()
        self._gone: StoreSnapshot | None = None
        self._others = children()  # of a script that became this process by `exec`

    def run(self) -> int:
        """Run until the job is done and return the exit code.

        Raises:
            StoreInUseError: another job uses the store.
            UsageError: the command cannot be started.
        """
        if not adopt_orphans():
            self._teller.say("the system does not say which processes a dead command leaves: they are not ended")
        with self._signals_held():
            stop = self._attempts()
            self._teller.stopped(stop)
        return stop.code

    def _attempts(self) -> GiveUp:
        course, again, number = RestartHistory(), Restart(0.0, counted=False), 0
        while True:
            patience = self._orders.wait if number == 0 else max(self._orders.wait, _OTHER_NODES)
            stop = self._wait(again.seconds) or self._wait_for_store(patience)
            if stop is not None:
                return stop
            number += 1
            attempt = self._attempt(number, again.seconds)
            course, verdict = decide_restart(course, attempt, self._orders.limits, random.random)
            self._teller.judged(course)
            if isinstance(verdict, GiveUp):
                for save in verdict.withdrawn:
                    self._teller.withdrew(save, self._store.withdraw(save))
                return verdict
            if verdict.suspect is not None:
                trouble = self._store.mark(verdict.suspect, f"two attempts died, the last of {attempt.end}")
                self._teller.marked(verdict.suspect, attempt.after.instead, trouble)
            again = verdict

    def _attempt(self, number: int, waited: float) -> Attempt:
        before = self._looked()
        self._teller.began(number, waited, before)
        code, told_to = (_CANNOT_START, None) if before is self._gone else self._ran(number)
        left, stuck = end_below(_ORPHANS_TERM, _ORPHANS_KILL, self._others)
        if left:
            self._teller.say(f"ended {left} processes that the command left behind")
        if stuck:
            self._teller.say(f"{stuck} of them do not end, not even of SIGKILL: a device or a disk holds them")
        attempt = Attempt(code, before, self._looked(), told_to)
        self._teller.ended(number, attempt)
        return attempt

    def _looked(self) -> StoreSnapshot:
        """Read the store; report a store that disappeared (its disk is not mounted, say) as trouble.

        No attempt starts then: a job that finds an empty path would train from scratch into it.
        """
        sight = self._store.look()
        if not sight.trouble and self._known.newest is not None and sight.epoch < self._known.epoch:
            self._gone = StoreSnapshot(
                trouble=f"{self._store.root} held step {self._known.step}, and is empty or another store now: is its "
                "disk mounted? The command is not started. To begin anew on purpose, end this and give it again"
            )
            return self._gone
        if not sight.trouble:
            self._known = sight
        return sight

    def _ran(self, number: int) -> tuple[int, int | None]:
        """Run the command; return its exit code and the one demanded by a signal meanwhile."""
        try:
            child = self._start()
        except UsageError as error:
            if number == 1:
                raise
            self._teller.say(str(error))  # it could be started before: a disk or a machine that is short of something
            return _CANNOT_START, None
        manner = StopOptions(self._orders.grace, self._orders.notice, self._others)
        stopping = ProcessStopper(child.pid, manner, self._teller.say)
        code = self._watch(child, stopping)
        return code, stopping.told_to(code)

    def _start(self) -> subprocess.Popen[bytes]:
        command = list(self._orders.command)
        try:
            # Nothing but this system call runs before the command does.
            return subprocess.Popen(
                command,
                start_new_session=True,
                preexec_fn=self._unhold,  # noqa: PLW1509
            )
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot start {command[0]!r}: {error}; give the command after `--`") from error

    def _unhold(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _watch(self, child: subprocess.Popen[bytes], stopping: ProcessStopper) -> int:
        while (code := child.poll()) is None:
            reap(but=child.pid)
            stopping.act()
            due = stopping.seconds
            number = self._next_signal(_LOOK_UP if due is None else due)
            if number is not None and number != signal.SIGCHLD:
                stopping.take(number)
        return code

    def _wait(self, seconds: float) -> GiveUp | None:
        """Wait between two attempts. Any signal ends the supervision, since no command runs."""
        deadline = time.monotonic() + seconds
        while True:
            number = self._next_signal(max(0.0, deadline - time.monotonic()))
            if number is None and time.monotonic() >= deadline:
                return None
            if number not in (None, signal.SIGCHLD):
                return _ended_by(number)

    def _wait_for_store(self, seconds: float) -> GiveUp | None:
        deadline, told = time.monotonic() + seconds, False
        while (holder := self._store.holder()) is not None:
            who = f"process {holder}" if holder else "another process"
            if time.monotonic() >= deadline:
                raise StoreInUseError(
                    f"the store {self._store.root} is in use by {who} on this machine: the job of a supervisor that "
                    "was killed goes on by itself. Wait for it (`--wait SECONDS`), or end it first"
                )
            if not told:
                self._teller.say(f"the store is in use by {who}: waiting for {seconds:g} s at most")
            told = True
            if stop := self._wait(min(1.0, max(0.0, deadline - time.monotonic()))):
                return stop
        return None

    def _next_signal(self, seconds: float) -> signal.Signals | None:
        """Return the next signal, None after ``seconds`` or a minute; callers loop for longer waits."""
        taken = signal.sigtimedwait({*self._signals, signal.SIGCHLD}, min(seconds, _LOOK_UP))
        return None if taken is None else signal.Signals(taken.si_signo)

    @contextmanager
    def _signals_held(self) -> Iterator[None]:
        """Block the signals, SIGCHLD included, so that they are received by waiting.

        The handlers installed are never called; they show an outer supervisor that this process handles the signals.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*self._signals, signal.SIGCHLD})
        self._mask = {signal.Signals(number) for number in before}
        handlers = {number: signal.signal(number, _untaken) for number in self._signals}
        handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            yield
        finally:
            while self._next_signal(0.0) is not None:  # it is over: what still comes must not change how it ended
                pass
            for number, handler in handlers.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _untaken(number: int, frame: FrameType | None) -> None:
    """Do nothing: signals stay blocked while this is their handler."""
    pass


def _ended_by(number: signal.Signals | None) -> GiveUp:
    if number == signal.SIGINT:
        return GiveUp(INTERRUPTED, "interrupted")
    return GiveUp(PREEMPTED, f"{number.name if number else 'a signal'} came while no attempt was running")
