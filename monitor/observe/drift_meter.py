"""Measure how far a unit has moved from its newest committed version.

A meter keeps a reference per unit: enough of the newest committed version to compute the distance to it. References
change only when a save that holds the unit is committed. Two threads use a meter: the training thread measures live
tensors, the background thread the copies of the save in progress; calls are serialized inside."""

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import torch
import xxhash

from monitor.adapters.frozen import fingerprint
from store.names import BUFFER, FROZEN, Unit
from store.schema import MeasureRecord


@dataclass(frozen=True)
class Signature:
    """A summary of a unit's values on one rank.

    The distance between two signatures of one unit by one meter estimates the distance between the values."""

    values: torch.Tensor
    """1-d on the host; float32, or float64 for a small unit that is kept as it is. Never written to again."""
    numels: tuple[int, ...]  # sizes of the pieces
    finite: bool  # whether all values of the unit are finite, not those of the signature

    @cached_property
    def squared(self) -> float:
        """Squared L2 norm."""
        exact = self.values.to(torch.float64)
        return float(torch.dot(exact, exact))


@dataclass(frozen=True)
class Measure:
    """Measurement of one unit on one rank; add the squares over ranks, and combine ``finite`` by logical and.

    Both squares are 0.0 without a reference."""

    moved_sq: float  # squared L2 distance to the reference
    reference_sq: float  # squared L2 norm of the reference
    finite: bool  # False if any value is NaN or infinite
    signature: Signature | None = field(default=None, compare=False, repr=False)  # of the values; None of buffers


