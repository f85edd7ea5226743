"""Prometheus metrics of a job, served by rank 0 from a registry of its own.

If the endpoint cannot be started (its port is taken, a certificate cannot be read), training continues without it. It
never listens with less protection than configured.

The training thread updates the metrics, with three exceptions: series of layers are updated in a background thread,
since there are many; free space on the store's disk is read in another, since a file server that hangs would block any
other; and the time of a step is computed at each scrape. A reader of the registry sees all events so far."""

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric

from monitor import events
from monitor.background import BackgroundWorker
from monitor.events import SaveListener, unexpected
from monitor.ledger import staleness_of
from monitor.telemetry.layer_metrics import LayerMetrics
from policies.anomaly import DriftReading
from store.errors import NotFiniteError
from store.metrics_server import ServedMetrics
from store.names import WEIGHTS, Unit

_log = logging.getLogger("driftpoint")
LAYER_SERIES = 512  # default number of layer slots with series of their own

SKIPS = ("busy", "nothing", "withheld", "fenced", "storage", "disagree", "unreachable", "unsupported")
"""Values of the label ``reason`` of skipped saves."""

FAILURES = (
    *("StorageError", "MissingError", "DamagedError", "SaveError", "StateChangedError", "NotFiniteError"),
    *("FencedError", "ExistsError", "UnsupportedError"),
    *("internal", "upkeep", "memory", "peer", "daemon", "close_timeout", "self_check"),
)
"""Values of the label ``reason`` of failures."""

_OUTCOMES = ("full", "part", "nothing")
_STALL = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
_DURATION = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_UNIT = ("layer", "slot")
_PATIENCE, _SCRAPE_PATIENCE = 10.0, 1.0  # seconds that a reader waits for updates under way


