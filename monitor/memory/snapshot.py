"""Lay out, stage and seal one in-memory snapshot of a rank.

The training thread lays a snapshot out and starts its copies (:class:`SnapshotStager`). The background thread waits for
them, checks that all values are finite, hashes the bytes and writes the record (:func:`seal_snapshot`). Rank 0 adds the
manifest that a commit would have (:class:`SnapshotManifest`): layers that never move are not kept in memory once they
are committed, and the manifest points to their version on disk. :mod:`monitor.memory.tier` checks the other ranks."""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, cast

import numpy as np
import torch

from monitor.adapters.identity import Integers, versions_of
from monitor.adapters.module_tensors import as_bytes, dtype_name
from monitor.context import JobContext
from monitor.ledger import CommitDraft, manifest_of, new_version
from monitor.observe.units import LocalUnit, UnitLayout
from monitor.save.async_copy import AsyncCopy, CopyTiming
from monitor.save.encode import squared
from monitor.save.save_task import Finish, SaveTask, begin_run_state, empty_segment
from monitor.save.saver import Saver
from monitor.save.store_session import StoreSession
from monitor.save.torch_codecs import EncodedCopy, EncodingLoss
from policies.base import Choice
from store.encoding import encoding_named
from store.errors import SaveError
from store.memory.arena import Arena
from store.memory.layout import VersionRecord
from store.names import BUFFER, FROZEN, RAW, Fragment, SaveId, Unit
from store.schema import Entry, ManifestRecord, MeasureRecord, StateTensor, digest, seal
from store.segment import SegmentDraft
from store.state_tree import Leaf

_ALIGN = 64
_MARGIN = 1 << 20  # bytes that are reserved for a run state of unknown size, and at least for one to grow
_NO_COPY = torch.empty(0, device="cpu")


@dataclass(frozen=True)
class Placement:
    """A fragment's place in the payload."""

    unit: Unit
    fragment: Fragment
    dtype: torch.dtype  # of the live tensor
    encoding: str
    offset: int
    nbytes: int

    def copy(self, memory: Any) -> torch.Tensor:
        """Return a view of this place in a payload: 1-d, of the live dtype; uint8 if it is encoded."""
        view = torch.frombuffer(memory, dtype=torch.uint8, count=self.nbytes, offset=self.offset)
        return view.view(self.dtype) if self.encoding == RAW else view


@dataclass
class LeafRoom:
    """Bytes that the tensors of the run state took in the last snapshot; None if they are not known yet."""

    nbytes: int | None = None


@dataclass(frozen=True)
class Version:
    """One staged snapshot of one rank. Its copies may be incomplete, and its run state is not assembled yet."""

    loan: "Loan"  # the payload
    segment: SegmentDraft  # without fragments
    finish: Finish  # adds the run state
    room: LeafRoom
    claim: str  # token of the claim of the save's epoch
    encoded: Mapping[Fragment, EncodedCopy]
    head: Callable[[], ManifestRecord] | None  # rank 0
    copying: AsyncCopy


def seal_snapshot(version: Version) -> float:
    """Wait for the copies, check and hash them, and write the record. Return the seconds that it took.

    After any error there is no snapshot on this rank. Raises SaveError if values are not finite, or changed while they
    were copied, and StorageError if the memory cannot be written."""
    began, loan = time.monotonic(), version.loan
    version.copying.finish()
    version.copying.require_whole()
    copies = [(one, one.copy(loan.memory)) for one in loan.placed.placements]
    for one, copy in copies:
        _require_finite(one, copy, version.encoded.get(one.fragment))
    entries = tuple(_entry(one, copy) for one, copy in copies)
    segment = version.finish(version.segment)
    tensors, end = _write_leaves(version, cast("Sequence[Leaf]", segment.run_leaves))
    header = {"header_bytes": 0, "header_xxh3_128": digest(b"")}
    part = segment.part(payload_bytes=end, **header, entries=entries, measures=_lost(version), run_tensors=tensors)
    head = None if version.head is None else version.head()
    reader = max(1 if head is None else head.reader, 2 * bool(part.differs))
    loan.arena.seal(loan.slot, VersionRecord(reader=reader, claim=version.claim, part=part, head=head))
    return time.monotonic() - began


