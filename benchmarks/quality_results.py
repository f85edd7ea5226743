"""Reads the results of the quality benchmark: what each row and case cost, in nats and in steps of training.

Cost of a failure at equal compute is the loss at the end above the run that failed nowhere, plus what the steps are
worth that have to be made twice. Both are told apart here: the first from runs that end at the same step of the same
course, the second from uninterrupted runs that are shorter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

Record = dict[str, Any]

STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 11: 2.201}
"""97.5 % points of Student's t by degrees of freedom; of more than 9, 2.2 is not far off."""


@dataclass(frozen=True)
class Mean:
    """Of ``count`` values; around: half of its interval at 95 %, not a number where one value has none."""

    value: float
    around: float
    count: int

    def __mul__(self, factor: float) -> Mean:
        return Mean(self.value * factor, self.around * abs(factor), self.count)


def mean(values: Sequence[float]) -> Mean:
    """Values that are taken to be independent."""
    if len(values) < 2:
        return Mean(fmean(values) if values else float("nan"), float("nan"), len(values))
    around = STUDENT.get(len(values) - 1, 2.2) * stdev(values) / sqrt(len(values))
    return Mean(fmean(values), around, len(values))


def over_seeds(values: Iterable[tuple[int, float]]) -> Mean:
    """Of (seed, value): the mean of the seeds' means. What belongs to one seed shares a run and is not independent, so
    seeds are what is counted; no interval where there is one."""
    seeds: dict[int, list[float]] = {}
    for seed, value in values:
        seeds.setdefault(seed, []).append(value)
    return mean([fmean(own) for own in seeds.values()])