class _Row(NamedTuple):
    """A metric; its name is prefixed by ``driftpoint_``.

    The values ``served`` of its only label have series from the start: Prometheus sees no increase in a first count."""

    kind: type[Counter | Gauge | Histogram]
    name: str
    help: str
    labels: tuple[str, ...] = ()
    served: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_TABLE = (
    # Layers
    _Row(Gauge, "layer_drift_ratio", "Relative distance from the live to the committed state, at a decision", _UNIT),
    _Row(Gauge, "layer_staleness_steps", "Steps since the newest committed version", _UNIT),
    _Row(Gauge, "layer_drift_jump_ratio", "Drift of weights relative to what is usual; a spike from 4 on", _UNIT),
    _Row(Gauge, "layer_nonfinite", "1 if a layer has NaN or Inf, 0 again once it is saved", ("layer",)),
    _Row(Gauge, "drift_max_ratio", "Largest drift of a moving unit"),
    _Row(Gauge, "staleness_max_steps", "Largest staleness of a moving unit"),
    _Row(Gauge, "nonfinite_layers", "Layers with NaN or Inf"),
    _Row(Counter, "drift_spikes", "Drift spikes of weights, an early sign of corruption"),
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
    _Row(Counter, "avoided_bytes", "Bytes that full saves would have written in addition"),
    _Row(Gauge, "full_save_bytes", "Bytes of a full save, not encoded, all ranks"),
    _Row(Histogram, "save_duration_seconds", "Time from the start of writing to the commit", buckets=_DURATION),
    _Row(Gauge, "last_commit_step", "Step of the newest commit, or of the one that the job resumed"),
    _Row(Gauge, "last_commit_timestamp_seconds", "Time of the newest commit; 0: none"),
    # Resume
    _Row(Gauge, "epoch", "Epoch of this incarnation of the job"),
    _Row(Gauge, "attached_timestamp_seconds", "Time at which this incarnation attached to its store"),
    _Row(Gauge, "resumed_step", "Step from which this job resumed"),
    _Row(Gauge, "effective_step", "Mean step of the resumed weights; that of the commit if none were stale"),
    _Row(Gauge, "resume_fallback_units", "Layer slots resumed from an older version than committed last"),
    _Row(Gauge, "resume_passed_over_commits", "Newer commits skipped by the resume as damaged or suspect"),
    _Row(Gauge, "resumed_staleness_steps", "Staleness of the oldest moving layer slot resumed"),
    _Row(Gauge, "resumed_exact", "1 if the resumed state is bitwise that of one step"),
    _Row(Gauge, "resumed_from_memory", "1 if this job resumed from memory, not from the store"),
    _Row(Gauge, "resumed_from_peer_ranks", "Ranks resumed from a replica on another node"),
    # Training, decisions and the budget
    _Row(Gauge, "store_free_bytes", "Free bytes on the store's disk"),
    _Row(Gauge, "store_size_bytes", "Bytes on the store's disk, free or not; 0: not known"),
    _Row(Gauge, "step", "Step that training has reached"),
    _Row(Gauge, "step_timestamp_seconds", "Time at which it was reached; 0: none yet"),
    _Row(Gauge, "step_seconds", "Time of a step, median of the last few, without saves"),
    _Row(Counter, "policy_failures", "Decisions at which the policy failed, so that everything was saved"),
    _Row(Counter, "observed_saves", "Saves that policy observe would have begun"),
    _Row(Counter, "observed_written_bytes", "Bytes that these saves would have written, all ranks"),
    _Row(Counter, "observed_avoided_bytes", "Bytes that full saves would have written in addition to these"),
    _Row(Counter, "preemptions", "Announced ends of the job, by how much was saved", ("outcome",), _OUTCOMES),
    _Row(Gauge, "budget_bytes", "Bytes that policy budget may spend now; below 0 after an overdraft"),
    _Row(Counter, "budget_overdraft_bytes", "Bytes that bounds or save() required beyond the budget"),
    _Row(Gauge, "decision_interval_steps", "Steps between two decisions"),
    _Row(Gauge, "interruptions", "Interruptions of this run before this incarnation, as every auto counts them"),
    _Row(Gauge, "expected_interruptions_per_hour", "Interruptions that every auto expects in the next hour"),
    _Row(Gauge, "decision_cost_seconds", "Time that a decision and its save block training, as every auto counts it"),
    _Row(Histogram, "stall_seconds", "Time that a decision blocked the training thread", buckets=_STALL),
    _Row(Histogram, "copy_wait_seconds", "Time an optimizer step waited for copies (staging lazy)", buckets=_STALL),
    # Memory tier
    _Row(Gauge, "memory_on", "1 while snapshots are kept in memory, else 0"),
    _Row(Gauge, "memory_free_bytes", "Free bytes of shared memory"),
    _Row(Gauge, "memory_size_bytes", "Bytes of shared memory, free or not; 0: not known"),
    _Row(Gauge, "memory_step", "Step of the newest snapshot in memory that all ranks have"),
    _Row(Gauge, "memory_timestamp_seconds", "Time at which that snapshot was seen complete"),
    _Row(Counter, "memory_versions", "Snapshots kept in memory"),
    _Row(Histogram, "memory_duration_seconds", "Time to complete a snapshot in memory, rank 0", buckets=_DURATION),
    _Row(Gauge, "peer_step", "Step of the newest snapshot of which all ranks have a replica on another node"),
    _Row(Gauge, "peer_timestamp_seconds", "Time at which that snapshot was seen replicated"),
    _Row(Histogram, "peer_duration_seconds", "Time to send a snapshot of rank 0 to its peer", buckets=_DURATION),
)


