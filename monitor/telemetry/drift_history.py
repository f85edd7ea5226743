"""Distances between the present and some earlier decisions, whatever was saved of either: about 1, 2, 4, 8... ago.

Knows signatures and steps, not what they are of; sums over ranks are the caller's. Training thread only. Which earlier
decisions are compared depends on their number alone, so it is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from monitor.observe.drift_meter import Signature

_ROWS = 16
"""Units at a time: their differences in float64, half a MiB, stay in the cache."""


@dataclass(frozen=True)
class Compared:
    """The present against earlier decisions of ``steps``, newest first.

    rows: float64, (steps, units, 3): squared distance, squared norm then, and 1.0 where one of the two is not known, in
    which case the squares are 0.0. They may not be finite. Sums over ranks add up."""

    steps: tuple[int, ...]
    rows: torch.Tensor


@dataclass(frozen=True)
class _Rung:
    """The units at one decision. values: float32, (units, width), short signatures filled up with zeros."""

    step: int
    values: torch.Tensor
    known: torch.Tensor
    squared: torch.Tensor


class DriftHistory:
    """Keeps the signatures of at most ``anchors`` + 2 decisions.

    At decision n the anchor of age 2^j is the last but one multiple of 2^j up to n, which lies 2^j to 2^(j+1) - 1 back:
    such an anchor stays what it is for a while, so few have to be kept. width: of the longest signature."""

    def __init__(self, anchors: int, width: int) -> None:
        self._anchors = anchors
        self._width = width
        self._number = 0
        self._newest: int | None = None
        self._rungs: dict[int, _Rung] = {}

    @property
    def memory_bytes(self) -> int:
        """Bytes of all signatures held."""
        return sum(rung.values.numel() * rung.values.element_size() for rung in self._rungs.values())

    def clear(self) -> None:
        """Begin anew: what follows is of other units, or of another branch of the run."""
        self._number, self._newest = 0, None
        self._rungs.clear()

    def add(self, step: int, signatures: Sequence[Signature | None]) -> Compared:
        """Compare with earlier decisions, and remember. signatures: always of the same units in the same order; None
        where it is not known. A decision of the same step as the one before is not looked at."""
        if step == self._newest:
            return Compared((), torch.zeros(0, len(signatures), 3, dtype=torch.float64))
        now, number = self._rung(step, signatures), self._number
        thens = [self._rungs[at] for at in compared_with(number, self._anchors)]
        rows = [_rows(now, then) for then in thens]
        self._number, self._newest = number + 1, step
        self._rungs[number] = now
        kept = _kept(number, self._anchors)
        self._rungs = {at: rung for at, rung in self._rungs.items() if at in kept}
        empty = torch.zeros(0, len(signatures), 3, dtype=torch.float64)
        return Compared(tuple(then.step for then in thens), torch.stack(rows) if rows else empty)

    def _rung(self, step: int, signatures: Sequence[Signature | None]) -> _Rung:
        values = torch.zeros(len(signatures), self._width)
        known = torch.zeros(len(signatures), dtype=torch.bool)
        for row, signature in enumerate(signatures):
            if signature is not None and signature.finite:
                values[row, : signature.values.numel()] = signature.values
                known[row] = True
        return _Rung(step, values, known, _squares(values))


def compared_with(number: int, anchors: int) -> list[int]:
    """Numbers, from 0, of the decisions that this one is compared with; the newest first."""
    return sorted({((number >> j) - 1) << j for j in range(anchors) if number >> j}, reverse=True)


def _kept(number: int, anchors: int) -> set[int]:
    """What this decision or a later one is compared with: of each power of two the last two multiples."""
    return {(number >> j) << j for j in range(anchors)} | set(compared_with(number, anchors))


def _rows(now: _Rung, then: _Rung) -> torch.Tensor:
    known = now.known & then.known
    moved = torch.where(known, _distances(now.values, then.values), 0.0)
    return torch.stack([moved, torch.where(known, then.squared, 0.0), (~known).to(torch.float64)], dim=1)


def _distances(now: torch.Tensor, then: torch.Tensor) -> torch.Tensor:
    pairs = zip(torch.split(now, _ROWS), torch.split(then, _ROWS), strict=True)
    return torch.cat([_squares(a.to(torch.float64).sub_(b)) for a, b in pairs])


def _squares(values: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(values, dim=1, dtype=torch.float64)
    return norms.square()
