"""The exact drift meter: compares with a whole copy of the committed state, in host memory.

The copy costs nothing extra where saves are staged anyway: once a save is committed, its staged tensors
become the reference as they are, and the tensors of the old reference are handed back for the next staging.

Threads: any, one at a time, held by a lock: a thread that carries out a save may measure and stage its copies
while the training thread measures live pieces. It does not know steps, files, or why a unit is saved.

Every tensor that comes in through :meth:`ExactMeter.stage` goes out through :meth:`ExactMeter.settle` exactly
once, at this save or at a later one: the caller's staging memory never grows.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch

from monitor.observe.drift_meter import Measure
from store.names import Unit

_CHUNK = 1 << 17
"""Elements compared at a time: two float64 buffers of 1 MiB, small enough to stay in the cache."""


class ExactMeter:
    """Distances in float64 against a full copy. Agrees with a float64 computation to 1e-6 and better.

    Pieces may be of any real dtype and on any device; what lies on an accelerator is read through the host,
    which is slow: the sketch is made for that case.
    """

    def __init__(self) -> None:
        self._references: dict[Unit, list[torch.Tensor]] = {}
        self._staged: dict[Unit, list[torch.Tensor]] = {}
        self._lock = threading.RLock()
        self._present = torch.empty(_CHUNK, dtype=torch.float64)
        self._past = torch.empty(_CHUNK, dtype=torch.float64)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the reference copies."""
        return sum(t.numel() * t.element_size() for copies in self._references.values() for t in copies)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of working memory, whatever the number of units."""
        return 2 * _CHUNK * 8

    def has_reference(self, unit: Unit) -> bool:
        """Whether a committed version of the unit is known."""
        return unit in self._references

    def measure(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> Measure:
        """Distance to the reference.

        Where values are not finite, ``moved_sq`` is inf if there is a reference; where those of the reference
        are not, ``reference_sq`` is 0.0 as well.

        Raises ValueError if the pieces have other sizes than those of the reference.
        """
        with self._lock:
            references = self._references.get(unit)
            if references is None:
                return Measure(0.0, 0.0, all(_all_finite(piece) for piece in pieces))
            _check_sizes(unit, pieces, references)
            moved_sq, reference_sq = self._compared(pieces, references)
        # A value that is not finite makes the sum so; the reverse may be a float64 overflow.
        if math.isfinite(moved_sq + reference_sq):
            return Measure(moved_sq, reference_sq, True)
        finite = all(_all_finite(piece) for piece in pieces)
        return Measure(math.inf, reference_sq if math.isfinite(reference_sq) else 0.0, finite)

    def reset(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> None:
        """Copy the present values: they are the newest committed version."""
        copies = [piece.detach().to("cpu", copy=True) for piece in pieces]
        with self._lock:
            self._references[unit] = copies

    def stage(self, unit: Unit, copies: Sequence[torch.Tensor]) -> None:
        """Keep hold of a save's copies until it is settled. Raises ValueError if one is unsettled already."""
        with self._lock:
            if unit in self._staged:
                raise ValueError(f"{unit} is staged already; settle that save before staging another one")
            self._staged[unit] = list(copies)

    def settle(self, unit: Unit, committed: bool) -> list[torch.Tensor]:
        """Move the reference if committed; return the tensors that are free now.

        Raises ValueError if the unit is not staged.
        """
        with self._lock:
            if unit not in self._staged:
                raise ValueError(f"{unit} is not staged; only what was staged can be settled")
            copies = self._staged.pop(unit)
            if not committed:
                return copies
            freed = self._references.get(unit, [])
            self._references[unit] = copies
            return freed

    def _compared(self, pieces: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> tuple[float, float]:
        moved_sq = reference_sq = 0.0
        with torch.no_grad():
            for piece, reference in zip(pieces, references, strict=True):
                for now, then in zip(torch.split(piece, _CHUNK), torch.split(reference, _CHUNK), strict=True):
                    moved, size = self._compare(now, then)
                    moved_sq += moved
                    reference_sq += size
        return moved_sq, reference_sq

    def _compare(self, now: torch.Tensor, then: torch.Tensor) -> tuple[float, float]:
        """Squared distance and squared reference norm of at most a chunk of elements."""
        present = self._present[: now.numel()].copy_(now)
        past = self._past[: now.numel()].copy_(then)
        size = torch.dot(past, past)
        present.sub_(past)
        return float(torch.dot(present, present)), float(size)


def _all_finite(piece: torch.Tensor) -> bool:
    with torch.no_grad():
        return all(bool(torch.isfinite(chunk).all()) for chunk in torch.split(piece, _CHUNK))


def _check_sizes(unit: Unit, pieces: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> None:
    present = [piece.numel() for piece in pieces]
    past = [reference.numel() for reference in references]
    if present != past:
        raise ValueError(f"the pieces of {unit} have {present} elements, its reference {past}; reset the unit first")
