"""Lay out, stage and seal one in-memory version.

One version in memory on one rank: where each fragment goes, and what the background thread does once it is copied.

The training thread lays a version out and starts its copies; the background thread waits for them, looks for values
that are not finite, hashes what is there and writes the record. Nothing here knows whether other ranks have theirs.

What rank 0 adds to a version in memory: the manifest that a commit of it would have.

Layers that never move are not kept in memory once they are committed: the manifest points to their version on disk.

Staging one version for memory: what goes into it, where it lies, and the copies, begun.

Training thread. The room that it writes to is found by the caller, who knows which payload nobody counts on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import torch

from monitor.adapters.base import versions_of
from monitor.adapters.module_tensors import dtype_name
from monitor.context import JobContext
from monitor.observe.units import LocalUnit, is_moving
from monitor.run_state import capture_run_state, to_tree
from monitor.save.saver import Saver
from monitor.save.staging import AsyncCopy, EncodedCopy, EncodingLoss, as_bytes
from monitor.save.store_session import StoreSession
from store.encoding import encoding_named
from store.errors import SaveError
from store.memory.arena import Arena
from store.memory.layout import READER, VersionRecord
from store.names import BUFFER, FROZEN, RAW, Fragment, SaveId, Unit
from store.schema import Entry, ManifestRecord, MeasureRecord, PartRecord, StateTensor, UnitRecord, digest, seal
from store.state_tree import Leaf

_ALIGN = 64
_NEITHER = torch.empty(0)


@dataclass(frozen=True)
class Placement:
    """A fragment's place in the payload.

    source: live, 1-d. copy: 1-d view of the payload, of the live dtype, or uint8 where it is encoded on the way."""

    unit: Unit
    fragment: Fragment
    offset: int
    source: torch.Tensor
    copy: torch.Tensor
    encoding: str = RAW

    @cached_property
    def encoded(self) -> EncodedCopy | None:
        """How it is copied, where it is encoded."""
        return None if self.encoding == RAW else EncodedCopy(self.source, self.encoding, self.copy, _NEITHER)


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

    fragments_end: bytes of the payload that fragments take; the run state's tensors follow.
    claim: token of the claim of the save's epoch."""

    arena: Arena
    slot: int
    save: SaveId
    store_id: str
    claim: str
    rank: int
    world_size: int
    plan: str
    laid: Sequence[Placement]
    fragments_end: int
    run: RunState
    facts: Mapping[str, Any]
    head: ManifestRecord | None
    copying: AsyncCopy


def fragments_bytes(local: Mapping[Unit, LocalUnit], encodings: Mapping[str, str]) -> int:
    """Bytes of a payload that the fragments take. encodings: by slot, of those that are not raw."""
    return _end(list(_placed(local, encodings)))


def plan_layout(
    local: Mapping[Unit, LocalUnit], encodings: Mapping[str, str], room: Callable[[int], Any], more: int
) -> tuple[list[Placement], int]:
    """Places for every fragment in ``room(bytes)``, a buffer with ``more`` bytes behind them; and where they end."""
    placed = list(_placed(local, encodings))
    end = _end(placed)
    memory = room(end + more)
    laid = []
    for one in placed:
        dtype = one.tensor.dtype if one.encoding == RAW else torch.uint8
        view = torch.frombuffer(memory, dtype=torch.uint8, count=one.nbytes, offset=one.offset).view(dtype)
        laid.append(Placement(one.unit, one.fragment, one.offset, one.tensor, view, one.encoding))
    return laid, end


def seal_snapshot(version: Version) -> float:
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
        measures=_lost(version.laid),
        run_state=version.run.tree,
        run_tensors=tensors,
        facts=dict(version.facts),
    )
    version.arena.seal(version.slot, VersionRecord(reader=READER, claim=version.claim, part=part, head=version.head))
    return time.monotonic() - began


@dataclass(frozen=True)
class _Placed:
    unit: Unit
    fragment: Fragment
    tensor: torch.Tensor
    encoding: str
    offset: int
    nbytes: int


