"""Prometheus metrics of the node daemon, in a registry of their own."""

import shutil
import time
from contextlib import suppress
from pathlib import Path

from deploy.daemon.rescuer import OUTCOMES
from store.daemon_protocol import Report
from store.metrics_server import ServedMetrics


class DaemonMetrics(ServedMetrics):
    """Metrics of the node daemon. Without :meth:`serve` they are only counted."""

    whose, todo = "of the daemon", "choose another with --port"

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge

        self.registry = CollectorRegistry()

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"driftpoint_daemon_{name}", text, labels, registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"driftpoint_daemon_{name}", text, labels, registry=self.registry)

        self.up = gauge("up", "1 while the daemon runs")
        self.jobs = gauge("jobs", "Jobs on this node")
        self.trainers = gauge("trainers", "Living processes of a job on this node", "store")
        self.committed = gauge("last_commit_step", "Step of the newest commit that the job reported", "store")
        self.committed_at = gauge("last_commit_timestamp_seconds", "Time of that report", "store")
        self.memory = gauge(
            "memory_step", "Step of the newest snapshot in memory of all ranks that the job reported", "store"
        )
        self.rescues = counter("rescues", "Rescues of snapshots of dead jobs, by outcome", "outcome")
        self.rescued_at = gauge("last_rescue_timestamp_seconds", "Time of the last rescued commit")
        self.refused = counter("refused", "Refused connections, by reason", "reason")
        self.memory_room = gauge("memory_free_bytes", "Free bytes of shared memory")
        # Prometheus sees no increase from nothing to one.
        for outcome in OUTCOMES:
            self.rescues.labels(outcome)
        for reason in ("misunderstood", "too many"):
            self.refused.labels(reason)
        self._shown: set[str] = set()
        self.up.set(1)

    def show(self, report: Report, base: Path) -> None:
        """Update the gauges. ``base`` is the shared-memory directory."""
        with suppress(OSError):  # shared memory was removed; the jobs' reports remain
            self.memory_room.set(shutil.disk_usage(base).free)
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
        self.rescues.labels(outcome).inc()
        if outcome == "written":
            self.rescued_at.set(time.time())
