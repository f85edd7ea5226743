"""Detect weights that moved much further than usual, an early sign of silent corruption. Pure; no clock, no I/O.

Each layer is compared with its own past, and that ratio with the other layers; docs/metrics.md#drift-spikes says how:

    bound(t)  = median over its last readings (s, d) of  d * max(1, staleness / s)
    jump(t)   = (drift / bound) / max(1, median of the same over all layers read together)

``bound`` is the largest drift at this staleness if the layer moves as before, since distances grow at most in
proportion to steps. Deviations are estimated from the 90th percentile of this layer's jumps (robust to a few spikes);
jumps below 1, as with a decaying learning rate, do not count. Only the first spike in a row is reported."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from store.names import Unit

FACTOR = 4.0  # a spike is a jump of at least this
SIGMAS = 6.0  # and at least this many standard deviations of the logarithms of the unit's jumps
LEAST = 8  # readings before a unit has jumps, and jumps before their deviation counts
EXPLODED = 1000.0  # drift, also relative to the median of the layers, that is a spike before a unit has jumps
WINDOW = 32  # readings kept of each unit
_EARLIEST = 2  # readings before EXPLODED applies: a layer may begin at zero, so that its first drift is huge
_MIN_LAYERS = 3  # layers read together for which a median is taken
_QUANTILE, _NORMAL_QUANTILE = 0.9, 1.2816  # a high quantile, and its value for a standard normal distribution
Floats = NDArray[np.float64]
Rows = NDArray[np.intp]


@dataclass(frozen=True)
class DriftReading:
    """Drift of a unit, as a fraction, at a staleness in steps."""

    drift: float
    staleness: int


@dataclass(frozen=True)
class DriftAnomaly:
    """A unit moved ``jump`` times as far as usual."""

    unit: Unit
    drift: float
    jump: float


class _Window:
    """Ring buffers of the last :data:`WINDOW` values of every row. float64 [rows, WINDOW], +inf where empty."""

    def __init__(self) -> None:
        self.values: Floats = np.empty((0, WINDOW))
        self.counts: Rows = np.empty(0, dtype=np.intp)

    def grow(self, rows: int) -> None:
        more = rows - len(self.counts)
        self.values = np.concatenate([self.values, np.full((more, WINDOW), np.inf)])
        self.counts = np.concatenate([self.counts, np.zeros(more, dtype=np.intp)])

    def put(self, rows: Rows, values: Floats) -> None:
        """Append a value to each of these rows, replacing the oldest."""
        self.values[rows, self.counts[rows] % WINDOW] = values
        self.counts[rows] += 1


class DriftAnomalyDetector:
    """Detects spikes from the last readings of every unit. jumps: of each unit's newest reading, if known."""

    def __init__(self) -> None:
        self._rows: dict[Unit, int] = {}
        self._drift, self._steps, self._logs = _Window(), _Window(), _Window()
        self._above: NDArray[np.bool_] = np.empty(0, dtype=np.bool_)
        self.jumps: dict[Unit, float] = {}

    def read(self, readings: Mapping[Unit, DriftReading]) -> list[DriftAnomaly]:
        """Add the readings of one step. Return the spikes among them, largest first."""
        usable = {unit: one for unit, one in readings.items() if one.staleness > 0 and math.isfinite(one.drift)}
        rows = np.array([self._rows.setdefault(unit, len(self._rows)) for unit in usable], dtype=np.intp)
        if len(self._rows) > len(self._above):
            for window in (self._drift, self._steps, self._logs):
                window.grow(len(self._rows))
            self._above = np.concatenate([self._above, np.zeros(len(self._rows) - len(self._above), dtype=np.bool_)])
        drift = np.array([one.drift for one in usable.values()], dtype=np.float64)
        steps = np.array([one.staleness for one in usable.values()], dtype=np.float64)
        with np.errstate(all="ignore"):
            spiking, jumps = self._detect(rows, drift, steps)
        self._drift.put(rows, drift)
        self._steps.put(rows, steps)
        units = list(usable)
        self.jumps.update((units[i], float(jumps[i])) for i in np.flatnonzero(~np.isnan(jumps)))
        spikes = [DriftAnomaly(units[i], float(drift[i]), float(jumps[i])) for i in np.flatnonzero(spiking)]
        return sorted(spikes, key=lambda one: -one.jump)

    def _detect(self, rows: Rows, drift: Floats, steps: Floats) -> tuple[NDArray[np.bool_], Floats]:
        """Return which rows begin a spike, and the jump of each row, NaN if unknown."""
        known = self._drift.counts[rows] >= LEAST
        bounds = self._drift.values[rows] * np.maximum(1.0, steps[:, None] / self._steps.values[rows])
        jumps = drift / _medians(bounds, self._drift.counts[rows])  # x / 0 is inf, 0 / 0 is NaN
        jumps[~known] = np.nan
        defined = jumps[~np.isnan(jumps)]
        if len(defined) >= _MIN_LAYERS:
            jumps = jumps / max(1.0, float(np.median(defined)))
        above = jumps >= np.maximum(FACTOR, self._limits(rows))
        starting = above & ~self._above[rows]
        self._above[rows[known]] = above[known]
        sound = np.isfinite(jumps) & (jumps > 0.0)
        self._logs.put(rows[sound], np.log(np.maximum(jumps[sound], 1.0)))
        if len(drift) >= _MIN_LAYERS:
            relative = drift / (float(np.median(drift)) or 1.0)
            early = ~known & (self._drift.counts[rows] >= _EARLIEST)
            exploded = early & (drift >= EXPLODED) & (relative >= EXPLODED)
            jumps[exploded] = relative[exploded]
            starting |= exploded & ~self._above[rows]
            self._above[rows[early]] = exploded[early]
        return starting, jumps

    def _limits(self, rows: Rows) -> Floats:
        """Return the largest ordinary jump of each row, from logarithms, in which a ratio and its inverse are alike."""
        counts = np.clip(self._logs.counts[rows], 1, WINDOW)
        ordered = np.sort(self._logs.values[rows], axis=1)
        high = ordered[np.arange(len(rows)), (_QUANTILE * (counts - 1)).astype(np.intp)]
        return np.where(counts < LEAST, 0.0, np.exp(SIGMAS * high / _NORMAL_QUANTILE))


def _medians(values: Floats, counts: Sequence[int] | Rows) -> Floats:
    """Return the median of each row's ``counts`` finite values; +inf if there are none."""
    ordered, held = np.sort(values, axis=1), np.clip(counts, 1, WINDOW)
    at = np.arange(len(ordered))
    return np.asarray((ordered[at, (held - 1) // 2] + ordered[at, held // 2]) / 2)