def _placed(local: Mapping[Unit, LocalUnit], encodings: Mapping[str, str]) -> list[_Placed]:
    found, end = [], 0
    for unit, part in local.items():
        for piece in part.pieces:
            dtype = dtype_name(piece.tensor.dtype)
            encoding = encodings.get(unit.slot, RAW)
            if not encoding_named(encoding).applies(dtype):
                encoding = RAW
            nbytes = encoding_named(encoding).stored_bytes(piece.tensor.numel(), dtype)
            found.append(_Placed(unit, piece.fragment, piece.tensor, encoding, end, nbytes))
            end = _aligned(end + nbytes)
    return found


def _end(placed: Sequence[_Placed]) -> int:
    return _aligned(placed[-1].offset + placed[-1].nbytes) if placed else 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _require_finite(one: Placement) -> None:
    """What a health gate keeps out of commits is kept out of memory: a version with it would replace a good one."""
    if one.encoded is not None:
        if not one.encoded.held:
            raise SaveError(
                f"{one.fragment.fqn} ({one.unit.slot}) holds NaN, Inf or what {one.encoding} cannot: memory keeps the "
                "version before"
            )
        return
    if not one.copy.numel() or not (one.copy.is_floating_point() or one.copy.is_complex()):
        return
    values = torch.view_as_real(one.copy).reshape(-1) if one.copy.is_complex() else one.copy
    if values.element_size() == 1:
        values = values.float()
    low, high = (float(found) for found in torch.aminmax(values))
    sick = math.isnan(low) if one.unit.slot == BUFFER else not (math.isfinite(low) and math.isfinite(high))
    if sick:
        raise SaveError(f"NaN or Inf in {one.fragment.fqn} ({one.unit.slot}): memory keeps the version before")


def _entry(one: Placement) -> Entry:
    data = as_bytes(one.copy)
    return Entry(
        layer=one.unit.layer,
        slot=one.unit.slot,
        fqn=one.fragment.fqn,
        start=one.fragment.start,
        numel=one.fragment.numel,
        dtype=dtype_name(one.source.dtype),
        encoding=one.encoding,
        offset=one.offset,
        nbytes=len(data),
        xxh3_128=digest(data),
    )


