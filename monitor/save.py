"""One save on one rank, as the background thread runs it: measure the copies, write the segment, commit, prune.

Everything it needs was staged by the training thread and stands still; it touches no live tensor and calls no
collective. Only rank 0 has a :class:`Committing` part.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from monitor.drift.base import DriftMeter
from monitor.dtypes import dtype_name
from monitor.ledger import CommitDraft, Drawn, draw
from monitor.measuring import measure_record
from monitor.staging import Copying, as_bytes
from store.catalog import Catalog
from store.commit import Expected, commit, hint_latest, wait_for_group
from store.errors import DamagedError, StorageError, UsageError
from store.files import Files
from store.names import Fragment, Unit
from store.prune import execute, plan_prune
from store.retention import Retention
from store.schema import MeasureRecord
from store.segments import SegmentDraft, StagedFragment, write_segment


@dataclass(frozen=True)
class StagedUnit:
    """A unit's copies on this rank, fragment by fragment. ``measure``: already taken on the live tensors."""

    unit: Unit
    encoding: str
    fragments: tuple[Fragment, ...]
    copies: tuple[torch.Tensor, ...]
    measure: MeasureRecord | None


@dataclass(frozen=True)
class Committing:
    """Rank 0's part of a save."""

    draft: CommitDraft
    timeout: float
    catalog: Catalog
    retention: Retention
    give_up: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class SaveJob:
    """All of one save on one rank. ``segment`` lacks its fragments; they come from ``staged``.

    unstorable: why the run state could not be captured; then there is nothing to write.
    metered: units whose copies the meter holds until the save is settled; a save may fail before it has all."""

    files: Files
    segment: SegmentDraft
    staged: Sequence[StagedUnit]
    copying: Copying
    meter: DriftMeter
    committing: Committing | None
    unstorable: UsageError | None = None
    metered: set[Unit] = field(default_factory=set)

    def meter_stage(self, unit: StagedUnit) -> None:
        """Hand a unit's copies to the meter, as the reference to come."""
        self.meter.stage(unit.unit, unit.copies)
        self.metered.add(unit.unit)


@dataclass(frozen=True)
class Saved:
    """A finished save. drawn and written_bytes (over all ranks) are rank 0's. notes: trouble after the commit."""

    drawn: Drawn | None
    seconds: float
    written_bytes: int = 0
    notes: tuple[str, ...] = ()


def run(job: SaveJob) -> Saved:
    """Carry a save out. Any DriftpointError it raises means: there is no such commit."""
    began = time.monotonic()
    job.copying.finish()
    job.copying.require_whole()
    if job.unstorable is not None:
        raise job.unstorable
    segment = replace(job.segment, fragments=[fragment for unit in job.staged for fragment in _fragments(unit)])
    write_segment(job.files, segment, lambda: [unit.measure or measured(job, unit) for unit in job.staged])
    if job.committing is None:
        return Saved(None, time.monotonic() - began)
    return _commit(job, job.committing, began)


def measured(job: SaveJob, unit: StagedUnit) -> MeasureRecord:
    """Measure a unit on its copies, and stage them as the reference to come."""
    found = job.meter.measure(unit.unit, unit.copies)
    job.meter_stage(unit)
    return measure_record(unit.unit, found)


def _commit(job: SaveJob, committing: Committing, began: float) -> Saved:
    segment = job.segment
    expected = Expected(segment.store_id, segment.save, segment.world_size, segment.plan)
    group = wait_for_group(job.files, expected, committing.timeout, aborted=committing.give_up.is_set)
    drawn = draw(committing.draft, group)
    commit(job.files, drawn.manifest)
    seconds = time.monotonic() - began
    notes = _tidy(job.files, committing, drawn)
    return Saved(drawn, seconds, group.record.payload_bytes, notes)


def _tidy(files: Files, committing: Committing, drawn: Drawn) -> tuple[str, ...]:
    # The commit stands whatever happens here; trouble is told, and the next save tries again.
    notes = []
    try:
        hint_latest(files, drawn.manifest.save)
    except StorageError as error:
        notes.append(f"LATEST was not updated: {error}")
    try:
        plan = plan_prune(committing.catalog, committing.retention)
        execute(files, plan)
        committing.catalog.retain(plan.keep)
        if plan.blocked:
            notes.append(f"pruning: {plan.blocked}")
    except (StorageError, DamagedError) as error:
        notes.append(f"pruning stopped: {error}")
    return tuple(notes)


def _fragments(staged: StagedUnit) -> list[StagedFragment]:
    return [
        StagedFragment(
            layer=staged.unit.layer,
            slot=staged.unit.slot,
            fqn=fragment.fqn,
            start=fragment.start,
            numel=fragment.numel,
            dtype=dtype_name(copy.dtype),
            encoding=staged.encoding,
            data=as_bytes(copy),
        )
        for fragment, copy in zip(staged.fragments, staged.copies, strict=True)
    ]