def drift_ratio(moved_sq: float, reference_sq: float) -> float:
    """Return ‖X − X̂‖ / ‖X̂‖ from squared norms summed over ranks. With a zero reference: 1 if X moved at all."""
    return 0.0 if moved_sq <= 0.0 else 1.0 if reference_sq <= 0.0 else math.sqrt(moved_sq / reference_sq)


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

    def measure_many(self, units: Mapping[Unit, Sequence[torch.Tensor]]) -> dict[Unit, Measure]:
        """Measure many units in few kernels, if possible. Units missing in the result need :meth:`measure`."""
        del units
        return {}

    def reset(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> None:
        """Make the current values the reference (after a resume)."""

    def stage(self, unit: Unit, copies: Sequence[torch.Tensor]) -> None:
        """Register the copies that a save took of the unit (host memory, same values and order as the pieces).

        The caller must not change them until :meth:`settle`. Raises ValueError if the unit is staged already."""

    def settle(self, committed: Mapping[Unit, bool]) -> None:
        """Make the staged values of units the reference if their save was committed, and drop them if it failed.

        Raises ValueError, before it changes any, if a unit is not staged."""


R = TypeVar("R")


class StagingMeter(DriftMeter, ABC, Generic[R]):
    """Base of meters: keeps a reference of type R and the staged copies of each unit. Thread-safe."""

    def __init__(self) -> None:
        self._references: dict[Unit, R] = {}
        self._staged: dict[Unit, Sequence[torch.Tensor]] = {}
        self._lock = threading.RLock()

    def reset(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> None:
        with self._lock:
            self._references[unit] = self._reference_of(unit, pieces)

    def stage(self, unit: Unit, copies: Sequence[torch.Tensor]) -> None:
        with self._lock:
            if unit in self._staged:
                raise ValueError(f"{unit} is already staged; settle that save before staging another one")
            self._staged[unit] = copies

    def settle(self, committed: Mapping[Unit, bool]) -> None:
        with self._lock:
            for unit in committed.keys() - self._staged.keys():
                raise ValueError(f"{unit} is not staged; call stage() before settle()")
            staged = {unit: self._staged.pop(unit) for unit in committed}  # all at once: an error below leaves none
            for unit in filter(committed.get, committed):
                self._references[unit] = self._staged_reference(unit, staged[unit])

    def _staged_reference(self, unit: Unit, copies: Sequence[torch.Tensor]) -> R:
        return self._reference_of(unit, copies)

    @abstractmethod
    def _reference_of(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> R:
        """Return a reference for the values of ``pieces``, which shares no memory with them."""


class BufferMeter(StagingMeter[bytes]):
    """Compares buffers by their bytes: moved (1) or not (0). Keeps 16 bytes per unit.

    Distances mean little for buffers (masks, counters, running statistics), and a sketch would not see one counter
    change beside a large mask. Only NaN makes a buffer not finite; a mask's infinities do not."""

    def measure(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> Measure:
        finite = not any(bool(piece.isnan().any()) for piece in pieces if piece.is_floating_point())
        reference = self._references.get(unit)
        if reference is None:
            return Measure(0.0, 0.0, finite)
        return Measure(float(_hash(pieces) != reference), 1.0, finite)

    def _reference_of(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> bytes:  # noqa: ARG002 - for other meters
        return _hash(pieces)


_LEAST = 2.0**-48
"""Least squared relative drift of a frozen unit that changed: 0 would mean that its version is still valid."""

_TINY = 1e-300

_Fingerprint = tuple[int | bytes, ...]  # one for each piece


class FrozenMeter(DriftMeter):
    """Detects every change of frozen weights, even of one bit in one element, which a sketch of many values misses.

    A unit with its committed version's fingerprints has drift 0; ``meter`` measures the others. A version staged
    unmeasured counts as changed. Reads all values every time: writes through ``.data`` leave no other trace."""

    def __init__(self, meter: DriftMeter) -> None:
        self._meter = meter
        self._measured: dict[Unit, _Fingerprint] = {}
        self._staged: dict[Unit, _Fingerprint | None] = {}
        self._references: dict[Unit, _Fingerprint | None] = {}
        self._unchanged: dict[Unit, Measure] = {}

    def measure(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> Measure:
        present = self._measured[unit] = _fingerprints(pieces)
        equal = present == self._references.get(unit)
        if equal and unit in self._unchanged:
            return self._unchanged[unit]
        measure = self._meter.measure(unit, pieces)
        if equal:
            self._unchanged[unit] = replace(measure, moved_sq=0.0)
            return self._unchanged[unit]
        if unit not in self._references:
            return measure
        return replace(measure, moved_sq=max(measure.moved_sq, _LEAST * measure.reference_sq, _TINY))

    def reset(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> None:
        self._set_reference(unit, _fingerprints(pieces))
        self._meter.reset(unit, pieces)

    def stage(self, unit: Unit, copies: Sequence[torch.Tensor]) -> None:
        self._meter.stage(unit, copies)
        self._staged[unit] = self._measured.pop(unit, None)

    def settle(self, committed: Mapping[Unit, bool]) -> None:
        staged = {unit: self._staged.pop(unit, None) for unit in committed}
        for unit in filter(committed.get, committed):  # before the call that may fail: an old one would hide a change
            self._set_reference(unit, staged[unit])
        self._meter.settle(committed)

    def _set_reference(self, unit: Unit, fingerprint: _Fingerprint | None) -> None:
        self._references[unit] = fingerprint
        self._unchanged.pop(unit, None)


class BySlotMeter:
    """Measures buffers with a :class:`BufferMeter`, other units with ``state``, frozen ones through a
    :class:`FrozenMeter`. Complex values are measured as pairs of real ones."""

    def __init__(self, state: DriftMeter) -> None:
        self._state = state
        self._buffers = BufferMeter()
        self._frozen = FrozenMeter(state)

    def measure_many(self, units: Mapping[Unit, Sequence[torch.Tensor]]) -> dict[Unit, Measure]:
        return self._state.measure_many({u: _real(pieces) for u, pieces in units.items() if self._of(u) is self._state})

    def measure(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> Measure:
        return self._of(unit).measure(unit, _real(pieces))

    def reset(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> None:
        self._of(unit).reset(unit, _real(pieces))

    def stage(self, unit: Unit, copies: Sequence[torch.Tensor]) -> None:
        self._of(unit).stage(unit, _real(copies))

    def settle(self, committed: Mapping[Unit, bool]) -> None:
        still = {unit: moved for unit, moved in committed.items() if unit.slot in (BUFFER, FROZEN)}
        self._state.settle({unit: moved for unit, moved in committed.items() if unit not in still})
        for meter in (self._buffers, self._frozen):
            meter.settle({unit: moved for unit, moved in still.items() if self._of(unit) is meter})

    def _of(self, unit: Unit) -> DriftMeter:
        return self._buffers if unit.slot == BUFFER else self._frozen if unit.slot == FROZEN else self._state


def _real(pieces: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    if not any(map(torch.is_complex, pieces)):
        return pieces
    return [torch.view_as_real(one.detach()).view(-1) if one.is_complex() else one for one in pieces]


def _fingerprints(pieces: Sequence[torch.Tensor]) -> _Fingerprint:
    """Return a hash of each piece: xxh3 on the host, elsewhere one that the device can compute."""
    return tuple(_hash([piece]) if piece.device.type == "cpu" else fingerprint(_wide(piece), 0) for piece in pieces)


def _wide(piece: torch.Tensor) -> torch.Tensor:
    """View a piece as 8-byte words, of which there are fewer to hash, if its size and offset allow that."""
    whole = all(count * piece.element_size() % 8 == 0 for count in (piece.numel(), piece.storage_offset()))
    return piece.view(torch.int64) if whole else piece


def _hash(pieces: Sequence[torch.Tensor]) -> bytes:
    state = xxhash.xxh3_128()
    for piece in pieces:
        if piece.numel():
            state.update(piece.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return state.digest()
