"""Run a command until it is done: start it, forward signals, clean up, and restart it by the restart policy.

One thread, which receives signals by ``sigtimedwait`` and never in a handler, so that none is lost. It writes nothing
to the store except suspect marks. If this process is killed, the command continues by itself. A closed terminal or a
full disk never ends the supervision: the line is dropped, and the event file's failure is reported once."""

import json
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from deploy.supervisor import processes, restart_policy
from deploy.supervisor.restart_policy import NO_PROGRESS, Attempt, GiveUp, StoreSnapshot
from deploy.supervisor.store_probe import StoreProbe
from store.errors import PREEMPTED, StoreInUseError, UsageError
from store.names import SaveId

_ORPHANS_TERM = 5.0
_ORPHANS_KILL = 10.0
_OTHER_NODES = 1800.0
"""Seconds to wait for the store before a restart.

Some file servers show the lock of rank 0 on another node, which may hang in a collective until its timeout."""
_CANNOT_START = 127  # exit code of a command that could not be started, as in shells
_MAX_WAIT = 60.0  # longest wait for a signal, in seconds, as a safeguard against missed ones
_LISTED = 8  # ends of attempts repeated when it gives up


class EventLog:
    """Reports events as lines for people, and JSON lines in ``events``."""

    def __init__(self, line: Callable[[str], None], events: Path | None = None, root: Path | None = None) -> None:
        self._line, self._events, self._root = line, events, root
        self._ends: list[str] = []

    def message(self, text: str) -> None:
        with suppress(OSError, ValueError):  # stderr is closed, or the terminal is gone
            self._line(f"driftpoint run: {text}")

    def on_attempt_start(self, number: int, seconds: float, snapshot: StoreSnapshot) -> None:
        after = f" (after {seconds:.3g} s)" if number > 1 else ""
        self.message(f"attempt {number}{after}: {_from(snapshot)}")
        self._event("begin", attempt=number, commit=_name(snapshot.resumes), trouble=snapshot.trouble or None)

    def on_attempt_end(self, number: int, attempt: Attempt) -> None:
        newest = attempt.after.newest
        new = f"; committed up to step {newest.step}" if attempt.committed and newest is not None else ""
        unknown = f"; the store cannot be read: {attempt.after.trouble}" if attempt.after.trouble else ""
        self.message(f"attempt {number} ended: {attempt.end}{new}{unknown}")
        self._ends.append(f"attempt {number}: {attempt.end}, {_from(attempt.before)}")
        self._ends = self._ends[-_LISTED:]
        self._event("end", attempt=number, code=attempt.code, commit=_name(newest), committed=attempt.committed)

    def on_suspect_marked(self, save: SaveId, instead: SaveId | None, trouble: str) -> None:
        if trouble:
            self.message(f"commit {save} could not be marked as suspect: {trouble}")
            return
        to = "" if instead is None else f": falling back to step {instead.step}"
        self.message(f"commit {save} is suspect: two jobs that resumed from it died without a commit{to}")
        self._event("suspect", commit=save.name, instead=_name(instead))

    def on_suspect_withdrawn(self, save: SaveId, trouble: str) -> None:
        if trouble:
            self.message(f"commit {save} is not the cause, but its suspect mark could not be removed: {trouble}")
            return
        self.message(f"commit {save} is no longer suspect: falling back from it did not help")
        self._event("withdrawn", commit=save.name)

    def on_stop(self, stop: GiveUp) -> None:
        self._event("stop", code=stop.code, why=stop.why)
        if stop.code == 0:
            return
        self.message(f"stopped (exit code {stop.code}): {stop.why}")
        if stop.code == NO_PROGRESS:
            for end in self._ends:
                self.message(f"  {end}")
            self.message(
                "for the cause, see the command's output above. To inspect the commits: "
                f"`driftpoint show {self._root}`, `driftpoint verify {self._root}`. Then run the same command again"
            )

    def _event(self, kind: str, **facts: Any) -> None:
        if self._events is None:
            return
        now = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
        try:
            with self._events.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"event": kind, "time": now, **facts}) + "\n")
        except OSError as error:
            self._events = None
            self.message(f"cannot write events: {error}; no more are written")