class SnapshotManifest:
    """Builds the manifest of a snapshot. Rank 0, except :meth:`plan`; training thread.

    The saver knows of a commit before the ledger does, which advances at decisions only."""

    def __init__(self, job: JobContext, saver: Saver) -> None:
        self._job, self.saver = job, saver
        self._frozen_versions: Any = None
        self._changed_at: dict[Unit, int] = {}

    def begin(self) -> None:
        """Assume that frozen parameters are as committed, after a resume or a fresh start."""
        self._frozen_versions, self._changed_at = self._current_versions(), {}

    def on_decision(self, step: int, saved: Collection[Unit]) -> None:
        """Record which frozen units a decision saves, because they changed. Their save may still fail."""
        self._frozen_versions = self._current_versions()
        self._changed_at |= {unit: step for unit in saved if unit.slot == FROZEN}

    def ready(self) -> bool:
        """Return whether all frozen units are committed as they are now. Snapshots do not hold them."""
        if not self._job.table.sizes:
            return False
        frozen = [unit for unit in self._job.table.sizes if unit.slot == FROZEN]
        unchanged = self._frozen_versions == self._current_versions()
        return not frozen or (unchanged and all(self._committed(unit) for unit in frozen))

    def covered(self, saved: Mapping[Unit, Choice]) -> bool:
        """Return whether a save of these units stores all that a snapshot holds, as it is, and no frozen unit."""
        kept = {unit for unit in self._job.table.sizes if unit.slot != FROZEN}
        return saved.keys() == kept and all(choice.encoding == RAW for choice in saved.values())

    def plan(self, save: SaveId) -> str:
        """Return a digest that is equal on ranks that keep the same units of the same save."""
        units = [[unit.layer, unit.slot] for unit in self._job.table.sizes if unit.slot != FROZEN]
        return digest(seal([save.name, "memory", units, self.saver.checker.ranks.mark]))

    def manifest(self, save: SaveId, store_id: str, more: Sequence[str] = ()) -> Callable[[], ManifestRecord]:
        """Return a function that builds the manifest, in any thread, from the present state of the ledger.

        It lacks the snapshot's own group and the encoding errors: not all parts exist yet."""
        job, ledger, sizes = self._job, replace(self._job.ledger), self._job.table.sizes
        draft = CommitDraft(
            facts=job.facts(store_id),
            save=save,
            world_size=job.group.world_size,
            commits=ledger.commits,
            previous=self.saver.newest,
            find_kept=partial(ledger.kept, save.step, {}, sizes),
            saved={},
            sizes=sizes,
            groups=ledger.groups,
        )
        return partial(_manifest, draft, tuple(dict.fromkeys((*ledger.differs, *more))))

    def _committed(self, unit: Unit) -> bool:
        version = self._job.ledger.versions.get(unit)
        return version is not None and version.version.step >= self._changed_at.get(unit, 0)

    def _current_versions(self) -> Any:
        """Return autograd's version counters of frozen parameters, which the script may still change."""
        return versions_of([one for one in self._job.adapter.module.parameters() if not one.requires_grad])


def _manifest(draft: CommitDraft, differs: tuple[str, ...]) -> ManifestRecord:
    units = [
        draft.kept[unit] if unit.slot == FROZEN else new_version(unit, draft.save, size, "kept in memory")
        for unit, size in draft.sizes.items()
    ]
    return manifest_of(draft, units, draft.groups, bytes_avoided=0, differs=differs)


