"""Update the per-layer metrics: drift, staleness, non-finite values and drift spikes. Rank 0's training thread.

The number of (layer, slot) units with their own time series is limited. Series must not come and go, so a layer shown
stays shown: whole layers spread evenly over the model, in seven eighths of the limit. The last eighth is for units that
stand out (non-finite values, a spike): first come, first served, and kept. Counts and maxima are over all units."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import cache

from prometheus_client import Counter, Gauge

from monitor.observe.units import is_moving
from policies.anomaly import DriftAnomalyDetector, DriftReading
from store.names import Unit, group_by_key
from store.text import listed

_log = logging.getLogger("driftpoint")
_NAMED = 6  # maximum number of layers named in a log line


class LayerMetrics:
    """The per-layer metrics of a job. gauge, counter: return one by name. limit: units with series of their own."""

    def __init__(self, gauge: Callable[[str], Gauge], counter: Callable[[str], Counter], limit: int) -> None:
        self.drift = gauge("layer_drift_ratio")
        self.staleness = gauge("layer_staleness_steps")
        self.jump = gauge("layer_drift_jump_ratio")
        self.layer_nonfinite = gauge("layer_nonfinite")
        self._gauge, self._spikes = gauge, counter("drift_spikes")
        self.hidden = gauge("units_hidden")
        self._drift_of = cache(lambda unit: self.drift.labels(*unit))
        self._staleness_of = cache(lambda unit: self.staleness.labels(*unit))
        self._shown = SeriesSelector(limit)
        self._limit = limit
        self._detector = DriftAnomalyDetector()
        self._units: list[Unit] = []
        self._nonfinite: set[Unit] = set()
        self._named: set[str] = set()  # layers with a series of layer_nonfinite
        self._drift: dict[Unit, float] = {}  # of moving units
        self._staleness: dict[Unit, float] = {}  # likewise
        self._read: dict[Unit, int] = {}  # step of the last reading

    def set_units(self, units: Collection[Unit]) -> None:
        """Set the units of the job, in model order."""
        order = list(units)
        if order == self._units:
            return
        self._units = order
        hidden = self._shown.hidden
        for gone in self._shown.set_units(units):
            for gauge in (self.drift, self.staleness, self.jump):
                with suppress(KeyError):
                    gauge.remove(*gone)
            self._drift_of.cache_clear()
            self._staleness_of.cache_clear()
            self._drift.pop(gone, None)
            self._staleness.pop(gone, None)
        self._nonfinite &= set(units)
        nonfinite, before = {unit.layer for unit in self._nonfinite}, self._named
        self._named = {unit.layer for unit in units if unit in self._shown}
        for layer in before - self._named:
            self.layer_nonfinite.remove(layer)
        for layer in self._named:
            self.layer_nonfinite.labels(layer).set(layer in nonfinite)
        self._gauge("units").set(len(units))
        self.hidden.set(self._shown.hidden)
        if self._shown.hidden and not hidden:
            text = (
                "metrics: %d of %d layer slots have no series of their own (metrics.layer_series is %d): those shown "
                "are spread evenly over the model, and units that stand out are added; counts are over all"
            )
            _log.warning(text, self._shown.hidden, len(units), self._limit)

    def update(self, drift: Mapping[Unit, float], staleness: Mapping[Unit, int]) -> None:
        for series, values in ((self._drift_of, drift), (self._staleness_of, staleness)):
            for unit, value in values.items():
                if unit in self._shown:
                    series(unit).set(value)
        for newest, values in ((self._drift, drift), (self._staleness, staleness)):
            newest.update((unit, value) for unit, value in values.items() if is_moving(unit))
        self._gauge("drift_max_ratio").set(max(self._drift.values(), default=0.0))
        self._gauge("staleness_max_steps").set(max(self._staleness.values(), default=0))

    def detect_spikes(self, step: int, readings: Mapping[Unit, DriftReading]) -> None:
        """Look for drift spikes of weights at ``step``; each unit once a step."""
        fresh = {unit: one for unit, one in readings.items() if self._read.get(unit) != step}
        self._read.update(dict.fromkeys(fresh, step))
        for spike in self._detector.read(fresh):
            self._spikes.inc()
            self._shown.add(spike.unit)
            self.hidden.set(self._shown.hidden)
            text = (
                "drift spike: the weights of %s moved %.3g times as far as usual up to step %d (drift %.3g). If no "
                "setting was changed, memory or a device may have corrupted them: see docs/runbook.md"
            )
            _log.error(text, spike.unit.layer, spike.jump, step, spike.drift)
        for unit in fresh.keys() & self._detector.jumps.keys():
            if unit in self._shown:
                self.jump.labels(unit.layer, unit.slot).set(self._detector.jumps[unit])

    def update_health(self, units: Collection[Unit], nonfinite: Collection[Unit]) -> None:
        """Update the health gauges. ``units`` were checked; ``nonfinite`` have NaN or Inf."""
        before = {unit.layer for unit in self._nonfinite}
        self._nonfinite = (self._nonfinite - set(units)) | set(nonfinite)
        layers = {unit.layer for unit in self._nonfinite}
        for unit in nonfinite:
            self._shown.add(unit)
        self._named |= {unit.layer for unit in nonfinite if unit in self._shown}
        for layer in (before | layers) & self._named:
            self.layer_nonfinite.labels(layer).set(layer in layers)
        if new := sorted(layers - before):
            _log.error("NaN or Inf in %s: not saved; the versions before are kept", listed(new, _NAMED))
        self._gauge("nonfinite_layers").set(len(layers))
        self.hidden.set(self._shown.hidden)


class SeriesSelector:
    """Chooses the units that have time series of their own, at most ``limit``."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._all: frozenset[Unit] = frozenset()
        self._shown: set[Unit] = set()

    @property
    def hidden(self) -> int:
        """Number of units without series."""
        return len(self._all - self._shown)

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._shown

    def set_units(self, units: Iterable[Unit]) -> set[Unit]:
        """Set the units of the job, in model order. Return those that had series and are gone."""
        order = list(units)
        if frozenset(order) == self._all:
            return set()
        self._all = frozenset(order)
        before = self._shown
        self._shown = before & self._all
        self._shown |= set(order) if len(order) <= self._limit else self._spread(order)
        return before - self._shown

    def add(self, unit: Unit) -> None:
        """Give a unit series of its own, if there is a free place."""
        if unit in self._all and len(self._shown) < self._limit:
            self._shown.add(unit)

    def _spread(self, order: list[Unit]) -> set[Unit]:
        layers = group_by_key((unit.layer, unit) for unit in order)
        names = list(layers)
        places = self._limit - self._limit // 8 - len(self._shown)
        for count in range(min(len(names), max(places, 0)), 0, -1):
            chosen = {names[round(i * (len(names) - 1) / max(count - 1, 1))] for i in range(count)}
            units = {unit for name in chosen for unit in layers[name]} - self._shown
            if len(units) <= places:
                return units
        return set()
