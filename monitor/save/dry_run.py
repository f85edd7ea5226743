"""Replace the saver under policy ``observe``: the same measurements and decisions, but nothing is written.

Decisions move drift references as if their saves were committed at once, so drift is as under the observed policy."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from monitor.adapters.module_tensors import dtype_name
from monitor.context import JobContext
from monitor.events import SaveBeginEvent
from monitor.ledger import new_version
from monitor.observe.units import LocalUnit
from monitor.save.torch_codecs import encoded_chunks, encoder_named, true_on
from monitor.types import Chosen, DecisionResult, SaveStatus
from policies.encodings import expected_bytes, expected_error
from store.encoding import encoding_named
from store.names import RAW, SaveId, Unit


class DryRunSaver:
    """Has the interface of :class:`monitor.save.saver.Saver`, and writes nothing."""

    def __init__(self, job: JobContext) -> None:
        self._group = job.group
        self._table = job.table
        self._meter = job.meter
        self._ledger = job.ledger
        self._listeners = job.listeners
        self.owner, self.in_progress = cast("object", None), False

    def take_dropped(self) -> tuple[Unit, ...]:
        return ()

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    reserve = prepare_buffers = finish_copies = resumed = measure_later = upkeep = flush = close = require_storable = (
        abandon
    ) = stepped = _nothing

    def claim_name(self, step: int) -> str | None: ...

    def settle(
        self, step: int, changed: bool, trouble: bool = False, propose: Callable[[], Chosen | None] = lambda: None
    ) -> SaveStatus:
        """Agree whether the ranks may decide. Collective."""
        del propose  # everything is measured first
        newest, oldest, any_changed, unsupported = self._group.all_reduce_max([step, -step, changed, trouble])
        self._listeners.on_settled({})
        skip = "disagree" if newest != -oldest else "unsupported" if unsupported else None
        return SaveStatus(skip, bool(any_changed))

    def begin(self, step: int, decided: DecisionResult, local: Mapping[Unit, LocalUnit], lent: Any) -> int:
        """Move references and versions as the commit would. Return the bytes that would be staged on this rank."""
        del lent  # there are no snapshots without saves
        first = self._ledger.commits == 0
        stats = {one.unit: one for one in decided.stats}
        for unit, choice in decided.saved.items():
            if unit in local:
                self._meter.reset(unit, [_decoded(tensor, choice.encoding) for tensor in local[unit].tensors])
            size, encoding, one = self._table.sizes[unit], choice.encoding or RAW, stats.get(unit)
            stored = size if one is None else replace(size, nbytes=int(expected_bytes(one, encoding)))
            error = 0.0 if one is None else expected_error(one, encoding)
            self._ledger.versions[unit] = new_version(
                unit, SaveId(step, 0), stored, choice.reason, encoding=encoding, error=error
            )
        self._ledger.commits += 1
        self._table.lost -= decided.saved.keys()
        if self._group.rank == 0:
            versions = [self._ledger.versions[unit] for unit in decided.saved]
            sizes = {one.unit: (one.nbytes, one.encoding, one.error, decided.drift.get(one.unit)) for one in versions}
            self._listeners.on_save_begin(SaveBeginEvent(step, decided, self._table.sizes, first, dry_run=sizes))
        return sum(local[unit].layout.nbytes for unit in decided.saved if unit in local)


def _decoded(tensor: torch.Tensor, encoding: str | None) -> torch.Tensor:
    known = encoding_named(encoding or RAW)
    if known.lossless or not known.applies(dtype_name(tensor.dtype)):
        return tensor
    encoder, values, held = encoder_named(known.name), tensor.detach(), true_on(tensor.device)
    decoded = torch.empty_like(values)
    for values_at, bytes_at in encoded_chunks(values.numel(), known.name):
        out = torch.empty(bytes_at.stop - bytes_at.start, dtype=torch.uint8, device=values.device)
        held &= encoder.encode(values[values_at], out)
        encoder.decode(out, decoded[values_at])
    return decoded if held else tensor