class Metrics(SaveListener, ServedMetrics):
    """Updates the metrics of a job from its events, and serves them after :meth:`serve`.

    layer_series: units with series of their own, see :mod:`monitor.telemetry.layer_metrics`. Ranks other than 0 count
    stalls and failures only."""

    whose = "of the job (training is not affected)"
    todo = "set `metrics: {port: ...}` to a free one"

    def __init__(self, layer_series: int = LAYER_SERIES, rank: int = 0) -> None:
        self.registry = _Registry(self._catch_up)
        self._worker: BackgroundWorker[None] | None = None
        self._process = os.getpid()
        self._metrics = {row.name: _make(row, self.registry) for row in _TABLE}
        self._first = rank == 0
        self.layers = LayerMetrics(self.gauge, self.counter, layer_series)

    def counter(self, name: str) -> Counter:
        return cast(Counter, self._metrics[name])

    def gauge(self, name: str) -> Gauge:
        return cast(Gauge, self._metrics[name])

    def histogram(self, name: str) -> Histogram:
        return cast(Histogram, self._metrics[name])

    def scalars(self) -> dict[str, float]:
        """Return the values of all metrics now, for experiment trackers; none on ranks other than 0.

        Names are those of docs/metrics.md, and labels follow: ``driftpoint_layer_drift_ratio/blocks.0/fp32``. Of a
        histogram there are the sum and the count. Waits shortly for the series of layers. Not collective."""
        return {
            "/".join([sample.name, *sample.labels.values()]): float(sample.value)
            for family in (self.registry.collect() if self._first else ())
            for sample in family.samples
            if not sample.name.endswith(("_bucket", "_created"))
        }

    def on_attach(self, event: events.AttachEvent) -> None:
        if self._first:
            self.on_epoch(event.epoch)
            self.gauge("attached_timestamp_seconds").set(time.time())

    def on_epoch(self, epoch: int) -> None:
        self.gauge("epoch").set(epoch)

    def on_step(self, step: int, at: float) -> None:
        if self._first:
            self._set_step(step)

    def on_policy_failed(self, error: BaseException) -> None:
        self.counter("policy_failures").inc()

    def on_measured(self, event: events.MeasuredEvent) -> None:
        self._later(partial(self._update_measured, event, frozenset(event.committed)))

    def _update_measured(self, event: events.MeasuredEvent, committed: Collection[Unit]) -> None:
        decided = event.decided
        staleness = {one.unit: one.staleness for one in decided.stats if one.staleness is not None}
        drift = {unit: one for unit, one in decided.drift.items() if one is not None and unit in committed}
        self.layers.set_units(event.sizes)
        self.gauge("full_save_bytes").set(sum(size.nbytes for size in event.sizes.values()))
        self.layers.update(drift, staleness)
        self.layers.detect_spikes(event.step, _readings(drift, staleness))
        self.layers.update_health(decided.drift.keys(), [one.unit for one in decided.stats if not one.finite])

    def on_decision(self, event: events.DecisionEvent) -> None:
        if self._first and event.skipped is not None:
            self.counter("saves_skipped").labels(event.skipped).inc()
        self.histogram("stall_seconds").observe(event.stall)

    def on_save_begin(self, event: events.SaveBeginEvent) -> None:
        if event.dry_run is not None:
            full = sum(size.nbytes for size in event.sizes.values())
            self.counter("observed_saves").inc()
            self.counter("observed_written_bytes").inc(event.dry_run_bytes)
            self.counter("observed_avoided_bytes").inc(max(0, full - event.dry_run_bytes))

    def on_copy_wait(self, seconds: float) -> None:
        self.histogram("copy_wait_seconds").observe(seconds)

    on_snapshot_copy_wait = on_copy_wait

    def on_commit(self, event: events.CommitEvent) -> None:
        drawn, manifest = event.drawn, event.drawn.manifest
        self.counter("saves").inc()
        self.counter("written_bytes").inc(event.written_bytes)
        self.counter("avoided_bytes").inc(manifest.bytes_avoided)
        self.histogram("save_duration_seconds").observe(event.seconds)
        self.gauge("saves_failed_in_a_row").set(0)
        self._set_step(manifest.step, "last_commit_")
        self.counter("units_withheld").inc(len(drawn.dropped))
        self._later(partial(self._update_committed, event))

    def _update_committed(self, event: events.CommitEvent) -> None:
        drawn, manifest, save = event.drawn, event.drawn.manifest, event.save
        self.layers.update(drawn.drift, {unit: record.staleness for unit, record in manifest.versions.items()})
        ages = {unit: staleness_of(event.before.get(unit), manifest.step) for unit in drawn.drift}
        self.layers.detect_spikes(manifest.step, _readings(drawn.drift, ages))
        fresh = {unit for unit, record in manifest.versions.items() if record.version == save}
        self.layers.update_health(fresh, drawn.dropped)

    def on_save_failed(self, event: events.SaveFailedEvent) -> None:
        if not self._first:
            return
        self.counter("saves_failed").inc()
        self.gauge("saves_failed_in_a_row").inc()
        self.counter("failures").labels(event.reason).inc()
        if isinstance(event.error, NotFiniteError):
            self._later(partial(self.layers.update_health, (), event.error.units))

    def on_store_check(self, root: Path) -> None:
        self._update_space("store", root)

    def on_background_failure(self, event: events.BackgroundFailureEvent) -> None:
        self.counter("failures").labels(event.reason).inc()
        if event.message:
            level = logging.ERROR if event.severe else logging.WARNING
            _log.log(level, "%s", event.message, exc_info=unexpected(event.error))

    def on_memory(self, event: events.MemoryEvent) -> None:
        if not self._first:
            return
        if event.snapshot is not None:
            self.counter("memory_versions").inc()
            self._set_step(event.snapshot.step, "memory_")
            self.histogram("memory_duration_seconds").observe(event.seconds)
        self.gauge("memory_on").set(event.on)
        self._update_space("memory", event.path)

    def on_replication(self, seconds: Sequence[float], step: int | None) -> None:
        for one in seconds:
            self.histogram("peer_duration_seconds").observe(one)
        if step is not None:
            self._set_step(step, "peer_")

    def on_resume(self, event: events.ResumeEvent) -> None:
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
        self._set_step(event.step)
        if event.newest is not None:  # the time of the commit below a snapshot in memory is not known
            made = 0.0 if event.from_memory else datetime.fromisoformat(event.created).timestamp()
            self._set_step(event.newest.step, "last_commit_", made)

    def on_preempted(self, event: events.PreemptedEvent) -> None:
        self.counter("preemptions").labels(event.outcome).inc()

    def on_close(self, clean: bool, timeout: float) -> None:
        self.close()

    def close(self) -> None:
        self._catch_up()
        if self._worker is not None:
            self._worker.stop()
            self._worker = None
        super().close()

    def _later(self, update: Callable[[], None]) -> None:
        """Update series of many units in the background, in order."""
        if self._worker is None:
            self._worker = BackgroundWorker("driftpoint-metrics")
        for done in self._worker.finished():
            if done.error is not None:
                raise done.error
        self._worker.submit(update)

    def _catch_up(self) -> None:
        """Wait for the updates of all events so far. A scrape waits less: training may hold tasks back meanwhile."""
        worker = self._worker
        if worker is not None and not worker.is_current and os.getpid() == self._process:
            training = threading.current_thread() is threading.main_thread()
            worker.join(_PATIENCE if training else _SCRAPE_PATIENCE)

    def _set_step(self, step: int, prefix: str = "", at: float | None = None) -> None:
        self.gauge(f"{prefix}step").set(step)
        self.gauge(f"{prefix or 'step_'}timestamp_seconds").set(time.time() if at is None else at)

    def _update_space(self, what: str, path: Path) -> None:
        """Read the free space of the filesystem of ``path``. May block."""
        try:
            space = os.statvfs(path)
        except OSError:  # not mounted: saves fail and report it
            self.gauge(f"{what}_size_bytes").set(0)
            return
        self.gauge(f"{what}_free_bytes").set(space.f_bavail * space.f_frsize)
        self.gauge(f"{what}_size_bytes").set(space.f_blocks * space.f_frsize)


class _Registry(CollectorRegistry):
    """Waits for pending updates before each read, so that a reader sees all events so far."""

    def __init__(self, catch_up: Callable[[], None]) -> None:
        super().__init__()
        self._settle = catch_up

    def collect(self) -> Iterator[Metric]:
        self._settle()
        return iter(super().collect())


def _make(row: _Row, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    more: dict[str, Any] = {"buckets": row.buckets} if row.kind is Histogram else {}
    metric = row.kind(f"driftpoint_{row.name}", row.help, row.labels, registry=registry, **more)
    for value in row.served:
        metric.labels(value)
    return metric


def _readings(drift: Mapping[Unit, float], staleness: Mapping[Unit, int | None]) -> dict[Unit, DriftReading]:
    weights = ((unit, value, staleness.get(unit)) for unit, value in drift.items() if unit.slot == WEIGHTS)
    return {unit: DriftReading(value, age) for unit, value, age in weights if age is not None}
