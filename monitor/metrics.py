"""Prometheus metrics of a job, served by rank 0 from a registry of its own: one place for the whole job.

Told by the training thread, but for the room on disk, which the background thread asks for, and the time of a step,
which a scrape does. What goes wrong with the endpoint (a port that is taken, a certificate that cannot be read) costs
the endpoint, never the training, and it never listens with less protection than was asked for.
"""

from __future__ import annotations

import errno
import logging
import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from monitor.layer_metrics import LayerMetrics
from monitor.resume_metrics import ResumeMetrics
from monitor.room_metrics import RoomMetrics
from monitor.save_metrics import SaveMetrics
from store.errors import ConfigError
from store.metrics_server import EndpointSecurity, MetricsServer

_log = logging.getLogger("driftpoint")

_STALL_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
_DURATION_BUCKETS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)

LAYER_SERIES = 512
"""Layer slots with series of their own, unless the configuration says otherwise."""


class Metrics:
    """The metric set. Without :meth:`serve` it only counts. layer_series: see :mod:`monitor.shown`."""

    def __init__(self, layer_series: int = LAYER_SERIES) -> None:
        registry = CollectorRegistry()
        self.registry = registry
        self.layers = LayerMetrics(registry, layer_series)
        self.saves = SaveMetrics(registry)
        self.resumed = ResumeMetrics(registry)
        self.room = RoomMetrics(registry, "store", "on the store's disk")
        self.failures = self.saves.failures
        self.step = Gauge("driftpoint_step", "Step that training has reached", registry=registry)
        self.step_time = Gauge(
            "driftpoint_step_timestamp_seconds", "When it was reached; 0: none yet", registry=registry
        )
        self.step_seconds = Gauge(
            "driftpoint_step_seconds", "Time of a step, median of the last few, without saves", registry=registry
        )
        self.policy_failures = Counter(
            "driftpoint_policy_failures",
            "Decisions at which the policy failed, so that everything was saved",
            registry=registry,
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
        for outcome in ("full", "part", "nothing"):
            self.preemptions.labels(outcome)
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
        self.memory_on = Gauge(
            "driftpoint_memory_on",
            "1 where versions are kept in memory, 0 where not, or not any more",
            registry=registry,
        )
        self.memory_room = RoomMetrics(registry, "memory", "in shared memory")
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
        self._server: MetricsServer | None = None
        self.port: int | None = None
        """That it listens on, or listened; None where it could not, or need not."""
        self.url: str | None = None
        """That a scraper asks."""
        self.trouble: str | None = None
        """Why there is no endpoint, where there should be one."""

    def serve(self, host: str, port: int, security: EndpointSecurity | None = None) -> None:
        """Listen; ``port`` 0 takes a free one. Where that fails, training goes on without an endpoint."""
        try:
            self._server = MetricsServer(self.registry, host, port, security or EndpointSecurity())
            self.port, self.url = self._server.port, self._server.url
        except OSError as error:
            self.trouble = f"port {port} is taken" if error.errno == errno.EADDRINUSE else f"cannot listen on {host}"
            _log.warning(
                "no metrics endpoint: cannot listen on %s port %d (%s). Training is not affected; "
                "set `metrics: {port: ...}` to a free one",
                host,
                port,
                error.strerror or error,
            )
        except ConfigError as error:
            self.trouble = str(error)
            _log.error("no metrics endpoint: %s. Training is not affected", error)

    def stepped(self, step: int) -> None:
        """Training reached ``step``."""
        self.step.set(step)
        self.step_time.set(time.time())

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

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            self._server = None
