"""Interpolate how far each unit moved between any two steps of a segment.

A trace has distances over a few ages only (1, 2, 4, ... decisions), at decisions' steps. Between recorded ages, log
distance is linear in log age; beyond them the exponent there extrapolates it. docs/simulate.md has the accuracy."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from policies.budget import GROWTH
from policies.replay.recorded_run import DecisionPoint, RunSegment

Vector = npt.NDArray[np.float64]
EXPONENT = GROWTH / 2  # exponent x of distance ~ age^x if only one age is known; damage is its square
_TINY = 1e-300


@dataclass(frozen=True)
class _Table:
    """Known points at one step. ages, distances: [point, unit]; ages ascending, infinite where there is no point."""

    ages: Vector
    distances: Vector


class Movement:
    """Movement of all units of a segment. still: frozen units, whose distance is 0 unless known otherwise."""

    def __init__(self, tables: Mapping[int, _Table], still: Sequence[bool]) -> None:
        self._steps = sorted(tables)
        self._tables = tables
        self._still = np.array(still, dtype=bool)

    def distance(self, step: float, since: Vector) -> Vector:
        """Return the relative distance of each unit between ``step`` and the step in ``since``; NaN if unknown.

        ``step`` may lie between decisions."""
        if not self._steps:
            return np.where(self._still, 0.0, np.nan)
        table = self._tables[self._nearest(step)]
        unmoved = (step <= since) | (self._still & np.isinf(table.ages[0]))
        return np.where(unmoved, 0.0, _interpolate(table, np.maximum(step - since, 0.0)))

    def pace_squared(self, step: float) -> Vector:
        """Return the squared distance per step, over the shortest recorded age; NaN if unknown."""
        if not self._steps:
            return np.full(self._still.shape, np.nan)
        table = self._tables[self._nearest(step)]
        with np.errstate(invalid="ignore"):
            return np.where(np.isinf(table.ages[0]), np.nan, (table.distances[0] / table.ages[0]) ** 2)

    def _nearest(self, step: float) -> int:
        return self._steps[min(bisect_left(self._steps, step), len(self._steps) - 1)]


def movement_of(segment: RunSegment) -> Movement:
    """Build the movement from ``moved`` lines, and from recorded drift without its encoding error."""
    units = len(segment.units)
    found: dict[int, list[tuple[int, float, float]]] = {}
    for step, line in segment.moved.items():
        found.setdefault(step, []).extend(
            (index, float(step - since), distance)
            for since, distances in line.since.items()
            for index, distance in enumerate(distances)
            if distance is not None and step > since
        )
    # For a unit with ``moved`` lines, their several ages at a nearby step are better than a single drift at this step.
    in_moved = {index for points in found.values() for index, _, _ in points}
    for decision in segment.decisions:
        here = found.setdefault(decision.line.step, [])
        known, points = {index for index, _, _ in here}, _from_drift(segment, decision)
        here.extend(point for point in points if point[0] in known or point[0] not in in_moved)
    still = [not unit.moving for unit in segment.units]
    return Movement(_filled({step: points for step, points in found.items() if points}, units), still)


def _from_drift(segment: RunSegment, decision: DecisionPoint) -> Iterable[tuple[int, float, float]]:
    """Yield (unit, age, distance) where drift, at the decision or as staged, and the version's error are known."""
    line, commit = decision.line, decision.commit
    for index, staleness in enumerate(line.staleness):
        drift = line.drift[index] if index < len(line.drift) else None
        if drift is None and commit is not None and index in commit.sizes:
            drift = commit.sizes[index][3]
        if drift is None or not staleness:
            continue
        error = line.error[index] if index < len(line.error) else 0.0
        since = segment.moves_from(line.step - staleness)
        if line.step > since:
            yield index, float(line.step - since), math.sqrt(max(0.0, drift * drift - error * error))


def _filled(found: Mapping[int, Sequence[tuple[int, float, float]]], units: int) -> Mapping[int, _Table]:
    """Build the tables. A unit without a point at a step gets those of the next later step, or else an earlier one."""
    columns: dict[int, dict[int, dict[float, float]]] = {}
    for step, points in found.items():
        made = columns.setdefault(step, {})
        for index, age, distance in points:
            made.setdefault(index, {}).setdefault(age, distance)  # ``moved`` lines come first: free of encoding error
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


def _interpolate(table: _Table, age: Vector) -> Vector:
    ages, distances = table.ages, table.distances
    units, count = np.arange(ages.shape[1]), np.isfinite(ages).sum(axis=0)
    above = np.minimum((ages < age).sum(axis=0), np.maximum(count - 1, 0))
    below = np.maximum(above - 1, 0)
    above = np.where(above == below, np.minimum(above + 1, np.maximum(count - 1, 0)), above)
    x0, x1 = ages[below, units], ages[above, units]
    y0, y1 = distances[below, units], distances[above, units]
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
