"""What a signal to the supervisor means for the command that runs, and what follows if it does not end. One attempt.

Owned by the supervisor's thread; it sends signals and waits for nothing. The trainer's own handler gets SIGUSR1 before
anything else gets SIGTERM, because a launcher that is told to terminate gives its workers little time to save.
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


@dataclass(frozen=True)
class _Due:
    at: float
    act: Callable[[], None]


class Stopping:
    """The signals of one attempt. told_to: the code that the supervisor is to end with; None until a signal says so.

    others: children of this process that are not the command's."""

    def __init__(
        self, pid: int, grace: float, say: Callable[[str], None], others: Collection[psutil.Process] = ()
    ) -> None:
        self.told_to: int | None = None
        self._pid = pid
        self._grace = grace
        self._say = say
        self._others = others
        self._asked = 0
        self._due: list[_Due] = []

    @property
    def seconds(self) -> float | None:
        """Until something is due; None where nothing is."""
        return max(0.0, min(due.at for due in self._due) - time.monotonic()) if self._due else None

    def act(self) -> None:
        """Do what is due."""
        now = time.monotonic()
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
        if self.told_to is None or number == signal.SIGINT:
            self.told_to = INTERRUPTED if number == signal.SIGINT else PREEMPTED
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
        self.told_to = self.told_to or PREEMPTED
        self._say(f"{number.name}: passed on to {_processes(told)}")

    def _ask(self, number: signal.Signals) -> None:
        if number == signal.SIGINT:
            self._send(number)
            self._say("SIGINT: passed on; a second one ends the command with SIGTERM, a third with SIGKILL")
            return
        told = send(catching(self._pid, signal.SIGUSR1), signal.SIGUSR1)
        if told:
            self._say(f"{number.name}: SIGUSR1 to {_processes(told)}; SIGTERM in {self._grace:g} s")
            self._later(self._grace, lambda: self._terminate(f"{self._grace:g} s are over"))
            return
        self._send(signal.SIGTERM)
        self._say(f"{number.name}: passed on; SIGKILL in {self._grace + KILL_AFTER:g} s")
        self._later(self._grace + KILL_AFTER, lambda: self._kill("it did not end"))

    def _terminate(self, why: str) -> None:
        self._say(f"{why}: SIGTERM to the command; SIGKILL in {KILL_AFTER:g} s")
        self._send(signal.SIGTERM)
        self._due = []
        self._later(KILL_AFTER, lambda: self._kill("it did not end"))

    def _kill(self, why: str) -> None:
        self._say(f"{why}: SIGKILL to all processes of the command")
        self._due = []
        send(below(self._others), signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        with suppress(psutil.NoSuchProcess):
            send([psutil.Process(self._pid)], number)

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        self._due.append(_Due(time.monotonic() + seconds, act))


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