def _lost(laid: Sequence[Placement]) -> tuple[MeasureRecord, ...]:
    """What encodings lost, by unit."""
    found: dict[Unit, EncodingLoss] = {}
    for one in laid:
        if one.encoded is not None:
            total = found.setdefault(one.unit, EncodingLoss())
            total.error_sq += one.encoded.lost.error_sq
            total.decoded_sq += one.encoded.lost.decoded_sq
    return tuple(
        MeasureRecord(
            layer=unit.layer,
            slot=unit.slot,
            moved_sq=0.0,
            reference_sq=0.0,
            finite=True,
            error_sq=lost.error_sq,
            decoded_sq=lost.decoded_sq,
        )
        for unit, lost in found.items()
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


class SnapshotManifest:
    """Knows the job's ledger and table; asked by the training thread. Only :meth:`plan` is for all ranks.

    saver: knows of a commit before the ledger does, which moves at decisions alone."""

    def __init__(self, job: JobContext, saver: Saver) -> None:
        self._job = job
        self._saver = saver
        self._frozen: int | None = None
        self._since: dict[Unit, int] = {}

    def begin(self) -> None:
        """The job stands on what was resumed, or begins: what is frozen is as committed, where it is."""
        self._frozen, self._since = self._trail(), {}

    def seen(self, step: int, saved: Collection[Unit]) -> None:
        """A decision looked at what is frozen; where it had changed it is among ``saved``, which may yet fail."""
        self._frozen = self._trail()
        self._since |= {unit: step for unit in saved if unit.slot == FROZEN}

    def ready(self) -> bool:
        """Whether what is frozen is committed, as it is now: memory does not hold it. Rank 0."""
        if not self._job.table.sizes:
            return False
        frozen = [unit for unit in self._job.table.sizes if unit.slot == FROZEN]
        return not frozen or (self._frozen == self._trail() and all(self._committed(unit) for unit in frozen))

    def plan(self, save: SaveId) -> str:
        """The same on all ranks that keep the same units of the same save."""
        units = [[unit.layer, unit.slot] for unit in self._job.table.sizes if unit.slot != FROZEN]
        return digest(seal([save.name, "memory", units]))

    def manifest(self, save: SaveId, store_id: str) -> ManifestRecord:
        """But for the group of its own segments, and what encodings lost in them: nobody has seen all parts yet."""
        job, ledger = self._job, self._job.ledger
        kept = ledger.kept(save.step, {}, job.table.sizes)
        previous = self._saver.newest
        units = [kept[unit] if unit.slot == FROZEN else self._fresh(unit, save) for unit in job.table.sizes]
        reached = {name for record in units for name in (record.save, *record.bases)}
        return ManifestRecord(
            store_id=store_id,
            step=save.step,
            epoch=save.epoch,
            commits=ledger.commits,
            world_size=job.group.world_size,
            framework=job.adapter.framework,
            policy=job.policy.name,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            previous=previous.name if previous else None,
            bytes_avoided=0,
            layers=job.table.layer_records(),
            tensors=job.table.tensor_records(),
            groups={name: record for name, record in ledger.groups.items() if name in reached},
            units=tuple(units),
        )

    def _committed(self, unit: Unit) -> bool:
        version = self._job.ledger.versions.get(unit)
        return version is not None and version.version.step >= self._since.get(unit, 0)

    def _fresh(self, unit: Unit, save: SaveId) -> UnitRecord:
        size = self._job.table.sizes[unit]
        return UnitRecord(
            layer=unit.layer,
            slot=unit.slot,
            save=save.name,
            encoding=RAW,
            numel=size.numel,
            nbytes=size.nbytes,
            drift=0.0,
            staleness=0,
            moving=is_moving(unit),
            reason="kept in memory",
            members=size.members,
        )

    def _trail(self) -> int:
        """Whatever moves no more may still be changed by the script: what autograd counts of that is seen."""
        frozen = (one for one in self._job.adapter.module.parameters() if not one.requires_grad)
        return versions_of(frozen)


_MARGIN = 1 << 20
"""Bytes of a payload that are reserved beyond what its first version needs: the run state may grow a little."""


class SnapshotStager:
    """Of one rank. lazy: state is copied beside the next forward and backward."""

    def __init__(self, job: JobContext, opened: StoreSession, head: SnapshotManifest, *, lazy: bool) -> None:
        self._job = job
        self._opened = opened
        self._head = head
        self._lazy = lazy
        self._encodings = job.config.memory_encodings()

    def needed(self, local: Mapping[Unit, LocalUnit]) -> int:
        """Bytes that a payload takes."""
        return fragments_bytes(committed_fragments(local), self._encodings) + _MARGIN

    def staged(
        self, save: SaveId, local: Mapping[Unit, LocalUnit], arena: Arena, slot: int, room: Callable[[int], Any]
    ) -> Version:
        """A version in ``room(bytes)``, which is payload ``slot``. StorageError; whatever the user's objects raise."""
        job, rank = self._job, self._job.group.rank
        tree, leaves = to_tree(capture_run_state(job.adapter, job.user, rank))
        run = RunState(tree, leaves)
        laid, end = plan_layout(committed_fragments(local), self._encodings, room, max(run.nbytes, _MARGIN))
        copying = self._begun(laid)
        first, store_id = rank == 0, self._opened.catalog.store_id
        return Version(
            arena=arena,
            slot=slot,
            save=save,
            store_id=store_id,
            claim=self._opened.token,
            rank=rank,
            world_size=job.group.world_size,
            plan=self._head.plan(save),
            laid=laid,
            fragments_end=end,
            run=run,
            facts=job.adapter.layout_facts() if first else {},
            head=self._head.manifest(save, store_id) if first else None,
            copying=copying,
        )

    def _begun(self, laid: Sequence[Placement]) -> AsyncCopy:
        """The copies: buffers' at once, since a forward may change them, the others' at once or beside training."""
        copying, now = AsyncCopy(), AsyncCopy()
        for one in laid:
            if one.encoded is not None:
                copying.add_encoded([one.encoded])
            else:
                (now if one.unit.slot == BUFFER else copying).add([one.source], [one.copy])
        now.start()
        now.finish()
        copying.start()
        if not self._lazy:
            copying.finish()
        return copying


def committed_fragments(local: Mapping[Unit, LocalUnit]) -> dict[Unit, LocalUnit]:
    """What memory keeps: not what never moves."""
    return {unit: part for unit, part in local.items() if unit.slot != FROZEN}
