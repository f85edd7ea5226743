"""Staging, unit by unit: which memory a unit is copied into, and whether it is encoded on the way.

Training thread only. It does not know when copies are finished (:class:`monitor.staging.Copying`) nor why a unit is
saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from monitor.drift.base import DriftMeter, Measure, measure_record
from monitor.dtypes import dtype_name
from monitor.encoded_copy import EncodedCopy
from monitor.save import StagedUnit
from monitor.staging import Copying, StagingPool
from monitor.units import LocalUnit
from store.encoding import encoding_named
from store.names import BUFFER, FROZEN, Fragment, Unit


class Stager:
    """Takes memory from a pool for each save, and gives it back. encode: as in the configuration."""

    def __init__(self, meter: DriftMeter, encode: Literal["staging", "saving"]) -> None:
        self._meter = meter
        self._encode = encode
        self._pool = StagingPool()

    def reserve(self, local: Mapping[Unit, LocalUnit]) -> None:
        """Make room for a full save now, so that the first one does not pay for it in the training loop."""
        for unit, part in local.items():
            self._pool.reserve(unit, part.tensors)

    def lend(self, local: Mapping[Unit, LocalUnit]) -> Mapping[Fragment, torch.Tensor]:
        """The memory reserved for staging, for a resume to read into: fresh memory costs more than the read."""
        return {
            piece.fragment: buffer
            for unit, part in local.items()
            for piece, buffer in zip(part.pieces, self._pool.take(unit, part.tensors), strict=True)
        }

    def keep(self, local: Mapping[Unit, LocalUnit], buffers: Mapping[Fragment, torch.Tensor]) -> None:
        """Memory that a resume read into, for staging what is live now."""
        for unit, part in local.items():
            found = [buffers.get(piece.fragment) for piece in part.pieces]
            self._pool.keep(unit, part.tensors, [buffer for buffer in found if buffer is not None])

    def stage(self, part: LocalUnit, encoding: str, measure: Measure | None, copying: Copying) -> StagedUnit:
        """Have a unit copied by ``copying``. measure: of the live tensors, where it was taken already."""
        copies = self._pool.take(part.unit, part.tensors)
        if self._encodes_now(part, encoding):
            # Nobody sees the values again: what is to be known of them is measured where they are.
            measure = measure or self._meter.measure(part.unit, part.tensors)
            if measure.finite:
                return self._encoded(part, encoding, copies, measure, copying)
        if part.unit.slot in (BUFFER, FROZEN):  # a forward may change buffers, and scripts reach frozen weights
            now = Copying()
            now.add(part.tensors, copies)
            now.start()
            now.finish()
        else:
            copying.add(part.tensors, copies)
        return StagedUnit(
            unit=part.unit,
            encoding=encoding,
            fragments=tuple(piece.fragment for piece in part.pieces),
            copies=tuple(copies),
            measure=None if measure is None else measure_record(part.unit, measure),
            signature=None if measure is None else measure.signature,
        )

    def unstage(self, unit: StagedUnit, copies: Sequence[torch.Tensor]) -> None:
        """A save is over. copies: what nobody needs any more of the unit's memory."""
        if unit.encoded:
            self._pool.give_bytes(unit.unit, [copy.encoded for copy in unit.encoded])
        self._pool.give(unit.unit, copies)

    def _encodes_now(self, part: LocalUnit, encoding: str) -> bool:
        """Whether to encode while staging. It leaves less to copy, and takes the time of whoever copies."""
        known = encoding_named(encoding)
        applies = all(known.applies(dtype_name(tensor.dtype)) for tensor in part.tensors)
        return self._encode == "staging" and applies and not known.lossless

    def _encoded(
        self, part: LocalUnit, encoding: str, copies: list[torch.Tensor], measure: Measure, copying: Copying
    ) -> StagedUnit:
        sizes = [encoding_named(encoding).stored_bytes(tensor.numel(), "F32") for tensor in part.tensors]
        room = self._pool.take_bytes(part.unit, sizes, pinned=any(tensor.is_cuda for tensor in part.tensors))
        encoded = tuple(
            EncodedCopy(tensor, encoding, place, copy)
            for tensor, place, copy in zip(part.tensors, room, copies, strict=True)
        )
        copying.add_encoded(encoded)
        fragments = tuple(piece.fragment for piece in part.pieces)
        record = measure_record(part.unit, measure)
        return StagedUnit(part.unit, encoding, fragments, tuple(copies), record, encoded, measure.signature)


def encoded_bytes(unit: StagedUnit) -> int:
    """Bytes of a unit on this rank once encoded, before packing."""
    encoding = encoding_named(unit.encoding)
    return sum(
        encoding.stored_bytes(copy.numel(), dtype_name(copy.dtype))
        if encoding.applies(dtype_name(copy.dtype))
        else copy.numel() * copy.element_size()
        for copy in unit.copies
    )
