"""Compare a decision with earlier ones, about 1, 2, 4, 8... decisions ago, whether or not units were saved.

The caller sums over ranks. The earlier decisions follow from their number, alike on all ranks. One thread at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from monitor.observe.drift_meter import Signature

_ROWS = 16  # units compared at a time: their differences fit the cache
_EMPTY = torch.zeros(0, dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class Compared:
    """A decision compared with those of ``steps``, newest first.

    ``rows`` is float64, (steps, units, 3): squared distance, squared norm at the earlier decision, and 1.0 if a
    signature is not known; the squares are then 0.0. Squares may be infinite or NaN. Ranks' rows can be added."""

    steps: tuple[int, ...]
    rows: torch.Tensor


@dataclass(frozen=True)
class _DecisionSignatures:
    """Signatures of all units at one decision: ``values`` is float32, (units, width), padded with zeros."""

    step: int
    values: torch.Tensor
    known: torch.Tensor
    squared: torch.Tensor


class DriftHistory:
    """Keeps the signatures of at most ``anchors`` + 2 decisions.

    At decision n the anchor of age 2^j is the last but one multiple of 2^j up to n, which is 2^j to 2^(j+1) - 1
    decisions ago. It changes rarely, so few have to be kept. ``width`` is the length of the longest signature."""

    def __init__(self, anchors: int, width: int) -> None:
        self._anchors, self._width = anchors, width
        self._number = 0
        self._newest: int | None = None
        self._decisions: dict[int, _DecisionSignatures] = {}

    def add(self, step: int, signatures: Sequence[Signature | None]) -> Compared:
        """Compare a decision with earlier ones, and keep it. A second decision of the same step is ignored.

        ``signatures`` are always of the same units in the same order; None if unknown."""
        empty = torch.zeros(0, len(signatures), 3, dtype=torch.float64, device="cpu")
        if step == self._newest:
            return Compared((), empty)
        now, number = self._signatures(step, signatures), self._number
        earlier = [self._decisions[at] for at in compared_with(number, self._anchors)]
        rows = torch.stack([_rows(now, then) for then in earlier]) if earlier else empty
        # This decision or a later one is compared with the last two multiples of each power of two.
        retained = {(number >> j) << j for j in range(self._anchors)} | set(compared_with(number, self._anchors))
        decisions = {at: one for at, one in {**self._decisions, number: now}.items() if at in retained}
        self._decisions, self._number, self._newest = decisions, number + 1, step
        return Compared(tuple(then.step for then in earlier), rows)

    def _signatures(self, step: int, signatures: Sequence[Signature | None]) -> _DecisionSignatures:
        known = [one is not None and one.finite for one in signatures]
        rows = [_EMPTY if one is None or not one.finite else one.values for one in signatures]
        widest = torch.zeros(self._width, dtype=torch.float32, device="cpu")
        values = pad_sequence([widest, *rows], batch_first=True)[1:]
        return _DecisionSignatures(step, values, torch.tensor(known, dtype=torch.bool, device="cpu"), _squares(values))


def compared_with(number: int, anchors: int) -> list[int]:
    """Return the numbers, from 0, of the decisions that this one is compared with, newest first."""
    return sorted({((number >> j) - 1) << j for j in range(anchors) if number >> j}, reverse=True)


def _rows(now: _DecisionSignatures, then: _DecisionSignatures) -> torch.Tensor:
    known = now.known & then.known
    differences = map(torch.sub, torch.split(now.values, _ROWS), torch.split(then.values, _ROWS))
    distances = torch.cat(list(map(_squares, differences)))
    known_values = (torch.where(known, values, 0.0) for values in (distances, then.squared))
    return torch.stack([*known_values, (~known).to(torch.float64)], dim=1)


def _squares(values: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(values, dim=1, dtype=torch.float64)
    return norms.square()
