"""Measure how far a unit has moved from its newest committed version.

A meter keeps a reference per unit: enough of the newest committed version to compute the distance to it. References
change only when a save that holds the unit is committed. Two threads use a meter: the training thread measures live
tensors, the background thread the copies of the save in progress; calls are serialized inside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import xxhash

from store.names import BUFFER, Unit
from store.schema import MeasureRecord


@dataclass(frozen=True)
class Signature:
    """A summary of a unit's values on one rank.

    The distance between two signatures of one unit by one meter estimates the distance between the values.
    """

    values: torch.Tensor
    """1-d on the host; float32, or float64 for a small unit that is kept as it is. Never written to again."""
    numels: tuple[int, ...]
    """Sizes of the pieces."""
    finite: bool
    """Whether all values of the unit are finite, not those of the signature."""

    @property
    def squared(self) -> float:
        """Squared L2 norm."""
        exact = self.values.to(torch.float64)
        return float(torch.dot(exact, exact))

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self.values.numel() * self.values.element_size()


@dataclass(frozen=True)
class Measure:
    """Measurement of one unit on one rank; add the squares over ranks, and combine ``finite`` by logical and.

    Both squares are 0.0 without a reference.
    """

    moved_sq: float
    """Squared L2 distance to the reference."""
    reference_sq: float
    """Squared L2 norm of the reference."""
    finite: bool
    """False if any value is NaN or infinite."""
    signature: Signature | None = field(default=None, compare=False, repr=False)
    """Signature of the measured values; None from a meter without signatures."""


def drift_ratio(moved_sq: float, reference_sq: float) -> float:
    """Return ‖X − X̂‖ / ‖X̂‖ from squared norms summed over ranks. With a zero reference: 1 if X moved at all."""
    if moved_sq <= 0.0:
        return 0.0
    if reference_sq <= 0.0:
        return 1.0
    return math.sqrt(moved_sq / reference_sq)


def measure_record(unit: Unit, measure: Measure) -> MeasureRecord:
    """Return the record of a local measure in a save part. A norm that overflows counts as no distance."""
    known = measure.finite and math.isfinite(measure.moved_sq) and math.isfinite(measure.reference_sq)
    return MeasureRecord(
        layer=unit.layer,
        slot=unit.slot,
        moved_sq=measure.moved_sq if known else 0.0,
        reference_sq=measure.reference_sq if known else 0.0,
        finite=measure.finite,
    )


def all_finite(pieces: Sequence[torch.Tensor]) -> bool:
    """Return whether all values are finite. Looks at 2**20 values at a time, to bound the memory it takes."""
    with torch.no_grad():
        return all(bool(torch.isfinite(chunk).all()) for piece in pieces for chunk in torch.split(piece, 1 << 20))


class DriftMeter(Protocol):
    """Measures units against their references. ``pieces`` are a unit's local 1-d tensors in a fixed order."""

    def measure(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> Measure:
        """Measure the distance of the current values to the reference, and keep what :meth:`settle` needs of them."""
        ...

    def has_reference(self, unit: Unit) -> bool:
        """Return whether a committed version of the unit is known."""
        ...

    def reset(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> None:
        """Make the current values the reference (after a resume)."""
        ...

    def stage(self, unit: Unit, copies: Sequence[torch.Tensor]) -> None:
        """Note the copies that a save took of the unit (host memory, same values and order as the pieces).

        The caller does not change them until the save is settled."""
        ...

    def settle(self, unit: Unit, committed: bool) -> list[torch.Tensor]:
        """Make the staged values the reference if the save was committed, and drop them if it failed.

        Returns the host tensors that the meter no longer needs, for the next staging."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Bytes held for references."""
        ...


class BufferMeter:
    """Compares buffers by their bytes: moved (1) or not (0). Keeps 16 bytes per unit.

    Distances mean little for buffers (masks, counters, running statistics), and a sketch would not see one counter
    change beside a large mask. Only NaN makes a buffer not finite; a mask's infinities do not.
    """

    def __init__(self) -> None:
        self._references: dict[Unit, bytes] = {}
        self._staged: dict[Unit, list[torch.Tensor]] = {}

    @property
    def memory_bytes(self) -> int:
        return 16 * len(self._references)

    def has_reference(self, unit: Unit) -> bool:
        return unit in self._references

    def measure(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> Measure:
        floats = (piece for piece in pieces if piece.is_floating_point() or piece.is_complex())
        finite = not any(bool(piece.isnan().any()) for piece in floats)
        reference = self._references.get(unit)
        if reference is None:
            return Measure(0.0, 0.0, finite)
        return Measure(float(_hash(pieces) != reference), 1.0, finite)

    def reset(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> None:
        self._references[unit] = _hash(pieces)

    def stage(self, unit: Unit, copies: Sequence[torch.Tensor]) -> None:
        if unit in self._staged:
            raise ValueError(f"{unit} is already staged; settle that save before staging another one")
        self._staged[unit] = list(copies)

    def settle(self, unit: Unit, committed: bool) -> list[torch.Tensor]:
        if unit not in self._staged:
            raise ValueError(f"{unit} is not staged; call stage() before settle()")
        copies = self._staged.pop(unit)
        if committed:
            self._references[unit] = _hash(copies)
        return copies


class BySlotMeter:
    """Measures buffers with a :class:`BufferMeter` and other units with ``state``."""

    def __init__(self, state: DriftMeter) -> None:
        self._state = state
        self._buffers = BufferMeter()

    @property
    def memory_bytes(self) -> int:
        return self._state.memory_bytes + self._buffers.memory_bytes

    def has_reference(self, unit: Unit) -> bool:
        return self._of(unit).has_reference(unit)

    def measure(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> Measure:
        return self._of(unit).measure(unit, pieces)

    def reset(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> None:
        self._of(unit).reset(unit, pieces)

    def stage(self, unit: Unit, copies: Sequence[torch.Tensor]) -> None:
        self._of(unit).stage(unit, copies)

    def settle(self, unit: Unit, committed: bool) -> list[torch.Tensor]:
        return self._of(unit).settle(unit, committed)

    def _of(self, unit: Unit) -> DriftMeter:
        return self._buffers if unit.slot == BUFFER else self._state


def _hash(pieces: Sequence[torch.Tensor]) -> bytes:
    state = xxhash.xxh3_128()
    for piece in pieces:
        if piece.numel():
            state.update(piece.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return state.digest()
