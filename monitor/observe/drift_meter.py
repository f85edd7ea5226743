"""DriftMeter protocol, Signature, buffer meter.

How far a unit has moved from what a resume would give back.

A meter serves two threads: the training thread measures live tensors, the background thread the copies of the save
under way; calls are serialised inside. It keeps, for every unit, a reference: enough of the newest committed
version to tell the distance to it. References move only when a save that holds the unit is committed.

Buffers, told apart by their bytes: a masked attention's infinities and a counter's last digit count alike.

Distance means little for them (masks, counters, running statistics), and a sketch would not see one counter move
beside a large mask. So they moved (1) or stand still (0). NaN makes a buffer sick; infinities do not.
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
    """What a meter keeps of the values of a unit on one rank. Distances between two of them, of one unit and by one
    meter, estimate those between the values.

    values: 1-d on the host, float32, or float64 where a small unit is kept as it is; never written to again.
    numels: sizes of the pieces it was taken of. finite: of the values, not of the signature.
    """

    values: torch.Tensor
    numels: tuple[int, ...]
    finite: bool

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
    """One unit on one rank; sums over ranks add up (``finite`` by logical and).

    moved_sq: squared L2 distance to the reference. reference_sq: squared L2 norm of the reference.
    finite: False where any value is NaN or infinite. Both squares are 0.0 where there is no reference.
    signature: of the values measured; None from a meter that takes none.
    """

    moved_sq: float
    reference_sq: float
    finite: bool
    signature: Signature | None = field(default=None, compare=False, repr=False)


def drift_ratio(moved_sq: float, reference_sq: float) -> float:
    """Relative distance ‖X − X̂‖ / ‖X̂‖ from squared norms summed over ranks. From zero: 1 if it moved at all."""
    if moved_sq <= 0.0:
        return 0.0
    if reference_sq <= 0.0:
        return 1.0
    return math.sqrt(moved_sq / reference_sq)


def measure_record(unit: Unit, measure: Measure) -> MeasureRecord:
    """Return a local measure as a part keeps it. A norm that is too large for a number counts as no distance."""
    known = measure.finite and math.isfinite(measure.moved_sq) and math.isfinite(measure.reference_sq)
    return MeasureRecord(
        layer=unit.layer,
        slot=unit.slot,
        moved_sq=measure.moved_sq if known else 0.0,
        reference_sq=measure.reference_sq if known else 0.0,
        finite=measure.finite,
    )


class DriftMeter(Protocol):
    """Measures units against their references. ``pieces`` are a unit's local 1-d tensors in a fixed order."""

    def measure(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> Measure:
        """Distance of the present values to the reference; remembers them for :meth:`settle`."""
        ...

    def has_reference(self, unit: Unit) -> bool:
        """Whether a committed version of the unit is known."""
        ...

    def reset(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> None:
        """The present values are the newest committed version (after a resume)."""
        ...

    def stage(self, unit: Unit, copies: Sequence[torch.Tensor]) -> None:
        """A save took ``copies`` (host memory, same values and order as the pieces) of the unit.

        The copies are not changed until the save is settled."""
        ...

    def settle(self, unit: Unit, committed: bool) -> list[torch.Tensor]:
        """The staged save of the unit was committed (its values become the reference) or failed.

        Returns the host tensors that the meter needs no longer: free for the next staging."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Bytes held for references."""
        ...


class BufferMeter:
    """A meter that compares bytes. Keeps 16 bytes a unit."""

    def __init__(self) -> None:
        self._references: dict[Unit, bytes] = {}
        self._staged: dict[Unit, list[torch.Tensor]] = {}

    @property
    def memory_bytes(self) -> int:
        """Bytes held for references."""
        return 16 * len(self._references)

    def has_reference(self, unit: Unit) -> bool:
        return unit in self._references

    def measure(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> Measure:
        """moved_sq 1 where any byte differs, 0 where none does, each against a reference_sq of 1."""
        finite = not any(_has_nan(piece) for piece in pieces)
        reference = self._references.get(unit)
        if reference is None:
            return Measure(0.0, 0.0, finite)
        return Measure(float(_hash(pieces) != reference), 1.0, finite)

    def reset(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> None:
        self._references[unit] = _hash(pieces)

    def stage(self, unit: Unit, copies: Sequence[torch.Tensor]) -> None:
        if unit in self._staged:
            raise ValueError(f"{unit} is staged already")
        self._staged[unit] = list(copies)

    def settle(self, unit: Unit, committed: bool) -> list[torch.Tensor]:
        if unit not in self._staged:
            raise ValueError(f"{unit} is not staged")
        copies = self._staged.pop(unit)
        if committed:
            self._references[unit] = _hash(copies)
        return copies


class BySlotMeter:
    """Buffers to one meter, everything else to another."""

    def __init__(self, state: DriftMeter) -> None:
        self._state = state
        self._buffers = BufferMeter()

    @property
    def memory_bytes(self) -> int:
        """Bytes held for references."""
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


def _has_nan(piece: torch.Tensor) -> bool:
    return bool((piece.is_floating_point() or piece.is_complex()) and piece.isnan().any())
