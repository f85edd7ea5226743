"""Buffers, told apart by their bytes: a masked attention's infinities and a counter's last digit count alike.

Distance means little for them (masks, counters, running statistics), and a sketch would not see one counter move
beside a large mask. So they moved (1) or stand still (0). NaN makes a buffer sick; infinities do not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from monitor.drift.base import DriftMeter, Measure
from store.names import BUFFER, Unit


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
        """See :class:`monitor.drift.base.DriftMeter`."""
        return unit in self._references

    def measure(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> Measure:
        """moved_sq 1 where any byte differs, 0 where none does, each against a reference_sq of 1."""
        finite = not any(_has_nan(piece) for piece in pieces)
        reference = self._references.get(unit)
        if reference is None:
            return Measure(0.0, 0.0, finite)
        return Measure(float(_hash(pieces) != reference), 1.0, finite)

    def reset(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> None:
        """See :class:`monitor.drift.base.DriftMeter`."""
        self._references[unit] = _hash(pieces)

    def stage(self, unit: Unit, copies: Sequence[torch.Tensor]) -> None:
        """See :class:`monitor.drift.base.DriftMeter`."""
        if unit in self._staged:
            raise ValueError(f"{unit} is staged already")
        self._staged[unit] = list(copies)

    def settle(self, unit: Unit, committed: bool) -> list[torch.Tensor]:
        """See :class:`monitor.drift.base.DriftMeter`."""
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
        """See :class:`monitor.drift.base.DriftMeter`."""
        return self._of(unit).has_reference(unit)

    def measure(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> Measure:
        """See :class:`monitor.drift.base.DriftMeter`."""
        return self._of(unit).measure(unit, pieces)

    def reset(self, unit: Unit, pieces: Sequence[torch.Tensor]) -> None:
        """See :class:`monitor.drift.base.DriftMeter`."""
        self._of(unit).reset(unit, pieces)

    def stage(self, unit: Unit, copies: Sequence[torch.Tensor]) -> None:
        """See :class:`monitor.drift.base.DriftMeter`."""
        self._of(unit).stage(unit, copies)

    def settle(self, unit: Unit, committed: bool) -> list[torch.Tensor]:
        """See :class:`monitor.drift.base.DriftMeter`."""
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
