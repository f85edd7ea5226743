"""How far each unit moved between any two steps, from how far it moved over some ages.

A trace tells distances over a few ages only (1, 2, 4, ... decisions), at the steps of decisions. Between recorded ages
log distance is a line in log age; beyond them the line goes on with the exponent that it has there. A movement within
one stretch of training; it knows no versions and no precision. docs/simulate.md says what that is worth.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from policies.budget import GROWTH
from policies.replay.recorded_run import DecisionPoint, RunSegment

Vector = npt.NDArray[np.float64]

EXPONENT = GROWTH / 2
"""Of distance ~ age^x, where only one age is known: damage is its square."""

_TINY = 1e-300


@dataclass(frozen=True)
class _Table:
    """What is known at one step. ages, distances: [point, unit], ages ascending, infinite where there is no point."""

    ages: Vector
    distances: Vector


class Movement:
    """Of all units of an era. still: units that do not move, whose distance is 0 where nothing else is known."""

    def __init__(self, tables: Mapping[int, _Table], still: Sequence[bool]) -> None:
        self._steps = sorted(tables)
        self._tables = tables
        self._still = np.array(still, dtype=bool)

    def distance(self, step: float, since: Vector) -> Vector:
        """Relative distance of each unit's live values at ``step`` to those at the step in ``since``.

        step may lie between decisions. NaN: not known."""
        if not self._steps:
            return np.where(self._still, 0.0, np.nan)
        table = self._tables[self._nearest(step)]
        return np.where((step <= since) | self._unmoved(table), 0.0, _read(table, np.maximum(step - since, 0.0)))

    def pace_squared(self, step: float) -> Vector:
        """Squared distance a step, over the shortest age that is recorded; NaN: not known."""
        if not self._steps:
            return np.full(self._still.shape, np.nan)
        table = self._tables[self._nearest(step)]
        with np.errstate(invalid="ignore"):
            return np.where(np.isinf(table.ages[0]), np.nan, (table.distances[0] / table.ages[0]) ** 2)

    def _unmoved(self, table: _Table) -> npt.NDArray[np.bool_]:
        unmoved: npt.NDArray[np.bool_] = self._still & np.isinf(table.ages[0])
        return unmoved

    def _nearest(self, step: float) -> int:
        """The first recorded step that is not before ``step``; the last one beyond it."""
        return self._steps[min(bisect_left(self._steps, step), len(self._steps) - 1)]


def movement_of(era: RunSegment) -> Movement:
    """From ``moved`` lines, and from drift against the versions of the recorded run, precision taken off."""
    units = len(era.units)
    found: dict[int, list[tuple[int, float, float]]] = {}
    for step, line in era.moved.items():
        found.setdefault(step, []).extend(
            (index, float(step - since), distance)
            for since, distances in line.since.items()
            for index, distance in enumerate(distances)
            if distance is not None and step > since
        )
    # A ladder of ages says more than one drift: it is taken from the steps around rather than that from this one.
    laddered = {index for points in found.values() for index, _, _ in points}
    for moment in era.moments:
        here = found.setdefault(moment.line.step, [])
        known = {index for index, _, _ in here}
        points = _from_drift(era, moment.line.step, _drifts(moment))
        here.extend(point for point in points if point[0] in known or point[0] not in laddered)
    still = [not unit.moving for unit in era.units]
    return Movement(_filled({step: points for step, points in found.items() if points}, units), still)


def _drifts(moment: DecisionPoint) -> Iterable[tuple[int, float, int, float]]:
    """(unit, drift, staleness, error of the version) where all are known; as decided on, or as staged."""
    line, commit = moment.line, moment.commit
    for index, staleness in enumerate(line.staleness):
        drift = line.drift[index] if index < len(line.drift) else None
        if drift is None and commit is not None and index in commit.sizes:
            drift = commit.sizes[index][3]
        if drift is not None and staleness:
            yield index, drift, staleness, line.error[index] if index < len(line.error) else 0.0


def _from_drift(
    era: RunSegment, step: int, drifts: Iterable[tuple[int, float, int, float]]
) -> Iterable[tuple[int, float, float]]:
    for index, drift, staleness, error in drifts:
        since = max(step - staleness, era.start) if era.resumed else step - staleness
        if step > since:
            yield index, float(step - since), math.sqrt(max(0.0, drift * drift - error * error))


def _filled(found: Mapping[int, Sequence[tuple[int, float, float]]], units: int) -> Mapping[int, _Table]:
    """Tables; a unit without a point at some step has those of the nearest later step, else of an earlier one."""
    columns: dict[int, dict[int, dict[float, float]]] = {}
    for step, points in found.items():
        made = columns.setdefault(step, {})
        for index, age, distance in points:
            made.setdefault(index, {}).setdefault(age, distance)  # moved lines come first: no precision in them
    steps = sorted(columns)
    for order in (reversed(steps), steps):
        near: dict[int, dict[float, float]] = {}
        for step in order:
            columns[step] = near | columns[step]
            near = columns[step]
    return {step: _table(columns[step], units) for step in steps}


def _table(columns: Mapping[int, Mapping[float, float]], units: int) -> _Table:
    depth = max(len(points) for points in columns.values())
    ages, distances = np.full((depth, units), np.inf), np.zeros((depth, units))
    for index, points in columns.items():
        for row, age in enumerate(sorted(points)):
            ages[row, index], distances[row, index] = age, points[age]
    return _Table(ages, distances)


def _read(table: _Table, age: Vector) -> Vector:
    ages, distances = table.ages, table.distances
    every = np.arange(ages.shape[1])
    count = np.isfinite(ages).sum(axis=0)
    above = np.minimum((ages < age).sum(axis=0), np.maximum(count - 1, 0))
    below = np.maximum(above - 1, 0)
    above = np.where(above == below, np.minimum(above + 1, np.maximum(count - 1, 0)), above)
    x0, x1 = ages[below, every], ages[above, every]
    y0, y1 = distances[below, every], distances[above, every]
    with np.errstate(all="ignore"):
        slope = np.log(np.maximum(y1, _TINY) / np.maximum(y0, _TINY)) / np.log(x1 / x0)
        inside = (age >= x0) & (age <= x1)
        slope = np.where(count < 2, EXPONENT, np.where(inside, slope, np.clip(slope, 0.0, 1.0)))
        nearer = age >= x1
        x, y = np.where(nearer, x1, x0), np.where(nearer, y1, y0)
        read = y * (age / x) ** slope
        straight = y0 + (y1 - y0) * (age - x0) / (x1 - x0)  # a distance of 0 has no logarithm
        read = np.where(inside & (np.minimum(y0, y1) <= 0.0) & (x1 > x0), straight, read)
        read = np.where(age == x0, y0, np.where(age == x1, y1, read))
    return np.where(count == 0, np.nan, read)
