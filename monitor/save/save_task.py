"""One save on one rank: stage, write segment, commit, prune.

One save on one rank, as the background thread runs it: measure the copies, write the segment, commit, prune.

Everything it needs was staged by the training thread and stands still; it touches no live tensor and calls no
collective. Only rank 0 has a :class:`CommitPlan` part.

Staging, unit by unit: which memory a unit is copied into, and whether it is encoded on the way.

Training thread only. It does not know when copies are finished (:class:`monitor.save.staging.AsyncCopy`) nor why a unit
is
saved.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from monitor.adapters.module_tensors import dtype_name
from monitor.ledger import CommitDraft, PreparedCommit, build_manifest
from monitor.observe.drift_meter import DriftMeter, Measure, Signature, measure_record
from monitor.observe.units import LocalUnit
from monitor.save.encode import SavePacking, encode_unit
from monitor.save.staging import AsyncCopy, EncodedCopy, StagingPool
from store.catalog import Catalog
from store.commit import Expected, commit, hint_latest, wait_for_group
from store.encoding import encoding_named
from store.errors import DamagedError, MissingError, SaveError, StorageError, UsageError
from store.layout import part_path, payload_path, segment_dir
from store.names import BUFFER, FROZEN, RAW, Fragment, SaveId, Unit
from store.retention import Retention, execute, plan_prune
from store.schema import MeasureRecord
from store.segment import SegmentDraft, StagedFragment, write_segment
from store.storage.local import Files


@dataclass(frozen=True)
class StagedUnit:
    """A unit's copies on this rank, fragment by fragment. measure, signature: already taken on the live tensors.

    From the moment they are written the copies hold what decoding gives."""

    unit: Unit
    encoding: str
    fragments: tuple[Fragment, ...]
    copies: tuple[torch.Tensor, ...]
    measure: MeasureRecord | None
    encoded: tuple[EncodedCopy, ...] = ()
    """Where it was encoded while it was staged: fragment by fragment, ``copies`` among them. ``measure`` is taken."""
    signature: Signature | None = None


@dataclass(frozen=True)
class CommitPlan:
    """Rank 0's part of a save."""

    draft: CommitDraft
    timeout: float
    catalog: Catalog
    retention: Retention
    give_up: threading.Event = field(default_factory=threading.Event)


@dataclass
class Progress:
    """How far a save came; written by the background thread, read by the training thread once it is finished.

    metered: units whose copies the meter holds until the save is settled; a save may fail before it has all.
    signatures: of the values that were staged, where they were measured here.
    attempted: the manifest may exist, whatever was raised. drawn: what is committed. write_seconds: what the segment
    took, from the first byte encoded to the last one durable."""

    metered: set[Unit] = field(default_factory=set)
    signatures: dict[Unit, Signature] = field(default_factory=dict)
    attempted: bool = False
    drawn: PreparedCommit | None = None
    write_seconds: float = 0.0


@dataclass(frozen=True)
class SaveTask:
    """All of one save on one rank. ``segment`` lacks its fragments; they come from ``staged``.

    unstorable: why the run state could not be captured; then there is nothing to write."""

    files: Files
    segment: SegmentDraft
    staged: Sequence[StagedUnit]
    copying: AsyncCopy
    meter: DriftMeter
    packing: SavePacking
    committing: CommitPlan | None
    unstorable: UsageError | None = None
    progress: Progress = field(default_factory=Progress)

    def meter_stage(self, unit: StagedUnit) -> None:
        """Hand a unit's copies to the meter, as the reference to come."""
        self.meter.stage(unit.unit, unit.copies)
        self.progress.metered.add(unit.unit)


@dataclass(frozen=True)
class SaveResult:
    """A finished save. drawn and written_bytes (over all ranks) are rank 0's."""

    drawn: PreparedCommit | None
    seconds: float
    written_bytes: int = 0


def run_save(job: SaveTask) -> SaveResult:
    """Carry a save out. Any DriftpointError it raises means: nobody was told of such a commit."""
    began = time.monotonic()
    job.copying.finish()
    job.copying.require_whole()
    if job.unstorable is not None:
        raise job.unstorable
    units = [_Encoding(job, unit) for unit in job.staged]
    segment = replace(job.segment, fragments=[fragment for unit in units for fragment in unit.fragments])
    written = time.monotonic()
    write_segment(job.files, segment, lambda: [unit.measure() for unit in units])
    job.progress.write_seconds = time.monotonic() - written
    if job.committing is None:
        return SaveResult(None, time.monotonic() - began)
    return _commit(job, job.committing, began)


