"""Per-layer metrics, series limit.

Which units get time series of their own, where there are too many for all. Pure; the training thread's.

Series must not come and go: a layer that is shown stays shown. So it is not the most drifted of the moment that are
kept, but whole layers spread evenly over the model, from the first to the last, as many as fit into seven eighths of
the places. The last eighth is for units that stood out (not finite, a spike) and had no place: first come, first
served, and kept. What is counted over all units counts all of them, shown or not.

Metrics of layers: drift, staleness, what is not finite, and what jumped. Rank 0's training thread only.

Layers have series of their own up to a number (see :mod:`monitor.telemetry.layer_metrics`); the counts are over all
of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress

from prometheus_client import Counter, Gauge

from monitor.observe.units import is_moving
from policies.anomaly import DriftAnomaly, DriftAnomalyDetector, DriftReading
from store.names import Unit
from store.text import listed


class SeriesSelector:
    """most: units at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._all: frozenset[Unit] = frozenset()
        self._shown: set[Unit] = set()

    @property
    def hidden(self) -> int:
        """Units without a place."""
        return len(self._all - self._shown)

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._shown

    def __len__(self) -> int:
        return len(self._shown)

    def know(self, units: Iterable[Unit]) -> set[Unit]:
        """The units of the job, in model order. Those that lost their place, because they are not there any more.

        Nothing changes where they are the same as before."""
        order = list(units)
        if frozenset(order) == self._all:
            return set()
        self._all = frozenset(order)
        before = self._shown
        self._shown = before & self._all
        self._shown |= set(order) if len(order) <= self._most else self._spread(order)
        return before - self._shown

    def stood_out(self, unit: Unit) -> None:
        """Give a unit a place, if there is one."""
        if unit in self._all and len(self._shown) < self._most:
            self._shown.add(unit)

    def _spread(self, order: list[Unit]) -> set[Unit]:
        layers: dict[str, list[Unit]] = {}
        for unit in order:
            layers.setdefault(unit.layer, []).append(unit)
        names = list(layers)
        places = self._most - self._most // 8 - len(self._shown)
        for count in range(min(len(names), max(places, 0)), 0, -1):
            chosen = {names[round(i * (len(names) - 1) / max(count - 1, 1))] for i in range(count)}
            found = {unit for name in chosen for unit in layers[name]} - self._shown
            if len(found) <= places:
                return found
        return set()


_log = logging.getLogger("driftpoint")

_NAMED = 6


class LayerMetrics:
    """gauge, counter: return a metric by its name. most: units, (layer, slot), with series of their own."""

    def __init__(self, gauge: Callable[[str], Gauge], counter: Callable[[str], Counter], most: int) -> None:
        self.drift = gauge("layer_drift_ratio")
        self.staleness = gauge("layer_staleness_steps")
        self.jump = gauge("layer_drift_jump_ratio")
        self.layer_sick = gauge("layer_nonfinite")
        self.most_drift = gauge("drift_max_ratio")
        self.most_staleness = gauge("staleness_max_steps")
        self.sick = gauge("nonfinite_layers")
        self.spikes = counter("drift_spikes")
        self.units = gauge("units")
        self.hidden = gauge("units_hidden")
        self._shown = SeriesSelector(most)
        self._most = most
        self._jumps = DriftAnomalyDetector()
        self._units: list[Unit] = []
        self._sick: set[Unit] = set()
        self._named: set[str] = set()
        self._drift: dict[Unit, float] = {}
        self._staleness: dict[Unit, float] = {}
        self._read: dict[Unit, int] = {}

    def know(self, units: Collection[Unit]) -> None:
        """The units of the job, in model order."""
        order = list(units)
        if order == self._units:
            return
        self._units = order
        hidden = self._shown.hidden
        for gone in self._shown.know(units):
            self._remove(gone)
        self._sick &= set(units)
        sick, before = {unit.layer for unit in self._sick}, self._named
        self._named = {unit.layer for unit in units if unit in self._shown}
        for layer in before - self._named:
            self.layer_sick.remove(layer)
        for layer in self._named:
            self.layer_sick.labels(layer).set(layer in sick)
        self.units.set(len(units))
        self.hidden.set(self._shown.hidden)
        if self._shown.hidden and not hidden:
            _log.warning(
                "metrics: %d of %d layer slots have no series of their own (metrics.layer_series is %d): those shown "
                "are spread evenly over the model, and whatever stands out is added; counts are over all",
                self._shown.hidden,
                len(units),
                self._most,
            )

    def show(self, drift: Mapping[Unit, float], staleness: Mapping[Unit, int]) -> None:
        """Newest drift and staleness of each unit."""
        for gauge, values in ((self.drift, drift), (self.staleness, staleness)):
            for unit, value in values.items():
                if unit in self._shown:
                    gauge.labels(unit.layer, unit.slot).set(value)
        for known, values in ((self._drift, drift), (self._staleness, staleness)):
            known.update((unit, value) for unit, value in values.items() if is_moving(unit))
        self.most_drift.set(max(self._drift.values(), default=0.0))
        self.most_staleness.set(max(self._staleness.values(), default=0))

    def judge(self, step: int, readings: Mapping[Unit, DriftReading]) -> None:
        """Look for spikes in what was measured of weights at ``step``; each unit once a step."""
        fresh = {unit: one for unit, one in readings.items() if self._read.get(unit) != step}
        self._read.update(dict.fromkeys(fresh, step))
        for spike in self._jumps.read(fresh):
            self._tell(step, spike)
        for unit in fresh.keys() & self._jumps.jumps.keys():
            if unit in self._shown:
                self.jump.labels(unit.layer, unit.slot).set(self._jumps.jumps[unit])

    def healthy(self, units: Collection[Unit], sick: Collection[Unit]) -> None:
        """Of these units it is known whether they are finite: ``sick`` are not."""
        before = {unit.layer for unit in self._sick}
        self._sick = (self._sick - set(units)) | set(sick)
        layers = {unit.layer for unit in self._sick}
        for unit in sick:
            self._shown.stood_out(unit)
        self._named |= {unit.layer for unit in sick if unit in self._shown}
        for layer in (before | layers) & self._named:
            self.layer_sick.labels(layer).set(layer in layers)
        if layers - before:
            _log.error(
                "NaN or Inf in %s: it is not saved, and the versions before stay",
                listed(sorted(layers - before), _NAMED),
            )
        self.sick.set(len(layers))
        self.hidden.set(self._shown.hidden)

    def _tell(self, step: int, spike: DriftAnomaly) -> None:
        self.spikes.inc()
        self._shown.stood_out(spike.unit)
        self.hidden.set(self._shown.hidden)
        _log.error(
            "drift spike: the weights of %s moved %.3g times as far as they used to up to step %d (drift %.3g). Where "
            "no setting was changed, memory or a device may have corrupted them: see docs/runbook.md",
            spike.unit.layer,
            spike.jump,
            step,
            spike.drift,
        )

    def _remove(self, unit: Unit) -> None:
        for gauge in (self.drift, self.staleness, self.jump):
            with suppress(KeyError):
                gauge.remove(unit.layer, unit.slot)
        self._drift.pop(unit, None)
        self._staleness.pop(unit, None)
