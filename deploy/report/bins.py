"""A run of any length in a bounded number of columns: each holds as many decisions in a row as it must.

When the columns are full, neighbours are merged, so that a trace is read once and never held. Rows (units) may be added
at any time. What is merged by which rule: drift by the largest, marks by any, counts by the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]
_Counts = npt.NDArray[np.int64]
_T = TypeVar("_T", bound=np.generic)


@dataclass
class Column:
    """Several decisions in a row. steps and times: of the first and the last one. full: bytes that full saves would
    have taken, of the saves that were committed; stall: seconds, the longest too."""

    first_step: int
    last_step: int
    first_at: float
    last_at: float
    decisions: int = 1
    saves: int = 0
    written: int = 0
    full: int = 0
    stall: float = 0.0
    longest: float = 0.0

    def take(self, other: Column) -> None:
        """What comes after it."""
        self.last_step, self.last_at = other.last_step, other.last_at
        self.decisions += other.decisions
        self.saves += other.saves
        self.written += other.written
        self.full += other.full
        self.stall += other.stall
        self.longest = max(self.longest, other.longest)


@dataclass
class Bins:
    """most: columns, even. drift: NaN where nothing is known; saved, rounded: how many decisions of the column stored
    the unit, and how many of those lost bits; sick: whether it was not finite; all (units, columns)."""

    most: int = 120
    width: int = 1
    count: int = 0
    columns: list[Column] = field(default_factory=list)
    drift: _Floats = field(default_factory=lambda: np.full((0, 0), np.nan))
    saved: _Counts = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    rounded: _Counts = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    sick: _Counts = field(default_factory=lambda: np.zeros((0, 0), np.int64))

    def rows(self, count: int) -> None:
        """There are so many units now; never fewer than before."""
        more = count - self.drift.shape[0]
        if more <= 0 and self.drift.shape[1] == self.most:
            return
        shape = (max(count, self.drift.shape[0]), self.most)
        self.drift = _grown(self.drift, shape, np.nan)
        self.saved, self.rounded, self.sick = (_grown(old, shape, 0) for old in (self.saved, self.rounded, self.sick))

    def add(self, step: int, at: float) -> int:
        """A decision follows. Returns its number."""
        if self.count == self.most * self.width:
            self._halve()
        number, self.count = self.count, self.count + 1
        one = Column(step, step, at, at)
        if number // self.width == len(self.columns):
            self.columns.append(one)
        else:
            self.columns[-1].take(one)
        return number

    def pick(self, rows: Sequence[int]) -> None:
        """Have these rows in this order, and no room for more columns than there are: the run has ended."""
        end = len(self.columns)
        self.drift, self.saved = self.drift[rows, :end], self.saved[rows, :end]
        self.rounded, self.sick = self.rounded[rows, :end], self.sick[rows, :end]

    def place(self, number: int) -> int:
        """The column that a decision is in now."""
        return number // self.width

    def _halve(self) -> None:
        self.width *= 2
        for left, right in zip(self.columns[::2], self.columns[1::2], strict=False):
            left.take(right)
        self.columns = self.columns[::2]
        half, rest = self.most // 2, self.most - self.most // 2
        self.drift = _grown(
            np.fmax(self.drift[:, ::2], self.drift[:, 1::2]), (self.drift.shape[0], half + rest), np.nan
        )
        self.saved, self.rounded, self.sick = (
            _grown(old[:, ::2] + old[:, 1::2], (old.shape[0], half + rest), 0)
            for old in (self.saved, self.rounded, self.sick)
        )


def _grown(old: npt.NDArray[_T], shape: tuple[int, int], empty: float) -> npt.NDArray[_T]:
    found: npt.NDArray[_T] = np.full(shape, empty, old.dtype)
    found[: old.shape[0], : old.shape[1]] = old
    return found
