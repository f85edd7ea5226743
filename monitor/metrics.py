"""Prometheus metrics of a job, served by rank 0 from a registry of its own.

Told by the training thread only. A port that is taken costs the endpoint, never the training.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from store.names import Unit

_log = logging.getLogger("driftpoint")

_STALL_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
_DURATION_BUCKETS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class Metrics:
    """The metric set. Without :meth:`serve` it only counts."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        unit = ("layer", "slot")
        self.registry = registry
        self.drift = Gauge(
            "driftpoint_layer_drift_ratio",
            "Relative distance of the live state to what a resume would give back",
            unit,
            registry=registry,
        )
        self.staleness = Gauge(
            "driftpoint_layer_staleness_steps", "Steps since the newest committed version", unit, registry=registry
        )
        self.saves = Counter("driftpoint_saves", "Saves committed", registry=registry)
        self.skipped = Counter("driftpoint_saves_skipped", "Saves not begun, by reason", ("reason",), registry=registry)
        self.failures = Counter("driftpoint_failures", "Saves and upkeep that failed", ("reason",), registry=registry)
        self.policy_failures = Counter(
            "driftpoint_policy_failures",
            "Decisions at which the policy failed, so that everything was saved",
            registry=registry,
        )
        self.withheld = Counter(
            "driftpoint_units_withheld", "Layer slots held back by the health gate", registry=registry
        )
        self.written = Counter("driftpoint_written_bytes", "Payload bytes committed, all ranks", registry=registry)
        self.avoided = Counter(
            "driftpoint_avoided_bytes", "Bytes that full saves would have written besides", registry=registry
        )
        self.observed_saves = Counter(
            "driftpoint_observed_saves", "Saves that policy observe would have begun", registry=registry
        )
        self.observed_written = Counter(
            "driftpoint_observed_written_bytes", "Bytes that they would have written, all ranks", registry=registry
        )
        self.observed_avoided = Counter(
            "driftpoint_observed_avoided_bytes", "Bytes that full saves would have written besides", registry=registry
        )
        self.preemptions = Counter(
            "driftpoint_preemptions",
            "Ends of the job that a signal announced, by what of the last step was saved",
            ("outcome",),
            registry=registry,
        )
        self.budget = Gauge(
            "driftpoint_budget_bytes",
            "Bytes that policy budget may spend now; below 0, what earlier saves overdrew",
            registry=registry,
        )
        self.overdraft = Counter(
            "driftpoint_budget_overdraft_bytes",
            "Bytes that bounds or save() demanded beyond what was at hand",
            registry=registry,
        )
        self.interval = Gauge("driftpoint_decision_interval_steps", "Steps between two decisions", registry=registry)
        self.interruptions = Gauge(
            "driftpoint_interruptions",
            "Interruptions of this run before this incarnation, as every auto counts them",
            registry=registry,
        )
        self.expected = Gauge(
            "driftpoint_expected_interruptions_per_hour",
            "Interruptions that every auto expects in the next hour",
            registry=registry,
        )
        self.cost = Gauge(
            "driftpoint_decision_cost_seconds",
            "Time that a decision and its save keep training, as every auto takes it",
            registry=registry,
        )
        self.stall = Histogram(
            "driftpoint_stall_seconds",
            "Time a decision kept the training thread",
            buckets=_STALL_BUCKETS,
            registry=registry,
        )
        self.copy_wait = Histogram(
            "driftpoint_copy_wait_seconds",
            "Time an optimizer step waited for copies of the state (staging lazy)",
            buckets=_STALL_BUCKETS,
            registry=registry,
        )
        self.duration = Histogram(
            "driftpoint_save_duration_seconds",
            "From the begin of writing to the commit",
            buckets=_DURATION_BUCKETS,
            registry=registry,
        )
        self.last_step = Gauge("driftpoint_last_commit_step", "Step of the newest commit", registry=registry)
        self.last_time = Gauge(
            "driftpoint_last_commit_timestamp_seconds", "When the newest commit was made", registry=registry
        )
        self.epoch = Gauge("driftpoint_epoch", "Epoch of this incarnation of the job", registry=registry)
        self.resumed_step = Gauge("driftpoint_resumed_step", "Step that this job went on from", registry=registry)
        self.effective_step = Gauge(
            "driftpoint_effective_step",
            "Step that the resumed weights stand at, on average; that of the commit where none were stale",
            registry=registry,
        )
        self.fallbacks = Gauge(
            "driftpoint_resume_fallback_units",
            "Layer slots resumed from an older version than committed last",
            registry=registry,
        )
        self.memory_step = Gauge(
            "driftpoint_memory_step", "Step of the newest version in memory that all ranks have", registry=registry
        )
        self.memory_time = Gauge(
            "driftpoint_memory_timestamp_seconds", "When that version was seen whole", registry=registry
        )
        self.memory_versions = Counter("driftpoint_memory_versions", "Versions kept in memory", registry=registry)
        self.memory_duration = Histogram(
            "driftpoint_memory_duration_seconds",
            "Time from a version's staging to its record in memory, on rank 0",
            buckets=_DURATION_BUCKETS,
            registry=registry,
        )
        self.peer_step = Gauge(
            "driftpoint_peer_step",
            "Step of the newest version in memory that all ranks have a replica of on another node",
            registry=registry,
        )
        self.peer_time = Gauge(
            "driftpoint_peer_timestamp_seconds", "When that version was seen replicated", registry=registry
        )
        self.peer_duration = Histogram(
            "driftpoint_peer_duration_seconds",
            "Time that a version of rank 0 took to its peer",
            buckets=_DURATION_BUCKETS,
            registry=registry,
        )
        self.from_peers = Gauge(
            "driftpoint_resumed_from_peer_ranks",
            "Ranks whose memory this job went on from as another node had kept it",
            registry=registry,
        )
        self.from_memory = Gauge(
            "driftpoint_resumed_from_memory",
            "1 where this job went on from memory, not from the store",
            registry=registry,
        )
        self._server: Any = None
        self.port: int | None = None

    def serve(self, host: str, port: int) -> None:
        """Listen; ``port`` 0 takes a free one. Where that fails, training goes on without an endpoint."""
        try:
            server, _ = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            _log.warning(
                "no metrics endpoint: cannot listen on %s port %d (%s). Training is not affected; "
                "set `metrics: {port: ...}` to a free one",
                host,
                port,
                error.strerror or error,
            )
            return
        self._server = server
        self.port = server.server_port

    def committed(self, step: int, seconds: float, written: int, avoided: int) -> None:
        """A save was committed."""
        self.saves.inc()
        self.written.inc(written)
        self.avoided.inc(avoided)
        self.duration.observe(seconds)
        self.last_step.set(step)
        self.last_time.set(time.time())

    def remembered(self, step: int, seconds: float) -> None:
        """All ranks have a version in memory."""
        self.memory_versions.inc()
        self.memory_step.set(step)
        self.memory_time.set(time.time())
        self.memory_duration.observe(seconds)

    def replicated(self, step: int) -> None:
        """All ranks have a replica of a version on another node."""
        self.peer_step.set(step)
        self.peer_time.set(time.time())

    def observed(self, written: int, avoided: int) -> None:
        """A save would have been begun."""
        self.observed_saves.inc()
        self.observed_written.inc(written)
        self.observed_avoided.inc(avoided)

    def units(self, drift: Mapping[Unit, float], staleness: Mapping[Unit, int]) -> None:
        """Newest drift and staleness of each unit."""
        for unit, value in drift.items():
            self.drift.labels(unit.layer, unit.slot).set(value)
        for unit, steps in staleness.items():
            self.staleness.labels(unit.layer, unit.slot).set(steps)

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
