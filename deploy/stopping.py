"""What a signal to the supervisor means for the command that runs, and what follows if it does not end. One attempt.

Owned by the supervisor's thread; it sends signals and waits for nothing. The trainer's own handler gets its notice
(SIGUSR1, unless the job's settings name another) before anything else gets SIGTERM, because a launcher that is told to
terminate gives its workers little time to save.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

import psutil

from deploy.processes import below, catching, send
from deploy.supervision import INTERRUPTED
from store.errors import PREEMPTED

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
KILL_AFTER = 10.0
"""Seconds from the SIGTERM after the grace to SIGKILL."""
ANSWERED = 600.0
"""Seconds after a notice, besides the grace, in which the end of the command is the answer to it: launchers hide the
code that would tell. A signal may be there for something else, and the job dies of something else days later."""


@dataclass(frozen=True)
class _Due:
    at: float
    act: Callable[[], None]


@dataclass(frozen=True)
class Manner:
    """How a command is ended. grace: seconds for its last save. notice: what the trainer heeds. others: children of
    this process that are not the command's."""

    grace: float = 30.0
    notice: signal.Signals = signal.SIGUSR1
    others: Collection[psutil.Process] = ()


class Stopping:
    """The signals of one attempt. clock: seconds, never going back."""

    def __init__(
        self, pid: int, manner: Manner, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pid = pid
        self._manner = manner
        self._say = say
        self._clock = clock
        self._told_to: int | None = None
        self._noticed: float | None = None
        self._asked = 0
        self._due: list[_Due] = []

    @property
    def seconds(self) -> float | None:
        """Until something is due; None where nothing is."""
        return max(0.0, min(due.at for due in self._due) - self._clock()) if self._due else None

    def told_to(self, code: int) -> int | None:
        """The command ended with ``code`` just now: what the supervisor is to end with; None where no signal says."""
        if self._told_to is not None or self._noticed is None:
            return self._told_to
        answers = code == PREEMPTED or self._clock() - self._noticed <= self._manner.grace + ANSWERED
        return PREEMPTED if answers else None

    def act(self) -> None:
        """Do what is due."""
        now = self._clock()
        ready = [due for due in self._due if due.at <= now]
        self._due = [due for due in self._due if due.at > now]
        for due in ready:
            due.act()

    def take(self, number: signal.Signals) -> None:
        """A signal came."""
        if number in NOTICES:
            self._notify(number)
            return
        self._asked += 1
        if self._told_to is None or number == signal.SIGINT:
            self._told_to = INTERRUPTED if number == signal.SIGINT else PREEMPTED
        if self._asked == 1:
            self._ask(number)
        elif self._asked == 2:
            self._terminate(f"a second {number.name}")
        else:
            self._kill(f"a third {number.name}")

    def _notify(self, number: signal.Signals) -> None:
        told = send(catching(self._pid, number), number)
        if told == 0:
            self._say(f"{number.name}: no process of the command has a handler for it, so it is passed on to none")
            return
        self._noticed = self._clock()
        self._say(f"{number.name}: passed on to {_processes(told)}")

    def _ask(self, number: signal.Signals) -> None:
        if number == signal.SIGINT:
            self._send(number)
            self._say("SIGINT: passed on; a second one ends the command with SIGTERM, a third with SIGKILL")
            return
        grace, notice = self._manner.grace, self._manner.notice
        told = send(catching(self._pid, notice), notice) if notice != signal.SIGTERM else 0
        if told:
            self._say(f"{number.name}: {notice.name} to {_processes(told)}; SIGTERM in {grace:g} s")
            self._later(grace, lambda: self._terminate(f"{grace:g} s are over"))
            return
        self._send(signal.SIGTERM)
        self._say(f"{number.name}: passed on; SIGKILL in {grace + KILL_AFTER:g} s")
        self._later(grace + KILL_AFTER, lambda: self._kill("it did not end"))

    def _terminate(self, why: str) -> None:
        self._say(f"{why}: SIGTERM to the command; SIGKILL in {KILL_AFTER:g} s")
        self._send(signal.SIGTERM)
        self._due = []
        self._later(KILL_AFTER, lambda: self._kill("it did not end"))

    def _kill(self, why: str) -> None:
        self._say(f"{why}: SIGKILL to all processes of the command")
        self._due = []
        send(below(self._manner.others), signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        with suppress(psutil.NoSuchProcess):
            send([psutil.Process(self._pid)], number)

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        self._due.append(_Due(self._clock() + seconds, act))


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
