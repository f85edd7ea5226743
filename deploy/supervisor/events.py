"""Report the supervisor's events: lines on the terminal, an optional JSON file, and Prometheus metrics.

Owned by the supervisor's thread. A closed terminal, a full disk or a used port never ends the supervision: the line or
the endpoint is dropped, and the event file's failure is reported once."""

import json
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deploy.supervisor.restart_policy import NO_PROGRESS, OK, Attempt, GiveUp, RestartHistory, StoreSnapshot
from store.errors import PREEMPTED, ConfigError
from store.metrics_server import EndpointSecurity, ProcessMetrics
from store.names import SaveId

_LISTED = 8
ENDS = ("done", "preempted", "failed", "killed")  # ends of attempts: exit code 0, 75, any other, or a signal


class EventLog:
    """Reports events as lines for people, JSON lines in ``events``, and metrics."""

    def __init__(
        self,
        line: Callable[[str], None],
        events: Path | None = None,
        root: Path | None = None,
        metrics: "SupervisorMetrics | None" = None,
    ) -> None:
        self._line = line
        self._metrics = metrics
        self._events = events
        self._root = root
        self._ends: list[str] = []

    def message(self, text: str) -> None:
        with suppress(OSError, ValueError):  # stderr is closed, or the terminal is gone
            self._line(f"driftpoint run: {text}")

    def on_attempt_start(self, number: int, seconds: float, snapshot: StoreSnapshot) -> None:
        after = f" (after {seconds:.3g} s)" if number > 1 else ""
        self.message(f"attempt {number}{after}: {_from(snapshot)}")
        if self._metrics is not None:
            self._metrics.on_attempt_start()
        self._event("begin", attempt=number, commit=_name(snapshot.resumes), trouble=snapshot.trouble or None)

    def on_attempt_end(self, number: int, attempt: Attempt) -> None:
        newest = attempt.after.newest
        new = f"; committed up to step {newest.step}" if attempt.committed and newest is not None else ""
        unknown = f"; the store cannot be read: {attempt.after.trouble}" if attempt.after.trouble else ""
        self.message(f"attempt {number} ended: {attempt.end}{new}{unknown}")
        self._ends.append(f"attempt {number}: {attempt.end}, {_from(attempt.before)}")
        self._ends = self._ends[-_LISTED:]
        if self._metrics is not None:
            self._metrics.on_attempt_end(attempt)
        self._event("end", attempt=number, code=attempt.code, commit=_name(newest), committed=attempt.committed)

    def on_decision(self, history: RestartHistory) -> None:
        if self._metrics is not None:
            self._metrics.on_decision(history)

    def on_suspect_marked(self, save: SaveId, instead: SaveId | None, trouble: str) -> None:
        """Report a commit marked as suspect, or the failure to mark it."""
        if trouble:
            self.message(f"commit {save} could not be marked as suspect: {trouble}")
            return
        to = "" if instead is None else f": falling back to step {instead.step}"
        self.message(f"commit {save} is suspect: two jobs that resumed from it died without a commit{to}")
        if self._metrics is not None:
            self._metrics.suspects.inc()
        self._event("suspect", commit=save.name, instead=_name(instead))

    def on_suspect_withdrawn(self, save: SaveId, trouble: str) -> None:
        """Report a removed suspect mark, or the failure to remove it."""
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


class SupervisorMetrics(ProcessMetrics):
    """Metrics of ``driftpoint run``."""

    def __init__(self, restarts: int) -> None:
        super().__init__("driftpoint_supervisor")
        self.up = self.gauge("up", "1 while the supervisor runs")
        self.attempts = self.counter("attempts", "Starts of the command")
        self.running = self.gauge("running", "1 while the command runs")
        self.ended = self.counter("attempts_ended", "Ends of the command, by kind", "end")
        self.in_a_row = self.gauge("attempts_without_progress", "Attempts since the last one with progress")
        self.limit = self.gauge("restarts_limit", "Allowed restarts in a row without progress")
        self.step = self.gauge("step", "Furthest step in the store at the last look, -1: none")
        self.began_at = self.gauge("attempt_timestamp_seconds", "Start of the newest attempt")
        self.suspects = self.counter("suspects", "Commits marked as suspect")
        self.blind = self.gauge("store_unreadable", "1 if the store was unreadable at the last look")
        for end in ENDS:
            self.ended.labels(end)
        self.limit.set(restarts)
        self.step.set(-1)
        self.up.set(1)

    def serve(self, host: str, port: int, security: EndpointSecurity, say: Callable[[str], None]) -> None:
        """Serve the metrics; port 0 takes a free one. Signals stay blocked in the server's thread."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.listen(host, port, security)
        except OSError as error:
            why = error.strerror or error
            say(f"no metrics: cannot listen on {host} port {port} ({why}); give another --metrics-port")
        except ConfigError as error:
            say(f"no metrics: {error}")
        else:
            say(f"metrics at {self.url}")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def on_attempt_start(self) -> None:
        self.attempts.inc()
        self.running.set(1)
        self.began_at.set(time.time())

    def on_attempt_end(self, attempt: Attempt) -> None:
        self.running.set(0)
        self.ended.labels(_end(attempt.code)).inc()
        self.blind.set(bool(attempt.after.trouble))
        if not attempt.after.trouble:
            self.step.set(attempt.after.step)

    def on_decision(self, history: RestartHistory) -> None:
        self.in_a_row.set(history.in_a_row)


def _end(code: int) -> str:
    return "killed" if code < 0 else {OK: "done", PREEMPTED: "preempted"}.get(code, "failed")
