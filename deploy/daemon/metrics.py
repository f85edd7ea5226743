"""Prometheus metrics of the node daemon, in a registry of their own.

If the port is in use, only the endpoint is missing.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge

from deploy.daemon.rescuer import OUTCOMES
from store.daemon_protocol import Report
from store.errors import ConfigError
from store.metrics_server import EndpointSecurity, MetricsServer

_log = logging.getLogger("driftpoint")


class DaemonMetrics:
    """Metrics of the node daemon. Without :meth:`serve` it only counts."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        store = ("store",)
        self.registry = registry
        self.up = Gauge("driftpoint_daemon_up", "1 while the daemon runs", registry=registry)
        self.jobs = Gauge("driftpoint_daemon_jobs", "Jobs on this node", registry=registry)
        self.trainers = Gauge(
            "driftpoint_daemon_trainers", "Living processes of a job on this node", store, registry=registry
        )
        self.committed = Gauge(
            "driftpoint_daemon_last_commit_step",
            "Step of the newest commit that the job reported",
            store,
            registry=registry,
        )
        self.committed_at = Gauge(
            "driftpoint_daemon_last_commit_timestamp_seconds", "Time of that report", store, registry=registry
        )
        self.memory = Gauge(
            "driftpoint_daemon_memory_step",
            "Step of the newest snapshot in memory of all ranks that the job reported",
            store,
            registry=registry,
        )
        self.rescues = Counter(
            "driftpoint_daemon_rescues",
            "Rescues of snapshots of dead jobs, by outcome",
            ("outcome",),
            registry=registry,
        )
        self.rescued_at = Gauge(
            "driftpoint_daemon_last_rescue_timestamp_seconds", "Time of the last rescued commit", registry=registry
        )
        self.verified_bytes = Counter("driftpoint_daemon_verified_bytes", "Bytes verified", registry=registry)
        self.verified = Counter("driftpoint_daemon_verified_commits", "Commits verified", registry=registry)
        self.damaged = Gauge("driftpoint_daemon_damaged_commits", "Commits found damaged", store, registry=registry)
        self.verify_failures = Counter(
            "driftpoint_daemon_verify_failures", "Failed attempts to read a store", registry=registry
        )
        self.refused = Counter(
            "driftpoint_daemon_refused", "Refused connections, by reason", ("reason",), registry=registry
        )
        self.memory_room = Gauge(
            "driftpoint_daemon_memory_free_bytes", "Free bytes of shared memory", registry=registry
        )
        # Prometheus sees no increase from nothing to one.
        for outcome in OUTCOMES:
            self.rescues.labels(outcome)
        for reason in ("misunderstood", "too many"):
            self.refused.labels(reason)
        self._shown: set[str] = set()
        self._server: MetricsServer | None = None
        self.up.set(1)

    @property
    def port(self) -> int | None:
        """Return the listening port, or None."""
        return None if self._server is None else self._server.port

    @property
    def url(self) -> str | None:
        """Return the address to scrape, or None."""
        return None if self._server is None else self._server.url

    def serve(self, host: str, port: int, security: EndpointSecurity) -> None:
        """Serve the metrics; port 0 takes a free one."""
        try:
            self._server = MetricsServer(self.registry, host, port, security)
        except OSError as error:
            _log.warning(
                "no metrics of the daemon: cannot listen on %s port %d (%s); choose another with --port",
                host,
                port,
                error.strerror or error,
            )
        except ConfigError as error:
            _log.error("no metrics of the daemon: %s", error)

    def show(self, report: Report, base: Path) -> None:
        """Update the gauges. ``base`` is the shared-memory directory."""
        with suppress(OSError):  # it is gone: what there was is told by its jobs
            found = os.statvfs(base)
            self.memory_room.set(found.f_bavail * found.f_frsize)
        for read in report.stores:
            self.damaged.labels(read.store).set(len(read.damaged))
        reports = report.jobs
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
        """Count a finished rescue."""
        self.rescues.labels(outcome).inc()
        if outcome == "written":
            self.rescued_at.set(time.time())

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
