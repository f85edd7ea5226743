"""The sketching drift meter: a signature of a few thousand values a unit stands for the committed state.

Memory does not grow with the model; a measurement is one pass over the values at about the speed of a copy.
The mathematics is in :mod:`monitor.drift.projection`; here is what is remembered when. Signatures compare within
one meter only: they are not saved or sent.

Which signature a save gets: that of the last measurement of the unit by the thread that stages it, if there is
one that no earlier save used up; else one computed from the copies. :meth:`SketchMeter.stage` does not read the
copies, which may still be filling; :meth:`SketchMeter.settle` does, once the save is committed, and then also
compares a sample of at most 64 values, spread over the unit, to the bit. If they differ, the state moved between
measuring and copying (an optimizer step changes all of them), and the signature is computed from the copies. A
change that leaves the whole sample alone (a few rows of an embedding) goes unnoticed; so measure a unit in the
step in which it is staged, and nothing rests on the sample.

Threads: any, one at a time, held by a lock. The training thread measures live pieces; a thread that carries out a
save may measure and stage its copies meanwhile, and neither takes the other's measurement.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from monitor.drift.base import Measure, Signature
from monitor.drift.projection import Projection
from store.names import Unit

_SAMPLED_PIECES = 4
_SAMPLED_VALUES = 16


@dataclass(frozen=True)
class _Measured:
    """A signature, and a sample of the values it was taken of."""

    signature: Signature
    sample: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.signature.nbytes + self.sample.numel() * self.sample.element_size()


@dataclass(frozen=True)
class _Pending:
    """A save under way. measured: what the last measurement found, None where there was none to use."""

    copies: list[torch.Tensor]
    measured: _Measured | None


class SketchMeter:
    """Estimates distances within about 1.2 % (one standard deviation, width 4099), for any kind of change.

    A unit of at most ``width`` values is kept whole and measured exactly. Float64 and integer values count
    with float32 precision in larger units. Memory: 4 bytes * width a signature (:attr:`memory_bytes`), tables
    and accumulators once a device (:attr:`scratch_bytes`). Raises ConfigError for a width below 64.
    """

    def __init__(self, width: int = 4099, seed: int = 0) -> None:
        self._projection = Projection(width, seed)
        self._chunk_lengths: dict[Unit, int] = {}
        self._references: dict[Unit, Signature] = {}
        self._measured: dict[tuple[int, Unit], _Measured] = {}
        """By thread and unit."""
        self._pending: dict[Unit, _Pending] = {}
        self._lock = threading.RLock()

    @property
    def memory_bytes(self) -> int:
        """Bytes of all signatures held: references, last measurements, saves under way."""
        with self._lock:
            measured = [*self._measured.values(), *(pending.measured for pending in self._pending.values())]
            known = sum(found.nbytes for found in measured if found is not None)
            return known + sum(signature.nbytes for signature in self._references.values())

    @property
    def scratch_bytes(self) -> int:
        """Bytes of working memory, whatever the number of units."""
        return self._projection.scratch_bytes

    def has_reference(self, unit: Unit) -> bool:
        """Whether a committed version of the unit is known."""
        return unit in self._references

    def measure(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> Measure:
        """Estimated distance to the reference.

        Where values are not finite, or too large for a float32 sum, ``moved_sq`` is inf if there is a
        reference; where those of the reference are, ``reference_sq`` is 0.0 as well.

        Raises ValueError if the pieces have other sizes than those of the reference.
        """
        with self._lock:
            signature = self._signature(unit, pieces)
            self._measured[threading.get_ident(), unit] = _Measured(signature, _sample(pieces))
            reference = self._references.get(unit)
        if reference is None:
            return Measure(0.0, 0.0, signature.finite, signature)
        if reference.numels != signature.numels:
            raise ValueError(
                f"the pieces of {unit} have {signature.numels} elements, its reference {reference.numels}; "
                "reset the unit first"
            )
        moved_sq = _squared(signature.values.to(torch.float64) - reference.values)
        return Measure(_or(math.inf, moved_sq), _or(0.0, reference.squared), signature.finite, signature)

    def reset(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> None:
        """Take the signature of the present values: they are the newest committed version."""
        with self._lock:
            self._measured.pop((threading.get_ident(), unit), None)
            self._references[unit] = self._signature(unit, pieces)

    def stage(self, unit: Unit, copies: Sequence[torch.Tensor]) -> None:
        """Note a save's copies, and which signature is theirs by the rule at the top of this module.

        Raises ValueError if an earlier save of the unit is unsettled.
        """
        with self._lock:
            if unit in self._pending:
                raise ValueError(f"{unit} is staged already; settle that save before staging another one")
            measured = self._measured.pop((threading.get_ident(), unit), None)
            self._pending[unit] = _Pending(list(copies), measured)

    def settle(self, unit: Unit, committed: bool) -> list[torch.Tensor]:
        """Move the reference if committed. Returns the copies that were staged: the meter keeps none.

        Raises ValueError if the unit is not staged.
        """
        with self._lock:
            pending = self._pending.pop(unit, None)
            if pending is None:
                raise ValueError(f"{unit} is not staged; only what was staged can be settled")
            if committed:
                self._references[unit] = self._signature_of(unit, pending)
            return pending.copies

    def _signature_of(self, unit: Unit, pending: _Pending) -> Signature:
        measured = pending.measured
        if measured is not None and torch.equal(measured.sample, _sample(pending.copies)):
            return measured.signature
        return self._signature(unit, pending.copies)

    def _signature(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> Signature:
        numels = tuple(piece.numel() for piece in pieces)
        if sum(numels) <= self._projection.width:
            values = _kept_whole(pieces)
        else:
            length = self._chunk_lengths.get(unit)
            if length is None:
                length = self._projection.chunk_length(sum(numels), pieces[0].device)
                self._chunk_lengths[unit] = length
            # Another key for each unit, so that their errors do not all point one way.
            values = self._projection.project(pieces, length, zlib.crc32(str(unit).encode()))
        # What is not finite makes the signature so. The reverse may be an overflow: only then look closer.
        finite = bool(torch.isfinite(values).all()) or all(_all_finite(piece) for piece in pieces)
        return Signature(values, numels, finite)


def _kept_whole(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """All values in one host tensor: float32 where that loses nothing, else float64."""
    narrow = all(piece.dtype in (torch.float32, torch.bfloat16, torch.float16) for piece in pieces)
    dtype = torch.float32 if narrow else torch.float64
    # cat copies even a single part: the values must not change with the state.
    return torch.cat([torch.empty(0, dtype=dtype), *(piece.detach().to("cpu", dtype) for piece in pieces)])


def _sample(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Some values, float64 on the host, at places that depend on the sizes of the pieces only."""
    return torch.cat([torch.empty(0, dtype=torch.float64), *_sampled(pieces)])


def _sampled(pieces: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    for piece in sorted(pieces, key=torch.numel, reverse=True)[:_SAMPLED_PIECES]:
        if piece.numel():
            stride = -(-piece.numel() // _SAMPLED_VALUES)
            yield piece.detach()[::stride].to("cpu", torch.float64)


def _squared(values: torch.Tensor) -> float:
    exact = values.to(torch.float64)
    return float(torch.dot(exact, exact))


def _or(fallback: float, square: float) -> float:
    """The square, where it is a finite number."""
    return square if math.isfinite(square) else fallback


def _all_finite(piece: torch.Tensor) -> bool:
    with torch.no_grad():
        return all(bool(torch.isfinite(chunk).all()) for chunk in torch.split(piece, 1 << 20))