def _from(snapshot: StoreSnapshot) -> str:
    if snapshot.trouble:
        return f"the store cannot be read: {snapshot.trouble}"
    if snapshot.resumes is None:
        return "from the beginning" if snapshot.newest is None else "no commit can be resumed"
    return f"resuming from step {snapshot.resumes.step}"


def _name(save: SaveId | None) -> str | None:
    return None if save is None else save.name


@dataclass(frozen=True)
class RunOptions:
    """Command and limits of a supervised job."""

    command: Sequence[str]
    limits: restart_policy.Limits = field(default_factory=restart_policy.Limits)
    grace: float = 30.0  # seconds for the trainer's final save after a signal
    wait: float = 0.0  # seconds to wait for a store in use
    notice: signal.Signals = signal.SIGUSR1  # preemption signal that the trainer handles


class Supervisor:
    """Supervises one job on one store."""

    def __init__(self, options: RunOptions, store: StoreProbe, log: EventLog) -> None:
        self._options, self._store, self._log = options, store, log
        known = (*processes.ENDS, *processes.NOTICES)
        self._signals = {number for number in known if signal.getsignal(number) != signal.SIG_IGN}
        self._mask: set[signal.Signals] = set()
        self._known = StoreSnapshot()
        self._gone: StoreSnapshot | None = None
        self._others = processes.children()  # of a script that became this process by `exec`

    def run(self) -> int:
        """Run until the job is done and return the exit code.

        Raises StoreInUseError if another job uses the store, UsageError if the command cannot be started."""
        if not processes.adopt_orphans():
            self._log.message("the system cannot reassign orphaned processes: those of a dead command are not ended")
        with self._signals_blocked():
            stop = self._attempts()
            self._log.on_stop(stop)
        return stop.code

    def _attempts(self) -> GiveUp:
        history, again, number = restart_policy.RestartHistory(), restart_policy.Restart(0.0), 0
        while True:
            patience = self._options.wait if number == 0 else max(self._options.wait, _OTHER_NODES)
            if (stop := self._wait(again.seconds) or self._wait_for_store(patience)) is not None:
                return stop
            number += 1
            attempt = self._attempt(number, again.seconds)
            history, verdict = restart_policy.decide_restart(history, attempt, self._options.limits, random.random)
            if isinstance(verdict, GiveUp):
                for save in verdict.withdrawn:
                    self._log.on_suspect_withdrawn(save, self._store.withdraw(save))
                return verdict
            if verdict.suspect is not None:
                trouble = self._store.mark(verdict.suspect, f"two attempts died, the last of {attempt.end}")
                self._log.on_suspect_marked(verdict.suspect, attempt.after.instead, trouble)
            again = verdict

    def _attempt(self, number: int, waited: float) -> Attempt:
        before = self._read_store()
        self._log.on_attempt_start(number, waited, before)
        code, exit_request = (_CANNOT_START, None) if before is self._gone else self._run_command(number)
        left, stuck = processes.end_descendants(_ORPHANS_TERM, _ORPHANS_KILL, self._others)
        if left:
            self._log.message(f"ended {left} processes that the command left behind")
        if stuck:
            self._log.message(f"{stuck} of them survive SIGKILL: they wait for a device or a disk")
        attempt = Attempt(code, before, self._read_store(), exit_request)
        self._log.on_attempt_end(number, attempt)
        return attempt

    def _read_store(self) -> StoreSnapshot:
        """Read the store; report a store that disappeared (its disk is not mounted, say) as trouble.

        No attempt starts then: a job that finds an empty path would train from scratch into it."""
        snapshot = self._store.look()
        if not snapshot.trouble and self._known.newest is not None and snapshot.epoch < self._known.epoch:
            self._gone = StoreSnapshot(
                trouble=f"{self._store.root} held step {self._known.step} and is now empty or another store: is its "
                "disk mounted? The command is not started. To start over on purpose, stop and run this again"
            )
            return self._gone
        if not snapshot.trouble:
            self._known = snapshot
        return snapshot

    def _run_command(self, number: int) -> tuple[int, int | None]:
        """Run the command; return its exit code and the one demanded by a signal meanwhile."""
        try:
            child = self._start()
        except UsageError as error:
            if number == 1:
                raise
            self._log.message(str(error))  # it could be started before: a disk or a machine that is short of something
            return _CANNOT_START, None
        grace, notice = self._options.grace, self._options.notice
        stop = processes.ProcessStopper(child.pid, self._log.message, grace=grace, notice=notice, others=self._others)
        while (code := child.poll()) is None:
            processes.reap(but=child.pid)
            stop.act()
            due = stop.seconds
            received = self._next_signal(_MAX_WAIT if due is None else due)
            if received is not None and received != signal.SIGCHLD:
                stop.take(received)
        return code, stop.exit_request(code)

    def _start(self) -> subprocess.Popen[bytes]:
        command = list(self._options.command)
        # Nothing but this system call runs before the command does.
        restore_mask = partial(signal.pthread_sigmask, signal.SIG_SETMASK, self._mask)
        try:
            return subprocess.Popen(command, start_new_session=True, preexec_fn=restore_mask)  # noqa: PLW1509
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot start {command[0]!r}: {error}; give the command after `--`") from error

    def _wait(self, seconds: float) -> GiveUp | None:
        """Wait between two attempts. Any signal ends the supervision, since no command runs."""
        deadline = time.monotonic() + seconds
        while True:
            number = self._next_signal(max(0.0, deadline - time.monotonic()))
            if number is None and time.monotonic() >= deadline:
                return None
            if number == signal.SIGINT:
                return GiveUp(restart_policy.INTERRUPTED, "interrupted")
            if number is not None and number != signal.SIGCHLD:
                return GiveUp(PREEMPTED, f"{number.name} received while no attempt was running")

    def _wait_for_store(self, seconds: float) -> GiveUp | None:
        deadline, told = time.monotonic() + seconds, False
        while (holder := self._store.holder()) is not None:
            who = f"process {holder}" if holder else "another process"
            if time.monotonic() >= deadline:
                raise StoreInUseError(
                    f"the store {self._store.root} is in use by {who} on this machine: a job continues when its "
                    "supervisor is killed. Wait for it (`--wait SECONDS`), or end it first"
                )
            if not told:
                self._log.message(f"the store is in use by {who}: waiting up to {seconds:g} s")
            told = True
            if stop := self._wait(min(1.0, max(0.0, deadline - time.monotonic()))):
                return stop
        return None

    def _next_signal(self, seconds: float) -> signal.Signals | None:
        """Return the next signal, None after ``seconds`` or a minute; callers loop for longer waits."""
        taken = signal.sigtimedwait({*self._signals, signal.SIGCHLD}, min(seconds, _MAX_WAIT))
        return None if taken is None else signal.Signals(taken.si_signo)

    @contextmanager
    def _signals_blocked(self) -> Iterator[None]:
        """Block the signals, SIGCHLD included, so that they are received by waiting.

        The handlers installed are never called; they show an outer supervisor that this process handles the signals."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*self._signals, signal.SIGCHLD})
        self._mask = {signal.Signals(number) for number in before}
        handlers = {number: signal.signal(number, lambda *_: None) for number in self._signals}
        handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            yield
        finally:
            while self._next_signal(0.0) is not None:  # drain late signals, which must not change the exit code
                pass
            for number, handler in handlers.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
