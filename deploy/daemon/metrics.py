"""What the daemon of a node serves to Prometheus: a registry of its own, refreshed from its tables.

A port that is taken costs the endpoint, nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from store.daemon.messages import JobReport

_log = logging.getLogger("driftpoint")


class DaemonMetrics:
    """The metric set. Without :meth:`serve` it only counts."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        store = ("store",)
        self.registry = registry
        self.up = Gauge("driftpoint_daemon_up", "1 as long as the daemon runs", registry=registry)
        self.jobs = Gauge("driftpoint_daemon_jobs", "Jobs on this node", registry=registry)
        self.trainers = Gauge("driftpoint_daemon_trainers", "Living processes of a job here", store, registry=registry)
        self.committed = Gauge(
            "driftpoint_daemon_last_commit_step", "Step of the newest commit, as its job told", store, registry=registry
        )
        self.committed_at = Gauge(
            "driftpoint_daemon_last_commit_timestamp_seconds", "When that was told", store, registry=registry
        )
        self.memory = Gauge(
            "driftpoint_daemon_memory_step",
            "Step of the newest version in memory that all ranks have, as its job told",
            store,
            registry=registry,
        )
        self.rescues = Counter(
            "driftpoint_daemon_rescues", "Looks at what dead jobs left in memory", ("outcome",), registry=registry
        )
        self.rescued_at = Gauge(
            "driftpoint_daemon_last_rescue_timestamp_seconds", "When a version was last written", registry=registry
        )
        self.verified_bytes = Counter("driftpoint_daemon_verified_bytes", "Bytes of commits read", registry=registry)
        self.verified = Counter("driftpoint_daemon_verified_commits", "Commits read", registry=registry)
        self.damaged = Gauge(
            "driftpoint_daemon_damaged_commits", "Commits that were found damaged", store, registry=registry
        )
        self.verify_failures = Counter(
            "driftpoint_daemon_verify_failures", "Stores that could not be looked at", registry=registry
        )
        self.refused = Counter(
            "driftpoint_daemon_refused", "Connections that were refused, by reason", ("reason",), registry=registry
        )
        self._shown: set[str] = set()
        self._server: Any = None
        self.port: int | None = None
        self.up.set(1)

    def serve(self, port: int) -> None:
        """Listen on this machine only; 0 takes a free port."""
        try:
            server, _ = start_http_server(port, addr="127.0.0.1", registry=self.registry)
        except OSError as error:
            _log.warning(
                "no metrics of the daemon: cannot listen on 127.0.0.1 port %d (%s); set another with --port",
                port,
                error.strerror or error,
            )
            return
        self._server, self.port = server, server.server_port

    def show(self, jobs: Iterable[JobReport]) -> None:
        """How things stand."""
        reports = list(jobs)
        self.jobs.set(len(reports))
        for store in self._shown - {one.store for one in reports}:
            for gauge in (self.trainers, self.committed, self.committed_at, self.memory):
                with suppress(KeyError):
                    gauge.remove(store)
        self._shown = {one.store for one in reports}
        for one in reports:
            self.trainers.labels(one.store).set(len(one.alive))
            if one.committed is not None:
                self.committed.labels(one.store).set(int(one.committed.partition("-")[0]))
                self.committed_at.labels(one.store).set(one.committed_at or 0.0)
            if one.memory is not None:
                self.memory.labels(one.store).set(int(one.memory.partition("-")[0]))

    def rescued(self, outcome: str) -> None:
        """A rescue ended."""
        self.rescues.labels(outcome).inc()
        if outcome == "written":
            self.rescued_at.set(time.time())

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
