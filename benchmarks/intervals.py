"""A mean with its 95 % interval, of ratios taken pair by pair. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean, stdev

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t at 97.5 %, for 1 to 15 degrees of freedom."""


@dataclass(frozen=True)
class Estimate:
    """around: half of the width of the 95 % interval; infinite for one value."""

    mean: float
    around: float
    count: int

    def __str__(self) -> str:
        return f"95 %: {self.mean - self.around:.4g} to {self.mean + self.around:.4g}, {self.count} pairs"


def estimate(values: Sequence[float]) -> Estimate:
    """Of independent values, at least one."""
    count = len(values)
    if count < 2:
        return Estimate(fmean(values), inf, count)
    student = STUDENT[min(count - 1, len(STUDENT)) - 1]  # beyond the table: a little too wide
    return Estimate(fmean(values), student * stdev(values) / sqrt(count), count)


def paired(values: Sequence[float], against: Sequence[float]) -> Estimate:
    """Of the ratios pair by pair: what both of a pair have in common, as a machine that slows down, drops out."""
    return estimate([a / b for a, b in zip(values, against, strict=True)])