class SnapshotStager:
    """Stages the snapshots of one rank. Training thread."""

    def __init__(
        self, job: JobContext, session: StoreSession, manifest: SnapshotManifest, copy_timing: CopyTiming
    ) -> None:
        self._job, self._session, self._manifest, self._copy_timing = job, session, manifest, copy_timing
        self._encodings = job.config.memory_encodings()
        self._room = LeafRoom()
        self._last: _Placed | None = None

    def payload_bytes(self, local: Mapping[Unit, LocalUnit]) -> int:
        room = _MARGIN if self._room.nbytes is None else self._room.nbytes
        return self._placed(_moving(local)).end + room + max(room // 8, _MARGIN)

    def lend(self, local: Mapping[Unit, LocalUnit], arena: Arena, slot: int, allocate: Callable[[int], Any]) -> "Loan":
        """Return buffers in ``allocate(nbytes)``, the payload ``slot``, for all units. Raises StorageError."""
        return Loan(arena, slot, self._placed(_moving(local)), allocate(self.payload_bytes(local)))

    def adopt(self, loan: "Loan", task: SaveTask) -> Version:
        """Return the snapshot that a save staged in lent memory makes."""
        differs = dict.fromkeys((*task.segment.differs, *task.notes, *self._manifest.saver.checker.known))
        segment = replace(task.segment, plan=self._manifest.plan(task.segment.save), differs=tuple(differs))
        return self._version(loan, segment, task.finish, task.copying, {})

    def stage(
        self, save: SaveId, local: Mapping[Unit, LocalUnit], arena: Arena, slot: int, allocate: Callable[[int], Any]
    ) -> Version:
        """Stage a snapshot in ``allocate(nbytes)``, the payload ``slot``.

        Raises StorageError, and any exception of the user's objects."""
        store_id, moving = self._session.catalog.store_id, _moving(local)
        plan, differs = self._manifest.plan(save), self._manifest.saver.checker.known
        segment = empty_segment(self._job, store_id, save, plan, differs)
        segment, finish = begin_run_state(segment, self._job)
        if self._room.nbytes is None:
            segment, finish = finish(segment), lambda finished: finished
            self._room.nbytes = sum(len(leaf.data) for leaf in cast("Sequence[Leaf]", segment.run_leaves))
        loan = self.lend(local, arena, slot, allocate)
        encoded = {
            one.fragment: EncodedCopy(source, one.encoding, one.copy(loan.memory), _NO_COPY)
            for unit, places in loan.placed.by_unit.items()
            if any(one.encoding != RAW for one in places)
            for one, source in zip(places, moving[unit].tensors, strict=True)
            if one.encoding != RAW
        }
        version = self._version(loan, segment, finish, AsyncCopy(), encoded)
        try:
            self._start_copies(version, moving)
        except BaseException:
            with suppress(Exception):
                version.copying.finish()  # a device may be writing into the payload
            raise
        return version

    def _version(
        self, loan: "Loan", draft: SegmentDraft, finish: Finish, copy: AsyncCopy, encoded: dict[Fragment, EncodedCopy]
    ) -> Version:
        head = self._manifest.manifest(draft.save, draft.store_id, draft.differs) if draft.rank == 0 else None
        return Version(loan, draft, finish, self._room, self._session.token, encoded, head, copy)

    def _start_copies(self, version: Version, local: Mapping[Unit, LocalUnit]) -> None:
        """Copy buffers at once, since a forward may change them; start the other copies."""
        placed, memory, copying = version.loan.placed, version.loan.memory, version.copying
        base = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        for unit, part in local.items():
            places = placed.by_unit[unit]
            if unit.slot == BUFFER:
                copying.copy_now(part.tensors, _copies(places, memory))
            elif all(one.encoding == RAW for one in places):
                copying.add_unit(part, base + placed.offsets[unit], partial(_copies, places, memory))
            else:
                raw = [(one, source) for one, source in zip(places, part.tensors, strict=True) if one.encoding == RAW]
                copying.add([source for _, source in raw], [one.copy(memory) for one, _ in raw])
        copying.add_encoded(list(version.encoded.values()))
        self._copy_timing.start(copying)

    def _placed(self, local: Mapping[Unit, LocalUnit]) -> "_Placed":
        layouts = {unit: part.layout for unit, part in local.items()}
        if self._last is None or self._last.layouts != layouts:
            self._last = _Placed.of(layouts, self._encodings)
        return self._last


@dataclass(frozen=True)
class _Placed:
    layouts: Mapping[Unit, UnitLayout]
    by_unit: Mapping[Unit, Sequence[Placement]]
    offsets: Mapping[Unit, Integers]
    end: int

    @classmethod
    def of(cls, layouts: Mapping[Unit, UnitLayout], encodings: Mapping[str, str]) -> "_Placed":
        by_unit: dict[Unit, list[Placement]] = {}
        end = 0
        for unit, layout in layouts.items():
            places = by_unit.setdefault(unit, [])
            for fragment, dtype in zip(layout.fragments, layout.dtypes, strict=True):
                encoding = encodings.get(unit.slot, RAW)
                if not encoding_named(encoding).applies(dtype_name(dtype)):
                    encoding = RAW
                nbytes = encoding_named(encoding).stored_bytes(fragment.numel, dtype_name(dtype))
                places.append(Placement(unit, fragment, dtype, encoding, end, nbytes))
                end = -(-(end + nbytes) // _ALIGN) * _ALIGN
        offsets = {unit: np.array([one.offset for one in places], np.int64) for unit, places in by_unit.items()}
        return cls(layouts, by_unit, offsets, end)

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        return tuple(chain.from_iterable(self.by_unit.values()))


@dataclass(frozen=True)
class Loan:
    """The memory of a payload, for the copies of a save."""

    arena: Arena
    slot: int
    placed: _Placed
    memory: Any

    def buffers(self) -> dict[Unit, list[torch.Tensor]]:
        return {unit: _copies(places, self.memory) for unit, places in self.placed.by_unit.items()}


def _copies(places: Sequence[Placement], memory: Any) -> list[torch.Tensor]:
    return [one.copy(memory) for one in places]


def _moving(local: Mapping[Unit, LocalUnit]) -> dict[Unit, LocalUnit]:
    return {unit: part for unit, part in local.items() if unit.slot != FROZEN}


def _require_finite(one: Placement, copy: torch.Tensor, encoded: EncodedCopy | None) -> None:
    """Raise SaveError for NaN or Inf: like a commit, a snapshot must not replace a finite version by such values."""
    if encoded is not None:
        if not encoded.held:
            if encoded.no_memory:
                raise SaveError(f"no memory is left to encode {one.fragment.fqn} ({one.unit.slot}): free some of it")
            raise SaveError(
                f"{one.fragment.fqn} ({one.unit.slot}) has NaN, Inf or values that {one.encoding} cannot hold: memory "
                "keeps the version before"
            )
        return
    if not copy.numel() or not (copy.is_floating_point() or copy.is_complex()):
        return
    values = torch.view_as_real(copy).reshape(-1) if copy.is_complex() else copy
    if values.element_size() == 1:
        values = values.float()
    low, high = (float(found) for found in torch.aminmax(values))
    sick = math.isnan(low) if one.unit.slot == BUFFER else not (math.isfinite(low) and math.isfinite(high))
    if sick:
        raise SaveError(f"NaN or Inf in {one.fragment.fqn} ({one.unit.slot}): memory keeps the version before")


def _entry(one: Placement, copy: torch.Tensor) -> Entry:
    return Entry(
        layer=one.unit.layer,
        **one.fragment._asdict(),
        dtype=dtype_name(one.dtype),
        encoding=one.encoding,
        offset=one.offset,
        nbytes=one.nbytes,
        xxh3_128=digest(as_bytes(copy)),
    )


def _lost(version: Version) -> tuple[MeasureRecord, ...]:
    places = version.loan.placed.placements
    losses = {one.unit: EncodingLoss() for one in places if one.fragment in version.encoded}
    for one in (one for one in places if one.unit in losses):  # the relative error is over all values of the unit
        encoded, total = version.encoded.get(one.fragment), losses[one.unit]
        total.error_sq += encoded.lost.error_sq if encoded else 0.0
        total.decoded_sq += encoded.lost.decoded_sq if encoded else squared(one.copy(version.loan.memory))
    return tuple(
        MeasureRecord(**unit._asdict(), moved_sq=0.0, reference_sq=0.0, finite=True, **vars(lost))
        for unit, lost in losses.items()
    )


def _write_leaves(version: Version, leaves: Sequence[Leaf]) -> tuple[tuple[StateTensor, ...], int]:
    loan, tensors = version.loan, []
    end = loan.placed.end  # of all fragments
    version.room.nbytes = sum(len(one.data) for one in leaves)
    if end + version.room.nbytes > len(loan.memory):
        raise SaveError(
            f"the run state has grown to {version.room.nbytes} bytes of tensors: memory keeps the version before, and "
            "has room for them at the next one"
        )
    for one in leaves:
        loan.arena.write_at(loan.slot, end, one.data)
        tensors.append(
            StateTensor(dtype=one.dtype, shape=one.shape, offset=end, nbytes=len(one.data), xxh3_128=digest(one.data))
        )
        end += len(one.data)
    return tuple(tensors), end