def load(path: Path) -> list[Record]:
    """The lines of a file, none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Results:
    """Of one setting."""

    def __init__(self, setting: str, records: Iterable[Record]) -> None:
        self.setting = setting
        self.records = own = [one for one in records if one["setting"] == setting]
        self.trunks: dict[int, Record] = {}
        for one in own:
            if one["part"] == "trunk":
                self.trunks[one["seed"]] = {**self.trunks.get(one["seed"], {}), **one}
        cases = {(one["seed"], one["at"], json.dumps(one["case"])): one for one in own if one["part"] == "calibration"}
        self.cases = list(cases.values())
        curves = {(one["seed"], one["row"]): one for one in own if one["part"] == "curve"}
        self.curves = list(curves.values())

    @cached_property
    def numel(self) -> float:
        """Parameters that move, from what a raw save takes."""
        return next(one["numel"] for one in self.trunks.values() if "numel" in one)

    def gap(self, one: Record, losses: Mapping[str, float], steps: int | None = None) -> float:
        """Loss above that of the run that failed nowhere, at the same step of the course: the last one, or the first
        that was looked at ``steps`` after the resume."""
        trunk = self.trunks[one["seed"]]["losses"]
        taken = sorted(int(step) for step in losses if step in trunk)  # with the journal a run resumes at any step
        at = taken[-1] if steps is None else next(step for step in taken if step >= taken[0] + steps)
        return float(losses[str(at)] - trunk[str(at)])

    @cached_property
    def worth(self) -> Mean:
        """Nats that a step more brings, at the end: by how much runs end above that are some steps shorter, a step."""
        return over_seeds(
            (seed, (end - self.last(trunk)) / int(steps))
            for seed, trunk in self.trunks.items()
            for steps, end in trunk.get("shorter", {}).items()
        )

    @staticmethod
    def last(trunk: Record) -> float:
        """Loss at the end."""
        return float(trunk["losses"][max(trunk["losses"], key=int)])

    @cached_property
    def spread(self) -> float:
        """Standard deviation of the last loss over seeds."""
        return stdev(map(self.last, self.trunks.values())) if len(self.trunks) > 1 else float("nan")

    def nudged(self, steps: int | None) -> float:
        """Root mean square of the gap that a change of all weights in the last place makes: less cannot be seen.

        Where that was not tried, of what encoding ``careful`` changes, which is little more."""
        found = [self.gap(one, one["losses"], steps) for one in self.cases if one["case"]["special"] == "nudged"]
        if not found:
            careful = [one for one in self.curves if one["family"] == "full, careful"]
            found = [self.gap(one, state["losses"], steps) for one in careful for state in one["states"]]
        return sqrt(fmean(gap**2 for gap in found)) if found else float("nan")


@dataclass(frozen=True)
class RowResult:
    """One row in one setting. rate: bytes a parameter and step. gap: at the end, nats. shock: right after the resume.

    Means are over seeds, of what each seed's states come to; none where only bytes were counted. lost: mean steps that
    are made twice. cost: at equal compute, nats. states: resumed ones, of all seeds. healed: mean steps after which the
    gap is within twice the noise and stays there, over states where it comes to that; stray: the others, of all. drift:
    mean over layers, of weights, and the largest."""

    family: str
    row: str
    mark: str
    every: int
    rate: float
    gap: Mean
    shock: Mean
    lost: float
    cost: Mean
    states: int
    healed: float
    stray: int
    drift: float
    largest: float


def row_results(results: Results, window: tuple[int, int, int]) -> list[RowResult]:
    """window: first save, first and last failure. Whole rows first."""
    rows: dict[str, list[Record]] = {}
    for one in results.curves:
        rows.setdefault(one["row"], []).append(one)
    ordered = sorted(rows.values(), key=lambda own: not own[0]["family"].startswith("full"))
    return [_row_result(results, own, window) for own in ordered]


def _gap(results: Results, own: Sequence[Record], steps: int | None) -> Mean:
    found = over_seeds(
        (one["seed"], results.gap(one, state["losses"], steps)) for one in own for state in one["states"]
    )
    return replace(found, around=0.0) if own[0]["family"] == "full" and found.count == 1 else found


def _row_result(results: Results, own: Sequence[Record], window: tuple[int, int, int]) -> RowResult:
    start, first, last = window
    states = [(one, state) for one in own for state in one["states"]]
    rate = fmean(sum(one["saved"].values()) for one in own) / (last - start) / results.numel
    lost = fmean(step - newest(one["saved"], start, step) for one in own for step in range(first, last + 1))
    lost = 0.0 if own[0]["family"].endswith("journal") else lost
    gap = _gap(results, own, None)
    healed = [_healed(results, one, state) for one, state in states]
    whole = [steps for steps in healed if steps is not None]
    return RowResult(
        own[0]["family"],
        own[0]["row"],
        own[0]["mark"],
        own[0]["every"],
        rate,
        gap,
        _gap(results, own, 0),
        lost,
        Mean(gap.value + lost * results.worth.value, gap.around, gap.count),
        len(states),
        fmean(whole) if whole else float("nan"),
        len(healed) - len(whole),
        fmean(state["certificate"]["mean"] for _, state in states) if states else float("nan"),
        max((state["certificate"]["max"] for _, state in states), default=float("nan")),
    )


def _healed(results: Results, one: Record, state: Record) -> int | None:
    """Steps after the resume from which on the gap is within twice the noise; None where it is not at the end."""
    trunk, limit = results.trunks[one["seed"]]["losses"], 2 * results.nudged(None)
    taken = sorted(int(step) for step in state["losses"] if step in trunk)
    outside = [step for step in taken if abs(state["losses"][str(step)] - trunk[str(step)]) > limit]
    if not outside:
        return 0
    return next((step - taken[0] for step in taken if step > outside[-1]), None)


def newest(saved: Mapping[str, int], start: int, step: int) -> int:
    """The step of the newest save at or before a step."""
    return max((int(one) for one in saved if int(one) <= step), default=start)


def less_often(size: float, rate: float, worth: float, gap: float = 0.0) -> float:
    """Cost, in nats, of saving ``size`` bytes a parameter as often as ``rate`` bytes a parameter and step allow. A
    failure finds the save on average half a period old."""
    period = max(1.0, size / rate)
    return gap + worth * (period - 1) / 2


def size_at(sizes: Mapping[int, float], rate: float) -> float:
    """Bytes a parameter of a save, made as often as ``rate`` allows. Differences grow with the period.

    sizes: measured, by period; in between, in a straight line over its logarithm, and beyond, those of the last."""
    known = sorted(sizes.items())
    periods, values = np.log([period for period, _ in known]), [value for _, value in known]
    low, high = 0.0, 12.0  # logarithm of the period
    for _ in range(60):
        middle = (low + high) / 2
        size = float(np.interp(middle, periods, values))
        low, high = (middle, high) if size > rate * np.exp(middle) else (low, middle)
    return size


def slope_through_zero(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(slope, R^2) of y = slope x; R^2 against the mean of y, so that it may be below 0."""
    slope = sum(x * y for x, y in points) / max(sum(x * x for x, _ in points), 1e-300)
    level = fmean(y for _, y in points)
    return slope, 1 - sum((y - slope * x) ** 2 for x, y in points) / sum((y - level) ** 2 for _, y in points)


def correlation(points: Sequence[tuple[float, float]]) -> float:
    """R^2 of a line with a level of its own; NaN without points, as for a seed whose rows are all exact."""
    if not points:
        return float("nan")
    mx, my = fmean(x for x, _ in points), fmean(y for _, y in points)
    xy = sum((x - mx) * (y - my) for x, y in points)
    xx, yy = sum((x - mx) ** 2 for x, _ in points), sum((y - my) ** 2 for _, y in points)
    return xy * xy / (xx * yy) if xx and yy else float("nan")
