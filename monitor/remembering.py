"""One version in memory on one rank: where each fragment goes, and what the background thread does once it is copied.

The training thread lays a version out and starts its copies; the background thread waits for them, looks for values
that are not finite, hashes what is there and writes the record. Nothing here knows whether other ranks have theirs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monitor.dtypes import dtype_name
from monitor.staging import Copying, as_bytes
from monitor.units import LocalUnit
from store.errors import SaveError
from store.memory.arena import Arena
from store.memory.record import READER, VersionRecord
from store.names import BUFFER, RAW, Fragment, SaveId, Unit
from store.record import digest
from store.schema import Entry, ManifestRecord, PartRecord, StateTensor
from store.tree import Leaf

_ALIGN = 64


@dataclass(frozen=True)
class Laid:
    """A fragment's place in the payload. copy: 1-d view of the payload, of the live dtype."""

    unit: Unit
    fragment: Fragment
    offset: int
    copy: torch.Tensor


@dataclass(frozen=True)
class RunState:
    """As :func:`monitor.run_state.to_tree` gives it."""

    tree: Any
    leaves: Sequence[Leaf]

    @property
    def nbytes(self) -> int:
        """Of the leaves."""
        return sum(len(leaf.data) for leaf in self.leaves)


@dataclass(frozen=True)
class Version:
    """All of one version on one rank, staged: only the copies may still be under way.

    fragments_end: bytes of the payload that fragments take; the run state's tensors follow."""

    arena: Arena
    slot: int
    save: SaveId
    store_id: str
    rank: int
    world_size: int
    plan: str
    laid: Sequence[Laid]
    fragments_end: int
    run: RunState
    facts: Mapping[str, Any]
    head: ManifestRecord | None
    copying: Copying


def fragments_bytes(local: Mapping[Unit, LocalUnit]) -> int:
    """Bytes of a payload that the fragments take."""
    return _end(list(_placed(local)))


def lay_out(local: Mapping[Unit, LocalUnit], room: Callable[[int], Any], more: int) -> tuple[list[Laid], int]:
    """Places for every fragment in ``room(bytes)``, a buffer with ``more`` bytes behind them; and where they end."""
    placed = list(_placed(local))
    end = _end(placed)
    memory = room(end + more)
    laid = []
    for unit, fragment, tensor, offset in placed:
        view = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        laid.append(Laid(unit, fragment, offset, view))
    return laid, end


def remember(version: Version) -> float:
    """Make the version whole: wait for the copies, check, hash, write its record. Seconds that it took.

    Whatever it raises means that there is no version here. SaveError where values are not finite, or were changed
    while they were copied; StorageError where memory refuses."""
    began = time.monotonic()
    version.copying.finish()
    version.copying.require_whole()
    for one in version.laid:
        _require_finite(one)
    entries = tuple(_entry(one) for one in version.laid)
    tensors, end = _write_leaves(version)
    part = PartRecord(
        store_id=version.store_id,
        step=version.save.step,
        epoch=version.save.epoch,
        rank=version.rank,
        world_size=version.world_size,
        plan=version.plan,
        payload_bytes=end,
        header_bytes=0,
        header_xxh3_128=digest(b""),
        entries=entries,
        run_state=version.run.tree,
        run_tensors=tensors,
        facts=dict(version.facts),
    )
    version.arena.seal(version.slot, VersionRecord(reader=READER, part=part, head=version.head))
    return time.monotonic() - began


def _placed(local: Mapping[Unit, LocalUnit]) -> list[tuple[Unit, Fragment, torch.Tensor, int]]:
    found, end = [], 0
    for unit, part in local.items():
        for piece in part.pieces:
            found.append((unit, piece.fragment, piece.tensor, end))
            nbytes = piece.tensor.numel() * piece.tensor.element_size()
            end = _aligned(end + nbytes)
    return found


def _end(placed: Sequence[tuple[Unit, Fragment, torch.Tensor, int]]) -> int:
    if not placed:
        return 0
    _, _, tensor, offset = placed[-1]
    return _aligned(offset + tensor.numel() * tensor.element_size())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _require_finite(one: Laid) -> None:
    """What a health gate keeps out of commits is kept out of memory: a version with it would replace a good one."""
    if not one.copy.numel() or not (one.copy.is_floating_point() or one.copy.is_complex()):
        return
    values = torch.view_as_real(one.copy).reshape(-1) if one.copy.is_complex() else one.copy
    if values.element_size() == 1:
        values = values.float()
    low, high = (float(found) for found in torch.aminmax(values))
    sick = math.isnan(low) if one.unit.slot == BUFFER else not (math.isfinite(low) and math.isfinite(high))
    if sick:
        raise SaveError(f"NaN or Inf in {one.fragment.fqn} ({one.unit.slot}): memory keeps the version before")


def _entry(one: Laid) -> Entry:
    data = as_bytes(one.copy)
    return Entry(
        layer=one.unit.layer,
        slot=one.unit.slot,
        fqn=one.fragment.fqn,
        start=one.fragment.start,
        numel=one.fragment.numel,
        dtype=dtype_name(one.copy.dtype),
        encoding=RAW,
        offset=one.offset,
        nbytes=len(data),
        xxh3_128=digest(data),
    )


def _write_leaves(version: Version) -> tuple[tuple[StateTensor, ...], int]:
    found, end = [], version.fragments_end
    for leaf in version.run.leaves:
        version.arena.write_at(version.slot, end, leaf.data)
        found.append(
            StateTensor(
                dtype=leaf.dtype, shape=leaf.shape, offset=end, nbytes=len(leaf.data), xxh3_128=digest(leaf.data)
            )
        )
        end += len(leaf.data)
    return tuple(found), end
