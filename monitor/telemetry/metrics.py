"""Prometheus metrics of a job, served by rank 0 from a registry of its own.

A problem with the endpoint (a port that is taken, a certificate that cannot be read) costs the endpoint, never the
training. The endpoint never listens with less protection than was configured.

The training thread updates all metrics, with two exceptions: free space on the store's disk is read in the background
thread, since a file server that hangs would block any other, and the time of a step is computed at each scrape.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from typing_extensions import override

from monitor.events import (
    AttachEvent,
    BackgroundFailureEvent,
    CommitEvent,
    DecisionEvent,
    MeasuredEvent,
    MemoryEvent,
    PreemptedEvent,
    ResumeEvent,
    SaveBeginEvent,
    SaveFailedEvent,
    SaveListener,
    unexpected,
)
from monitor.telemetry.layer_metrics import LayerMetrics
from policies.anomaly import DriftReading
from store.errors import ConfigError, NotFiniteError
from store.metrics_server import EndpointSecurity, MetricsServer
from store.names import WEIGHTS, Unit

_log = logging.getLogger("driftpoint")

LAYER_SERIES = 512
"""Layer slots with series of their own, unless the configuration says otherwise."""

SKIPS = ("busy", "nothing", "withheld", "fenced", "storage", "disagree", "unsupported")
"""Reasons for which a decision begins no save."""

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

_STALL = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
_DURATION = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_UNIT = ("layer", "slot")


class _Row(NamedTuple):
    """A metric, ``driftpoint_`` before its name. buckets: of a histogram.

    served: values of its one label that are served from the beginning. Prometheus sees no increase in a series that
    appears with its first count."""

    kind: type[Counter | Gauge | Histogram]
    name: str
    help: str
    labels: tuple[str, ...] = ()
    served: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_TABLE = (
    # Layers
    _Row(
        Gauge,
        "layer_drift_ratio",
        "Relative distance of the live state to what a resume would give back, at the last decision",
        _UNIT,
    ),
    _Row(Gauge, "layer_staleness_steps", "Steps since the newest committed version", _UNIT),
    _Row(
        Gauge,
        "layer_drift_jump_ratio",
        "Drift of weights against what this layer and the others are used to; a spike from 4 on",
        _UNIT,
    ),
    _Row(Gauge, "layer_nonfinite", "1 where a layer has NaN or Inf, 0 again when it is saved", ("layer",)),
    _Row(Gauge, "drift_max_ratio", "Largest drift of a moving unit"),
    _Row(Gauge, "staleness_max_steps", "Largest staleness of a moving unit"),
    _Row(Gauge, "nonfinite_layers", "Layers with NaN or Inf"),
    _Row(Counter, "drift_spikes", "Times that the weights of a layer jumped, an early sign of corruption"),
    _Row(Gauge, "units", "Layer slots of the job"),
    _Row(Gauge, "units_hidden", "Layer slots without series of their own"),
    # Saves
    _Row(Counter, "saves", "Saves committed"),
    _Row(Counter, "saves_skipped", "Saves not begun, by reason", ("reason",), SKIPS),
    _Row(Counter, "saves_failed", "Saves that began and were not committed"),
    _Row(Gauge, "saves_failed_in_a_row", "Saves that failed since the newest commit"),
    _Row(Counter, "failures", "Saves and upkeep that failed", ("reason",), FAILURES),
    _Row(Counter, "units_withheld", "Layer slots held back by the health gate"),
    _Row(Counter, "written_bytes", "Payload bytes committed, all ranks"),
    _Row(Counter, "avoided_bytes", "Bytes that full saves would have written besides"),
    _Row(Gauge, "full_save_bytes", "Bytes of a full save, not encoded, all ranks"),
    _Row(Histogram, "save_duration_seconds", "From the begin of writing to the commit", buckets=_DURATION),
    _Row(Gauge, "last_commit_step", "Step of the newest commit; after a resume that it went on from"),
    _Row(Gauge, "last_commit_timestamp_seconds", "When the newest commit was made; 0: none"),
    # Resume
    _Row(Gauge, "epoch", "Epoch of this incarnation of the job"),
    _Row(Gauge, "attached_timestamp_seconds", "When this incarnation attached to its store"),
    _Row(Gauge, "resumed_step", "Step that this job went on from"),
    _Row(
        Gauge,
        "effective_step",
        "Step that the resumed weights stand at, on average; that of the commit where none were stale",
    ),
    _Row(Gauge, "resume_fallback_units", "Layer slots resumed from an older version than committed last"),
    _Row(
        Gauge,
        "resume_passed_over_commits",
        "Commits newer than the one resumed from, passed over as damaged or suspect",
    ),
    _Row(Gauge, "resumed_staleness_steps", "Staleness of the oldest moving layer slot resumed"),
    _Row(Gauge, "resumed_exact", "1 where what was resumed is one step's state to the last bit"),
    _Row(Gauge, "resumed_from_memory", "1 where this job went on from memory, not from the store"),
    _Row(Gauge, "resumed_from_peer_ranks", "Ranks whose memory this job went on from as another node had kept it"),
    # Training, decisions and the budget
    _Row(Gauge, "store_free_bytes", "Bytes that are free on the store's disk"),
    _Row(Gauge, "store_size_bytes", "Bytes on the store's disk, free or not; 0: not known"),
    _Row(Gauge, "step", "Step that training has reached"),
    _Row(Gauge, "step_timestamp_seconds", "When it was reached; 0: none yet"),
    _Row(Gauge, "step_seconds", "Time of a step, median of the last few, without saves"),
    _Row(Counter, "policy_failures", "Decisions at which the policy failed, so that everything was saved"),
    _Row(Counter, "observed_saves", "Saves that policy observe would have begun"),
    _Row(Counter, "observed_written_bytes", "Bytes that they would have written, all ranks"),
    _Row(Counter, "observed_avoided_bytes", "Bytes that full saves would have written besides"),
    _Row(
        Counter,
        "preemptions",
        "Ends of the job that a signal announced, by what of the last step was saved",
        ("outcome",),
        ("full", "part", "nothing"),
    ),
    _Row(Gauge, "budget_bytes", "Bytes that policy budget may spend now; below 0, what earlier saves overdrew"),
    _Row(Counter, "budget_overdraft_bytes", "Bytes that bounds or save() demanded beyond what was at hand"),
    _Row(Gauge, "decision_interval_steps", "Steps between two decisions"),
    _Row(Gauge, "interruptions", "Interruptions of this run before this incarnation, as every auto counts them"),
    _Row(Gauge, "expected_interruptions_per_hour", "Interruptions that every auto expects in the next hour"),
    _Row(
        Gauge,
        "decision_cost_seconds",
        "Time that a decision and its save keep training, as every auto takes it",
    ),
    _Row(Histogram, "stall_seconds", "Time a decision kept the training thread", buckets=_STALL),
    _Row(
        Histogram,
        "copy_wait_seconds",
        "Time an optimizer step waited for copies of the state (staging lazy)",
        buckets=_STALL,
    ),
    # Memory tier
    _Row(Gauge, "memory_on", "1 where versions are kept in memory, 0 where not, or not any more"),
    _Row(Gauge, "memory_free_bytes", "Bytes that are free in shared memory"),
    _Row(Gauge, "memory_size_bytes", "Bytes in shared memory, free or not; 0: not known"),
    _Row(Gauge, "memory_step", "Step of the newest version in memory that all ranks have"),
    _Row(Gauge, "memory_timestamp_seconds", "When that version was seen whole"),
    _Row(Counter, "memory_versions", "Versions kept in memory"),
    _Row(
        Histogram,
        "memory_duration_seconds",
        "Time from a version's staging to its record in memory, on rank 0",
        buckets=_DURATION,
    ),
    _Row(
        Gauge,
        "peer_step",
        "Step of the newest version in memory that all ranks have a replica of on another node",
    ),
    _Row(Gauge, "peer_timestamp_seconds", "When that version was seen replicated"),
    _Row(Histogram, "peer_duration_seconds", "Time that a version of rank 0 took to its peer", buckets=_DURATION),
)


class Metrics(SaveListener):
    """The metric set of a job. Without :meth:`serve` it only counts.

    Args:
        layer_series: (layer, slot) units with series of their own, see :mod:`monitor.telemetry.layer_metrics`.
        rank: ranks other than 0 count stalls and failures only.
    """

    def __init__(self, layer_series: int = LAYER_SERIES, rank: int = 0) -> None:
        self.registry = CollectorRegistry()
        self._made = {row.name: _make(row, self.registry) for row in _TABLE}
        self._first = rank == 0
        self.layers = LayerMetrics(self.gauge, self.counter, layer_series)
        self._server: MetricsServer | None = None
        self.port: int | None = None
        """That it listens on, or listened; None where it could not, or need not."""
        self.url: str | None = None
        """That a scraper asks."""
        self.trouble: str | None = None
        """Why there is no endpoint, where there should be one."""

    def counter(self, name: str) -> Counter:
        """Return the counter ``driftpoint_{name}``."""
        found = self._made[name]
        assert isinstance(found, Counter)
        return found

    def gauge(self, name: str) -> Gauge:
        """Return the gauge ``driftpoint_{name}``."""
        found = self._made[name]
        assert isinstance(found, Gauge)
        return found

    def histogram(self, name: str) -> Histogram:
        """Return the histogram ``driftpoint_{name}``."""
        found = self._made[name]
        assert isinstance(found, Histogram)
        return found

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

    def background_failure(self, what: str, error: BaseException) -> None:
        """Count and log that upkeep failed. what: subject of the message."""
        self.on_background_failure(BackgroundFailureEvent("upkeep", f"{what} failed: {error}", error))

    @override
    def on_attach(self, event: AttachEvent) -> None:
        if self._first:
            self.on_epoch(event.epoch)
            self.gauge("attached_timestamp_seconds").set(time.time())

    @override
    def on_epoch(self, epoch: int) -> None:
        self.gauge("epoch").set(epoch)

    @override
    def on_step(self, step: int, at: float) -> None:
        if self._first:
            self._reached(step)

    @override
    def on_policy_failed(self, error: BaseException) -> None:
        self.counter("policy_failures").inc()

    @override
    def on_measured(self, event: MeasuredEvent) -> None:
        decided = event.decided
        staleness = {one.unit: one.staleness for one in decided.stats if one.staleness is not None}
        drift = {unit: one for unit, one in decided.drift.items() if one is not None and unit in event.committed}
        self.layers.know(event.sizes)
        self.gauge("full_save_bytes").set(sum(size.nbytes for size in event.sizes.values()))
        self.layers.show(drift, staleness)
        self.layers.judge(event.step, _readings(drift, staleness))
        self.layers.healthy(decided.drift.keys(), [one.unit for one in decided.stats if not one.finite])

    @override
    def on_decision(self, event: DecisionEvent) -> None:
        if self._first and event.skipped is not None:
            self.counter("saves_skipped").labels(event.skipped).inc()
        self.histogram("stall_seconds").observe(event.stall)

    @override
    def on_save_begin(self, event: SaveBeginEvent) -> None:
        if event.dry_run is not None:
            full = sum(size.nbytes for size in event.sizes.values())
            self.counter("observed_saves").inc()
            self.counter("observed_written_bytes").inc(event.dry_run_bytes)
            self.counter("observed_avoided_bytes").inc(max(0, full - event.dry_run_bytes))

    @override
    def on_copy_wait(self, seconds: float) -> None:
        self.histogram("copy_wait_seconds").observe(seconds)

    @override
    def on_snapshot_copy_wait(self, seconds: float) -> None:
        self.histogram("copy_wait_seconds").observe(seconds)

    @override
    def on_commit(self, event: CommitEvent) -> None:
        drawn, manifest = event.drawn, event.drawn.manifest
        self.counter("saves").inc()
        self.counter("written_bytes").inc(event.written_bytes)
        self.counter("avoided_bytes").inc(manifest.bytes_avoided)
        self.histogram("save_duration_seconds").observe(event.seconds)
        self.gauge("saves_failed_in_a_row").set(0)
        self._newest_commit(manifest.step, time.time())
        self.layers.show(drawn.drift, {record.unit: record.staleness for record in manifest.units})
        self.layers.judge(manifest.step, _readings(drawn.drift, event.staleness))
        fresh = {record.unit for record in manifest.units if record.version == manifest.save}
        self.layers.healthy(fresh, drawn.dropped)
        self.counter("units_withheld").inc(len(drawn.dropped))

    @override
    def on_save_failed(self, event: SaveFailedEvent) -> None:
        if not self._first:
            return
        self.counter("saves_failed").inc()
        self.gauge("saves_failed_in_a_row").inc()
        self.counter("failures").labels(event.reason).inc()
        if isinstance(event.error, NotFiniteError):
            self.layers.healthy((), event.error.units)

    @override
    def on_store_check(self, root: Path) -> None:
        self._show_space("store", root)

    @override
    def on_background_failure(self, event: BackgroundFailureEvent) -> None:
        self.counter("failures").labels(event.reason).inc()
        if event.message:
            level = logging.ERROR if event.severe else logging.WARNING
            _log.log(level, "%s", event.message, exc_info=unexpected(event.error))

    @override
    def on_memory(self, event: MemoryEvent) -> None:
        if not self._first:
            return
        if event.snapshot is not None:
            self.counter("memory_versions").inc()
            self.gauge("memory_step").set(event.snapshot.step)
            self.gauge("memory_timestamp_seconds").set(time.time())
            self.histogram("memory_duration_seconds").observe(event.seconds)
        self.gauge("memory_on").set(event.on)
        self._show_space("memory", event.path)

    @override
    def on_replication(self, seconds: Sequence[float], step: int | None) -> None:
        for one in seconds:
            self.histogram("peer_duration_seconds").observe(one)
        if step is not None:
            self.gauge("peer_step").set(step)
            self.gauge("peer_timestamp_seconds").set(time.time())

    @override
    def on_resume(self, event: ResumeEvent) -> None:
        if not self._first:
            return
        certificate = event.certificate
        self.gauge("resumed_step").set(event.step)
        self.gauge("effective_step").set(certificate.effective_step)
        self.gauge("resume_fallback_units").set(event.fallbacks)
        self.gauge("resume_passed_over_commits").set(event.passed_over)
        self.gauge("resumed_staleness_steps").set(certificate.max_staleness)
        self.gauge("resumed_exact").set(certificate.exact)
        self.gauge("resumed_from_memory").set(event.from_memory)
        self.gauge("resumed_from_peer_ranks").set(event.replicas)
        self._reached(event.step)
        if event.newest is not None:  # a version in memory does not tell when the commit below it was made
            made = 0.0 if event.from_memory else datetime.fromisoformat(event.created).timestamp()
            self._newest_commit(event.newest.step, made)

    @override
    def on_preempted(self, event: PreemptedEvent) -> None:
        self.counter("preemptions").labels(event.outcome).inc()

    @override
    def on_close(self, clean: bool, timeout: float) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _reached(self, step: int) -> None:
        self.gauge("step").set(step)
        self.gauge("step_timestamp_seconds").set(time.time())

    def _newest_commit(self, step: int, made: float) -> None:
        self.gauge("last_commit_step").set(step)
        self.gauge("last_commit_timestamp_seconds").set(made)

    def _show_space(self, what: str, path: Path) -> None:
        """Ask the filesystem of ``path``. May block."""
        try:
            found = os.statvfs(path)
        except OSError:  # it is not mounted; saves fail then, and report it
            self.gauge(f"{what}_size_bytes").set(0)
            return
        self.gauge(f"{what}_free_bytes").set(found.f_bavail * found.f_frsize)
        self.gauge(f"{what}_size_bytes").set(found.f_blocks * found.f_frsize)


def _make(row: _Row, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    name = f"driftpoint_{row.name}"
    made: Counter | Gauge | Histogram
    if row.kind is Histogram:
        made = Histogram(name, row.help, row.labels, registry=registry, buckets=row.buckets)
    else:
        made = row.kind(name, row.help, row.labels, registry=registry)
    for value in row.served:
        made.labels(value)
    return made


def _readings(drift: Mapping[Unit, float], staleness: Mapping[Unit, int | None]) -> dict[Unit, DriftReading]:
    """Return drift and staleness of weights, in which spikes are looked for."""
    return {
        unit: DriftReading(value, age)
        for unit, value in drift.items()
        if unit.slot == WEIGHTS and (age := staleness.get(unit)) is not None
    }
