"""Lays out, stages and seals one in-memory snapshot of a rank.

The training thread lays a snapshot out and starts its copies (:class:`SnapshotStager`). The background thread waits for
them, checks that all values are finite, hashes the bytes and writes the record (:func:`seal_snapshot`). Rank 0 adds the
manifest that a commit would have (:class:`SnapshotManifest`): layers that never move are not kept in memory once they
are committed, and the manifest points to their version on disk. Nothing here knows whether other ranks have theirs.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import torch

from monitor.adapters.identity import versions_of
from monitor.adapters.module_tensors import as_bytes, dtype_name
from monitor.context import JobContext
from monitor.ledger import CommitDraft, manifest_of, new_version
from monitor.observe.units import LocalUnit
from monitor.save.save_task import empty_segment, with_run_state
from monitor.save.saver import Saver
from monitor.save.staging import AsyncCopy, CopyTiming
from monitor.save.store_session import StoreSession
from monitor.save.torch_codecs import EncodedCopy, EncodingLoss
from store.encoding import encoding_named
from store.errors import SaveError
from store.memory.arena import Arena
from store.memory.layout import VersionRecord, reader_of
from store.names import BUFFER, FROZEN, RAW, Fragment, SaveId, Unit
from store.schema import Entry, ManifestRecord, MeasureRecord, PartRecord, StateTensor, digest, seal
from store.segment import SegmentDraft
from store.state_tree import Leaf

_ALIGN = 64
_MARGIN = 1 << 20  # bytes reserved in a payload beyond the fragments, for the run state, which may grow
_NO_COPY = torch.empty(0)


@dataclass(frozen=True)
class Placement:
    """A fragment's place in the payload."""

    unit: Unit
    fragment: Fragment
    offset: int
    source: torch.Tensor  # live, 1-d
    copy: torch.Tensor  # 1-d view of the payload, of the live dtype; uint8 if it is encoded
    encoding: str = RAW

    @cached_property
    def encoded(self) -> EncodedCopy | None:
        return None if self.encoding == RAW else EncodedCopy(self.source, self.encoding, self.copy, _NO_COPY)


@dataclass(frozen=True)
class Version:
    """One staged snapshot of one rank. Only its copies may be incomplete."""

    arena: Arena
    slot: int
    segment: SegmentDraft  # without fragments
    run_leaves: Sequence[Leaf]  # of the segment
    claim: str  # token of the claim of the save's epoch
    placements: Sequence[Placement]
    fragments_end: int  # bytes of all fragments; the tensors of the run state follow
    head: Callable[[], ManifestRecord] | None  # rank 0
    copying: AsyncCopy


def seal_snapshot(version: Version) -> float:
    """Wait for the copies, check and hash them, and write the record. Return the seconds that it took.

    After any error there is no snapshot on this rank.

    Raises:
        SaveError: Values are not finite, or changed while they were copied.
        StorageError: The memory cannot be written.
    """
    began = time.monotonic()
    version.copying.finish()
    version.copying.require_whole()
    for one in version.placements:
        _require_finite(one)
    entries = tuple(_entry(one) for one in version.placements)
    tensors, end = _write_leaves(version)
    segment = version.segment
    part = PartRecord(
        store_id=segment.store_id,
        step=segment.save.step,
        epoch=segment.save.epoch,
        rank=segment.rank,
        world_size=segment.world_size,
        plan=segment.plan,
        payload_bytes=end,
        header_bytes=0,
        header_xxh3_128=digest(b""),
        entries=entries,
        measures=_lost(version.placements),
        run_state=segment.run_state,
        run_tensors=tensors,
        facts=dict(segment.facts),
    )
    head = None if version.head is None else version.head()
    version.arena.seal(version.slot, VersionRecord(reader=reader_of(head), claim=version.claim, part=part, head=head))
    return time.monotonic() - began


