"""Report the supervisor's events: lines on the terminal, an optional JSON file, and Prometheus metrics.

Owned by the supervisor's thread. A closed terminal, a full disk or a used port never ends the supervision: the line or
the endpoint is dropped, and the event file's failure is reported once.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from deploy.supervisor.restart_policy import NO_PROGRESS, OK, Attempt, GiveUp, RestartHistory, StoreSnapshot
from store.errors import PREEMPTED, ConfigError
from store.metrics_server import EndpointSecurity, MetricsServer
from store.names import SaveId

if TYPE_CHECKING:
    pass


_LISTED = 8


class EventLog:
    """Reports events as lines for people, JSON lines in ``events``, and metrics."""

    def __init__(
        self,
        line: Callable[[str], None],
        events: Path | None = None,
        root: Path | None = None,
        metrics: SupervisorMetrics | None = None,
    ) -> None:
        self._line = line
        self._metrics = metrics
        self._events = events
        self._root = root
        self._ends: list[str] = []

    def say(self, text: str) -> None:
        """Print a line for people."""
        with suppress(OSError, ValueError):  # nobody reads, or the terminal is gone
            self._line(f"driftpoint run: {text}")

    def began(self, number: int, seconds: float, sight: StoreSnapshot) -> None:
        """Report the start of an attempt."""
        after = f" (after {seconds:.3g} s)" if number > 1 else ""
        self.say(f"attempt {number}{after}: {_from(sight)}")
        if self._metrics is not None:
            self._metrics.began()
        self._event("begin", attempt=number, commit=_name(sight.resumes), trouble=sight.trouble or None)

    def ended(self, number: int, attempt: Attempt) -> None:
        """Report the end of an attempt."""
        newest = attempt.after.newest
        new = f"; kept up to step {newest.step}" if attempt.committed and newest is not None else ""
        unknown = f"; the store cannot be read: {attempt.after.trouble}" if attempt.after.trouble else ""
        self.say(f"attempt {number} ended: {attempt.end}{new}{unknown}")
        self._ends.append(f"attempt {number}: {attempt.end}, {_from(attempt.before)}")
        self._ends = self._ends[-_LISTED:]
        if self._metrics is not None:
            self._metrics.over(attempt)
        self._event("end", attempt=number, code=attempt.code, commit=_name(newest), committed=attempt.committed)

    def judged(self, course: RestartHistory) -> None:
        """Update the metrics after the restart decision."""
        if self._metrics is not None:
            self._metrics.judged(course)

    def marked(self, save: SaveId, instead: SaveId | None, trouble: str) -> None:
        """Report a commit marked as suspect, or the failure to mark it."""
        if trouble:
            self.say(f"commit {save} could not be marked as suspect: {trouble}")
            return
        to = "" if instead is None else f": falling back to step {instead.step}"
        self.say(f"commit {save} is suspect, resumed from it died twice without a commit{to}")
        if self._metrics is not None:
            self._metrics.suspects.inc()
        self._event("suspect", commit=save.name, instead=_name(instead))

    def withdrew(self, save: SaveId, trouble: str) -> None:
        """Report a removed suspect mark, or the failure to remove it."""
        if trouble:
            self.say(f"commit {save} is not to blame, but its mark could not be removed: {trouble}")
            return
        self.say(f"commit {save} is suspect no more: falling back from it did not help")
        self._event("withdrawn", commit=save.name)

    def stopped(self, stop: GiveUp) -> None:
        """Report the end of the supervision."""
        self._event("stop", code=stop.code, why=stop.why)
        if stop.code == 0:
            return
        self.say(f"stopped (exit code {stop.code}): {stop.why}")
        if stop.code == NO_PROGRESS:
            for end in self._ends:
                self.say(f"  {end}")
            self.say(
                "what it died of is in the command's own output above. To see what it starts from: "
                f"`driftpoint show {self._root}`, `driftpoint verify {self._root}`. Then give the same command again"
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
            self.say(f"events are written no more: {error}")


def _from(sight: StoreSnapshot) -> str:
    if sight.trouble:
        return f"the store cannot be read: {sight.trouble}"
    if sight.resumes is None:
        return "from the beginning" if sight.newest is None else "no commit can be resumed"
    return f"resuming from step {sight.resumes.step}"


def _name(save: SaveId | None) -> str | None:
    return None if save is None else save.name


ENDS = ("done", "preempted", "failed", "killed")
"""Ends of attempts: exit code 0, 75, any other, or a signal."""


class SupervisorMetrics:
    """Metrics of ``driftpoint run``, in a registry of their own. Without :meth:`serve` it only counts."""

    def __init__(self, restarts: int) -> None:
        registry = CollectorRegistry()
        self.registry = registry
        self.up = Gauge("driftpoint_supervisor_up", "1 as long as the supervisor runs", registry=registry)
        self.attempts = Counter("driftpoint_supervisor_attempts", "Times that the command was begun", registry=registry)
        self.running = Gauge("driftpoint_supervisor_running", "1 while the command runs", registry=registry)
        self.ended = Counter(
            "driftpoint_supervisor_attempts_ended", "Times that the command ended, by how", ("end",), registry=registry
        )
        self.in_a_row = Gauge(
            "driftpoint_supervisor_attempts_without_progress",
            "Attempts since the last one that got further",
            registry=registry,
        )
        self.limit = Gauge(
            "driftpoint_supervisor_restarts_limit",
            "Restarts in a row without progress, after which it stops",
            registry=registry,
        )
        self.step = Gauge(
            "driftpoint_supervisor_step", "Furthest step in the store when it looked last, -1: none", registry=registry
        )
        self.began_at = Gauge(
            "driftpoint_supervisor_attempt_timestamp_seconds", "When the newest attempt began", registry=registry
        )
        self.suspects = Counter("driftpoint_supervisor_suspects", "Commits marked as suspect", registry=registry)
        self.blind = Gauge(
            "driftpoint_supervisor_store_unreadable", "1 where the store could not be read last", registry=registry
        )
        for end in ENDS:
            self.ended.labels(end)
        self.limit.set(restarts)
        self.step.set(-1)
        self.up.set(1)
        self._server: MetricsServer | None = None

    @property
    def url(self) -> str | None:
        return None if self._server is None else self._server.url

    def serve(self, host: str, port: int, security: EndpointSecurity, say: Callable[[str], None]) -> None:
        """Serve the metrics; port 0 takes a free one. Signals stay blocked in the server's thread."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._server = MetricsServer(self.registry, host, port, security)
        except OSError as error:
            why = error.strerror or error
            say(f"no metrics: cannot listen on {host} port {port} ({why}); give another --metrics-port")
        except ConfigError as error:
            say(f"no metrics: {error}")
        else:
            say(f"metrics at {self.url}")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def began(self) -> None:
        self.attempts.inc()
        self.running.set(1)
        self.began_at.set(time.time())

    def over(self, attempt: Attempt) -> None:
        self.running.set(0)
        self.ended.labels(_end(attempt.code)).inc()
        self.blind.set(bool(attempt.after.trouble))
        if not attempt.after.trouble:
            self.step.set(attempt.after.step)

    def judged(self, course: RestartHistory) -> None:
        self.in_a_row.set(course.in_a_row)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


def _end(code: int) -> str:
    if code < 0:
        return "killed"
    return {OK: "done", PREEMPTED: "preempted"}.get(code, "failed")