def prune_after_commit(job: SaveTask) -> None:
    """Rank 0, after :func:`run_save`: point LATEST at the commit, if there is one, and prune.

    Raises SaveError with all that went wrong. The commit stands whatever happens here; the next save tries again."""
    drawn, committing, notes = job.progress.drawn, job.committing, []
    if drawn is None or committing is None:
        return
    try:
        hint_latest(job.files, drawn.manifest.save)
    except StorageError as error:
        notes.append(f"LATEST was not updated: {error}")
    try:
        notes += _prune(job.files, committing)
    except (StorageError, DamagedError) as error:
        notes.append(f"pruning stopped: {error}")
    if notes:
        raise SaveError("; ".join(notes))


def discard(files: Files, save: SaveId, rank: int) -> None:
    """Remove what this rank wrote for a save that was given up before anything could point to it.

    On a disk that is nearly full, what failed saves leave behind would keep the next ones from coming about."""
    for path in (part_path(save, rank), payload_path(save, rank)):  # a part must not outlive its payload
        with suppress(MissingError):
            files.unlink(path)
    with suppress(StorageError):  # other ranks may have theirs in it still
        files.remove_dir(segment_dir(save))


class _Encoding:
    """A unit on its way into the segment, and what is measured on it before and after."""

    def __init__(self, job: SaveTask, unit: StagedUnit) -> None:
        self._job, self._unit, self._before = job, unit, unit.measure
        lossy = not encoding_named(unit.encoding).lossless
        if lossy and self._before is None:
            self._before = self._moved()  # afterwards the copies hold something else
        healthy = self._before is None or self._before.finite
        encoding = unit.encoding if healthy else RAW  # what is not finite is never committed anyhow
        self._made = encode_unit(unit.unit, encoding, unit.fragments, unit.encoded or unit.copies, job.packing)

    @property
    def fragments(self) -> Sequence[StagedFragment]:
        """To be written, once."""
        return self._made.fragments

    def measure(self) -> MeasureRecord:
        """Once the fragments are written: what the part says of the unit. The copies are the reference to come."""
        if not self._made.lossy:
            if self._before is None:
                self._before = self._moved()
        else:
            self._measured()  # the signature of what decoding gives
        assert self._before is not None
        self._stage()
        lost = self._made.lost
        return self._before.model_copy(update={"error_sq": lost.error_sq, "decoded_sq": lost.decoded_sq})

    def _moved(self) -> MeasureRecord:
        measure = self._measured()
        if measure.signature is not None:
            self._job.progress.signatures[self._unit.unit] = measure.signature
        return measure_record(self._unit.unit, measure)

    def _measured(self) -> Measure:
        return self._job.meter.measure(self._unit.unit, self._unit.copies)

    def _stage(self) -> None:
        if self._unit.unit not in self._job.progress.metered:
            self._job.meter_stage(self._unit)


def _commit(job: SaveTask, committing: CommitPlan, began: float) -> SaveResult:
    segment = job.segment
    expected = Expected(segment.store_id, segment.save, segment.world_size, segment.plan)
    group = wait_for_group(job.files, expected, committing.timeout, aborted=committing.give_up.is_set)
    drawn = build_manifest(committing.draft, group)
    job.progress.attempted = True
    commit(job.files, drawn.manifest)
    job.progress.drawn = drawn
    return SaveResult(drawn, time.monotonic() - began, group.record.payload_bytes)


def _prune(files: Files, committing: CommitPlan) -> list[str]:
    plan = plan_prune(committing.catalog, committing.retention)
    execute(files, plan)
    committing.catalog.retain(plan.keep)
    return [f"pruning: {plan.blocked}"] if plan.blocked else []


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

    def stage(self, part: LocalUnit, encoding: str, measure: Measure | None, copying: AsyncCopy) -> StagedUnit:
        """Have a unit copied by ``copying``. measure: of the live tensors, where it was taken already."""
        copies = self._pool.take(part.unit, part.tensors)
        if self._encodes_now(part, encoding):
            # Nobody sees the values again: what is to be known of them is measured where they are.
            measure = measure or self._meter.measure(part.unit, part.tensors)
            if measure.finite:
                return self._encoded(part, encoding, copies, measure, copying)
        if part.unit.slot in (BUFFER, FROZEN):  # a forward may change buffers, and scripts reach frozen weights
            now = AsyncCopy()
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
        self, part: LocalUnit, encoding: str, copies: list[torch.Tensor], measure: Measure, copying: AsyncCopy
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