class SnapshotManifest:
    """Builds the manifest of a snapshot. Rank 0, except :meth:`plan`; training thread.

    The saver knows of a commit before the ledger does, which advances at decisions only."""

    def __init__(self, job: JobContext, saver: Saver) -> None:
        self._job = job
        self._saver = saver
        self._frozen_versions: Any = None
        self._changed_at: dict[Unit, int] = {}

    def begin(self) -> None:
        """Take frozen parameters to be as committed, after a resume or a fresh start."""
        self._frozen_versions, self._changed_at = self._current_versions(), {}

    def on_decision(self, step: int, saved: Collection[Unit]) -> None:
        """Note the frozen units whose change a decision found; they are in ``saved``, which may still fail."""
        self._frozen_versions = self._current_versions()
        self._changed_at |= {unit: step for unit in saved if unit.slot == FROZEN}

    def ready(self) -> bool:
        """Return whether all frozen units are committed as they are now, since memory does not hold them."""
        if not self._job.table.sizes:
            return False
        frozen = [unit for unit in self._job.table.sizes if unit.slot == FROZEN]
        unchanged = self._frozen_versions == self._current_versions()
        return not frozen or (unchanged and all(self._committed(unit) for unit in frozen))

    def plan(self, save: SaveId) -> str:
        """Return a digest that is equal on ranks that keep the same units of the same save."""
        units = [[unit.layer, unit.slot] for unit in self._job.table.sizes if unit.slot != FROZEN]
        return digest(seal([save.name, "memory", units]))

    def manifest(self, save: SaveId, store_id: str) -> Callable[[], ManifestRecord]:
        """Return a function that builds the manifest in any thread, of what is known now.

        It lacks the snapshot's own group and the encoding errors: not all parts exist yet."""
        job, ledger, sizes = self._job, replace(self._job.ledger), self._job.table.sizes
        draft = CommitDraft(
            facts=job.facts(store_id),
            save=save,
            world_size=job.group.world_size,
            commits=ledger.commits,
            previous=self._saver.newest,
            find_kept=partial(ledger.kept, save.step, {}, sizes),
            saved={},
            sizes=sizes,
            groups=ledger.groups,
        )
        differs = tuple(dict.fromkeys((*ledger.differs, *self._saver.differs)))
        return partial(_manifest, draft, differs)

    def _committed(self, unit: Unit) -> bool:
        version = self._job.ledger.versions.get(unit)
        return version is not None and version.version.step >= self._changed_at.get(unit, 0)

    def _current_versions(self) -> Any:
        """Return autograd's version counters of frozen parameters, which the script may still change."""
        frozen = [one for one in self._job.adapter.module.parameters() if not one.requires_grad]
        return versions_of(frozen)


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
        self._job = job
        self._session = session
        self._manifest = manifest
        self._copy_timing = copy_timing
        self._encodings = job.config.memory_encodings()

    def payload_bytes(self, local: Mapping[Unit, LocalUnit]) -> int:
        """Return the bytes to reserve for a payload."""
        pieces = ((unit, piece) for unit, part in _moving(local).items() for piece in part.pieces)
        return sum(_aligned(_stored_as(unit, piece.tensor, self._encodings)[1]) for unit, piece in pieces) + _MARGIN

    def stage(
        self, save: SaveId, local: Mapping[Unit, LocalUnit], arena: Arena, slot: int, allocate: Callable[[int], Any]
    ) -> Version:
        """Stage a snapshot in ``allocate(nbytes)``, the payload ``slot``.

        Raises StorageError, and any exception of the user's objects."""
        store_id = self._session.catalog.store_id
        segment = with_run_state(empty_segment(self._job, store_id, save, self._manifest.plan(save)), self._job)
        leaves = cast("Sequence[Leaf]", segment.run_leaves)
        spare = max(sum(len(leaf.data) for leaf in leaves), _MARGIN)
        placements, end = _placements(_moving(local), self._encodings, allocate, spare)
        head = self._manifest.manifest(save, store_id) if segment.rank == 0 else None
        copying = self._start_copies(placements)  # last: an error would leave them unfinished
        return Version(arena, slot, segment, leaves, self._session.token, placements, end, head, copying)

    def _start_copies(self, placements: Sequence[Placement]) -> AsyncCopy:
        """Copy buffers at once, since a forward may change them; start the other copies."""
        copying, now = AsyncCopy(), AsyncCopy()
        for one in placements:
            if one.encoded is not None:
                copying.add_encoded([one.encoded])
            else:
                (now if one.unit.slot == BUFFER else copying).add([one.source], [one.copy])
        now.start()
        now.finish()
        self._copy_timing.start(copying)
        return copying


def _moving(local: Mapping[Unit, LocalUnit]) -> dict[Unit, LocalUnit]:
    return {unit: part for unit, part in local.items() if unit.slot != FROZEN}


def _placements(
    local: Mapping[Unit, LocalUnit], encodings: Mapping[str, str], allocate: Callable[[int], Any], spare: int
) -> tuple[list[Placement], int]:
    """Place every fragment in ``allocate(nbytes)``, with ``spare`` bytes after them. Return also where they end."""
    found, end = [], 0
    for unit, part in local.items():
        for piece in part.pieces:
            encoding, nbytes = _stored_as(unit, piece.tensor, encodings)
            found.append((unit, piece, encoding, end, nbytes))
            end = _aligned(end + nbytes)
    memory, placements = allocate(end + spare), []
    for unit, piece, encoding, offset, nbytes in found:
        dtype = piece.tensor.dtype if encoding == RAW else torch.uint8
        view = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset).view(dtype)
        placements.append(Placement(unit, piece.fragment, offset, piece.tensor, view, encoding))
    return placements, end


def _stored_as(unit: Unit, tensor: torch.Tensor, encodings: Mapping[str, str]) -> tuple[str, int]:
    """Return the encoding of a piece and its encoded bytes."""
    dtype, encoding = dtype_name(tensor.dtype), encodings.get(unit.slot, RAW)
    if not encoding_named(encoding).applies(dtype):
        encoding = RAW
    return encoding, encoding_named(encoding).stored_bytes(tensor.numel(), dtype)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _require_finite(one: Placement) -> None:
    """Raise SaveError for NaN or Inf: like a commit, a snapshot must not replace a finite version by such values."""
    if one.encoded is not None:
        if not one.encoded.held:
            raise SaveError(
                f"{one.fragment.fqn} ({one.unit.slot}) has NaN, Inf or values that {one.encoding} cannot hold: memory "
                "keeps the version before"
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


def _lost(placements: Sequence[Placement]) -> tuple[MeasureRecord, ...]:
    found: dict[Unit, EncodingLoss] = {}
    for one in placements:
        if one.encoded is not None:
            total = found.setdefault(one.unit, EncodingLoss())
            total.error_sq += one.encoded.lost.error_sq
            total.decoded_sq += one.encoded.lost.decoded_sq
    return tuple(
        MeasureRecord(layer=unit.layer, slot=unit.slot, moved_sq=0.0, reference_sq=0.0, finite=True, **vars(lost))
        for unit, lost in found.items()
    )


def _write_leaves(version: Version) -> tuple[tuple[StateTensor, ...], int]:
    found, end = [], version.fragments_end
    for leaf in version.run_leaves:
        version.arena.write_at(version.slot, end, leaf.data)
        found.append(
            StateTensor(
                dtype=leaf.dtype, shape=leaf.shape, offset=end, nbytes=len(leaf.data), xxh3_128=digest(leaf.data)
            )
        )
        end += len(leaf.data)
    return tuple(found), end
