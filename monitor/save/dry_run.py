"""Observe mode: the same measurements and decisions, nothing written.

Stands where the saver stands. A decision takes effect on the references only, as if its save had been
committed at once, so that drift is what it would be under that policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from monitor.adapters.module_tensors import dtype_name
from monitor.context import JobContext
from monitor.events import SaveBeginEvent
from monitor.observe.units import LocalUnit, is_moving
from monitor.save.saver import SaveStatus
from monitor.save.torch_codecs import decode, encode
from monitor.types import DecisionResult, Sizes
from policies.encodings import expected_bytes, expected_error
from store.encoding import encoding_named
from store.names import RAW, Fragment, SaveId, Unit
from store.schema import UnitRecord


class DryRunSaver:
    """Pretends to save."""

    def __init__(self, job: JobContext) -> None:
        self._group = job.group
        self._table = job.table
        self._meter = job.meter
        self._ledger = job.ledger
        self._listeners = job.listeners

    def reserve(self, local: Mapping[Unit, LocalUnit]) -> None:
        """Nothing is staged, so nothing is reserved."""

    def lend(self, local: Mapping[Unit, LocalUnit]) -> Mapping[Fragment, torch.Tensor]:
        """Nothing is reserved."""
        del local
        return {}

    def keep(self, local: Mapping[Unit, LocalUnit], buffers: Mapping[Fragment, torch.Tensor]) -> None:
        """Nothing will be staged."""

    def copied(self) -> None:
        """Nothing is copied."""

    def went_back(self) -> None:
        """Nothing rests on what was saved before."""

    def settle(self, step: int, changed: bool, trouble: bool = False) -> SaveStatus:
        """Nothing is ever under way. Collective."""
        newest, oldest, any_changed, unsupported = self._group.all_reduce_max([step, -step, changed, trouble])
        self._listeners.on_settled({})
        skip = "disagree" if newest != -oldest else "unsupported" if unsupported else None
        return SaveStatus(skip, bool(any_changed))

    def claim_name(self, step: int) -> str | None:
        """Nothing gets a name."""

    def begin(self, step: int, decided: DecisionResult, local: Mapping[Unit, LocalUnit]) -> int:
        """Move references and versions as the commit would have. Returns the bytes that it would have copied here."""
        first = self._ledger.commits == 0
        shown = {one.unit: one for one in decided.stats}
        for unit, choice in decided.saved.items():
            if unit in local:
                self._meter.reset(unit, [_decoded(tensor, choice.encoding) for tensor in local[unit].tensors])
            size, encoding, one = self._table.sizes[unit], choice.encoding or RAW, shown.get(unit)
            self._ledger.versions[unit] = UnitRecord(
                layer=unit.layer,
                slot=unit.slot,
                save=SaveId(step, 0).name,
                encoding=encoding,
                numel=size.numel,
                nbytes=size.nbytes if one is None else int(expected_bytes(one, encoding)),
                drift=0.0,
                staleness=0,
                moving=is_moving(unit),
                reason=choice.reason,
                members=size.members,
                error=0.0 if one is None else expected_error(one, encoding),
            )
        self._ledger.commits += 1
        self._table.lost -= decided.saved.keys()
        if self._group.rank == 0:
            sizes = self._table.sizes
            self._listeners.on_save_begin(SaveBeginEvent(step, decided, sizes, first, dry_run=self._sizes(decided)))
        return sum(
            tensor.numel() * tensor.element_size()
            for unit in decided.saved
            if unit in local
            for tensor in local[unit].tensors
        )

    def _sizes(self, decided: DecisionResult) -> Sizes:
        """What the save would hold, as far as is known without packing anything."""
        versions = [self._ledger.versions[unit] for unit in decided.saved]
        return {one.unit: (one.nbytes, one.encoding, one.error, decided.drift.get(one.unit)) for one in versions}

    def upkeep(self, job: Callable[[], None], what: str) -> None:
        """Nothing is kept up."""

    failed = False

    def flush(self, timeout: float) -> None:
        """Nothing to wait for."""

    def close(self, timeout: float, clean: bool) -> None:
        """Nothing to let go of."""
        del timeout, clean


def _decoded(tensor: torch.Tensor, encoding: str | None) -> torch.Tensor:
    """What a resume would give back of the values; themselves where the encoding does not apply to them."""
    known = encoding_named(encoding or RAW)
    if known.lossless or not known.applies(dtype_name(tensor.dtype)):
        return tensor
    encoded, held = encode(tensor, known.name)
    return decode(encoded, known.name, torch.empty_like(tensor)) if held else tensor
