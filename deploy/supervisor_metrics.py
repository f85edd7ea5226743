"""What ``driftpoint run`` serves to Prometheus: attempts, how they ended, and how long nothing got further.

A registry of its own. Told by the supervisor's thread. A port that is taken costs the endpoint, nothing else.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from deploy.supervision import OK, Attempt, Course
from store.errors import PREEMPTED, ConfigError
from store.metrics_server import EndpointSecurity, MetricsServer

ENDS = ("done", "preempted", "failed", "killed")
"""How attempts end: with 0, with 75, with another code, of a signal."""


class SupervisorMetrics:
    """The metric set. Without :meth:`serve` it only counts. restarts: in a row without progress, that are allowed."""

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
        """That a scraper asks; None where nobody listens."""
        return None if self._server is None else self._server.url

    def serve(self, host: str, port: int, security: EndpointSecurity, say: Callable[[str], None]) -> None:
        """Listen; 0 takes a free port. Signals are the supervisor's: no other thread of its process takes one."""
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
        """An attempt begins."""
        self.attempts.inc()
        self.running.set(1)
        self.began_at.set(time.time())

    def over(self, attempt: Attempt) -> None:
        """An attempt ended."""
        self.running.set(0)
        self.ended.labels(_end(attempt.code)).inc()
        self.blind.set(bool(attempt.after.trouble))
        if not attempt.after.trouble:
            self.step.set(attempt.after.step)

    def judged(self, course: Course) -> None:
        """What that means for the job."""
        self.in_a_row.set(course.in_a_row)

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            self._server = None


def _end(code: int) -> str:
    if code < 0:
        return "killed"
    return {OK: "done", PREEMPTED: "preempted"}.get(code, "failed")
