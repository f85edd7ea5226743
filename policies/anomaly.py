"""Weights that moved further at once than they ever do: an early sign of silent corruption. Pure; no clock, no I/O.

A flipped bit in an exponent, a device that computes wrongly or a bad restore changes *one* layer's weights by far more
than an optimizer would. So each layer is compared with its own past, and that with all others:

    bound(t)  = median over its last readings (s, d) of  d * max(1, staleness / s)
    jump(t)   = (drift / bound) / max(1, median of the same over all layers read together)

``bound`` is what drift could be at this staleness if the layer moved as before: distances add up at most in proportion
to steps, so a longer way was allowed for, and a shorter one is not held against it. Dividing by the median of all
layers lets a learning rate that warms up, or starts again, pass: it moves all of them. A jump is a **spike** from
``FACTOR`` on, where it is also ``SIGMAS`` standard deviations above 1 as jumps of this layer scatter upwards otherwise
(by their 90th percentile, which a few spikes do not move), with at least ``LEAST`` readings. That a layer slows down,
as with a learning rate that decays, is no scatter. Only the first reading of a stretch above is told.

Moments are not judged: one large gradient moves them like this by nature. What corrupts them shows in the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from store.names import Unit

FACTOR = 4.0
SIGMAS = 6.0
LEAST = 8
WINDOW = 32
_CROWD = 3
"""Layers read together, from which on their median says anything."""

_HIGH, _NORMAL = 0.9, 1.2816
"""A high quantile, and where it lies for normal values, in standard deviations."""

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]


@dataclass(frozen=True)
class DriftReading:
    """drift of a unit, as a fraction, at a staleness of so many steps."""

    drift: float
    staleness: int


@dataclass(frozen=True)
class DriftAnomaly:
    """A unit moved ``jump`` times as far as it used to."""

    unit: Unit
    drift: float
    jump: float


class _Window:
    """The last values of every row, at most :data:`WINDOW`; +inf where there are fewer. float64 [rows, WINDOW]."""

    def __init__(self) -> None:
        self.values: Floats = np.empty((0, WINDOW))
        self.counts: Rows = np.empty(0, dtype=np.intp)

    def grow(self, rows: int) -> None:
        """Have so many rows."""
        more = rows - len(self.counts)
        self.values = np.concatenate([self.values, np.full((more, WINDOW), np.inf)])
        self.counts = np.concatenate([self.counts, np.zeros(more, dtype=np.intp)])

    def put(self, rows: Rows, values: Floats) -> None:
        """One more value for each of these rows, in the place of the oldest."""
        self.values[rows, self.counts[rows] % WINDOW] = values
        self.counts[rows] += 1


class DriftAnomalyDetector:
    """Remembers a few readings of every unit. jumps: of each unit's newest reading, where there was enough to say."""

    def __init__(self) -> None:
        self._rows: dict[Unit, int] = {}
        self._drift, self._steps, self._logs = _Window(), _Window(), _Window()
        self._above: NDArray[np.bool_] = np.empty(0, dtype=np.bool_)
        self.jumps: dict[Unit, float] = {}

    def read(self, readings: Mapping[Unit, DriftReading]) -> list[DriftAnomaly]:
        """Take readings of one moment. Those that are spikes, furthest first."""
        usable = {unit: one for unit, one in readings.items() if one.staleness > 0 and math.isfinite(one.drift)}
        rows = self._rows_of(usable)
        drift = np.array([one.drift for one in usable.values()], dtype=np.float64)
        steps = np.array([one.staleness for one in usable.values()], dtype=np.float64)
        with np.errstate(all="ignore"):
            told, jumps = self._judged(rows, drift, steps)
        self._drift.put(rows, drift)
        self._steps.put(rows, steps)
        units = list(usable)
        self.jumps.update((units[i], float(jumps[i])) for i in np.flatnonzero(~np.isnan(jumps)))
        spikes = [DriftAnomaly(units[i], float(drift[i]), float(jumps[i])) for i in np.flatnonzero(told)]
        return sorted(spikes, key=lambda one: -one.jump)

    def _rows_of(self, units: Iterable[Unit]) -> Rows:
        found = np.array([self._rows.setdefault(unit, len(self._rows)) for unit in units], dtype=np.intp)
        if len(self._rows) > len(self._above):
            for window in (self._drift, self._steps, self._logs):
                window.grow(len(self._rows))
            self._above = np.concatenate([self._above, np.zeros(len(self._rows) - len(self._above), dtype=np.bool_)])
        return found

    def _judged(self, rows: Rows, drift: Floats, steps: Floats) -> tuple[NDArray[np.bool_], Floats]:
        """Which begin a stretch above; and the jump of each, NaN where nothing can be said."""
        known = self._drift.counts[rows] >= LEAST
        bounds = self._drift.values[rows] * np.maximum(1.0, steps[:, None] / self._steps.values[rows])
        jumps = drift / _medians(bounds, self._drift.counts[rows])  # something by nothing: inf; nothing by it: NaN
        jumps[~known] = np.nan
        said = jumps[~np.isnan(jumps)]
        if len(said) >= _CROWD:
            jumps = jumps / max(1.0, float(np.median(said)))
        above = jumps >= np.maximum(FACTOR, self._usual(rows))
        told = above & ~self._above[rows]
        self._above[rows[known]] = above[known]
        sound = np.isfinite(jumps) & (jumps > 0.0)
        self._logs.put(rows[sound], np.log(np.maximum(jumps[sound], 1.0)))
        return told, jumps

    def _usual(self, rows: Rows) -> Floats:
        """How far up jumps of each row may go, on the logarithmic scale on which ratios are symmetric."""
        counts = np.clip(self._logs.counts[rows], 1, WINDOW)
        ordered = np.sort(self._logs.values[rows], axis=1)
        high = ordered[np.arange(len(rows)), (_HIGH * (counts - 1)).astype(np.intp)]
        return np.where(counts < LEAST, 0.0, np.exp(SIGMAS * high / _NORMAL))


def _medians(values: Floats, counts: Sequence[int] | Rows) -> Floats:
    """Of each row's first ``counts`` values in ascending order; the others are +inf. +inf where there are none."""
    ordered = np.sort(values, axis=1)
    held = np.clip(counts, 1, WINDOW)
    at = np.arange(len(ordered))
    return np.asarray((ordered[at, (held - 1) // 2] + ordered[at, held // 2]) / 2)
