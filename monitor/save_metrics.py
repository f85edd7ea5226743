"""Metrics of saves: those that were committed, those that failed, and those that were not begun."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SKIPS = ("busy", "nothing", "withheld", "fenced", "storage", "disagree", "unsupported")
"""Why a decision began no save."""

FAILURES = (
    "StorageError",
    "MissingError",
    "DamagedError",
    "SaveError",
    "NotFiniteError",
    "FencedError",
    "ExistsError",
    "UnsupportedError",
    "internal",
    "upkeep",
    "memory",
    "peer",
    "daemon",
    "close_timeout",
)
"""Reasons that are served from the beginning: an increase from nothing to one is none to Prometheus."""

_DURATION_BUCKETS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class SaveMetrics:
    """Told by the training thread of rank 0."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.saves = Counter("driftpoint_saves", "Saves committed", registry=registry)
        self.skipped = Counter("driftpoint_saves_skipped", "Saves not begun, by reason", ("reason",), registry=registry)
        self.failed = Counter("driftpoint_saves_failed", "Saves that began and were not committed", registry=registry)
        self.failed_in_a_row = Gauge(
            "driftpoint_saves_failed_in_a_row", "Saves that failed since the newest commit", registry=registry
        )
        self.failures = Counter("driftpoint_failures", "Saves and upkeep that failed", ("reason",), registry=registry)
        self.withheld = Counter(
            "driftpoint_units_withheld", "Layer slots held back by the health gate", registry=registry
        )
        self.written = Counter("driftpoint_written_bytes", "Payload bytes committed, all ranks", registry=registry)
        self.avoided = Counter(
            "driftpoint_avoided_bytes", "Bytes that full saves would have written besides", registry=registry
        )
        self.full = Gauge(
            "driftpoint_full_save_bytes", "Bytes of a full save, not encoded, all ranks", registry=registry
        )
        self.duration = Histogram(
            "driftpoint_save_duration_seconds",
            "From the begin of writing to the commit",
            buckets=_DURATION_BUCKETS,
            registry=registry,
        )
        self.last_step = Gauge(
            "driftpoint_last_commit_step",
            "Step of the newest commit; after a resume that it went on from",
            registry=registry,
        )
        self.last_time = Gauge(
            "driftpoint_last_commit_timestamp_seconds", "When the newest commit was made; 0: none", registry=registry
        )
        for reason in SKIPS:
            self.skipped.labels(reason)
        for reason in FAILURES:
            self.failures.labels(reason)

    def committed(self, step: int, seconds: float, written: int, avoided: int) -> None:
        """A save was committed."""
        self.saves.inc()
        self.written.inc(written)
        self.avoided.inc(avoided)
        self.duration.observe(seconds)
        self.failed_in_a_row.set(0)
        self.stands_on(step, time.time())

    def stands_on(self, step: int, at: float) -> None:
        """The newest commit is of this step, made at this time (seconds since 1970)."""
        self.last_step.set(step)
        self.last_time.set(at)

    def not_committed(self, reason: str) -> None:
        """A save failed."""
        self.failed.inc()
        self.failed_in_a_row.inc()
        self.failures.labels(reason).inc()
