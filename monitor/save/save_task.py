"""Run one save on one rank: stage, write the segment, commit, prune.

The training thread stages units (:class:`Stager`). The background thread does the rest (:func:`run_save`): it reads
staged copies, live tensors only to copy them, and calls no collective. Only rank 0 has a :class:`CommitPlan`."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from monitor.background import Beside, Once, alone, run_in_background
from monitor.context import JobContext
from monitor.distributed import run_on_all_ranks
from monitor.ledger import CommitDraft, PreparedCommit, build_manifest
from monitor.observe.drift_meter import DriftMeter, Signature, measure_record
from monitor.observe.units import Survey
from monitor.run_state import CapturedState, begin_tree, capture_run_state
from monitor.save.async_copy import AsyncCopy
from monitor.save.encode import SavePacking, StagedUnit, encode_unit
from monitor.save.self_check import SelfCheck
from store.catalog import Catalog
from store.commit import Expected, commit, hint_latest, wait_for_group
from store.encoding import encoding_named
from store.errors import DamagedError, SaveError, StorageError, UnstorableError
from store.journal import prune_journal, recorded
from store.names import JOURNAL, RAW, SaveId, Unit, segment_dir
from store.retention import PrunePlan, Retention, bytes_to_free, execute, keep_named_weights, plan_prune, remove_failed
from store.schema import MeasureRecord
from store.segment import SegmentDraft, remove_segment, write_segment
from store.session import require_present
from store.storage.local import Files

_log = logging.getLogger("driftpoint")

Finish = Callable[[SegmentDraft], SegmentDraft]  # adds the run state, which was captured before


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
    """Progress of a save. Written by the background thread, read by the training thread once the save is finished."""

    metered: set[Unit] = field(default_factory=set)
    """Units whose copies the meter holds until the save is settled. A save may fail before it has all of them."""
    signatures: dict[Unit, Signature] = field(default_factory=dict)
    """Signatures of the staged values that were measured in the background thread."""
    attempted: bool = False  # the manifest may exist, even if an error was raised
    prepared: PreparedCommit | None = None  # the commit, once it is durable
    short: bool = False  # whether, with differences, fewer than two full saves fit after pruning
    write_seconds: float = 0.0  # time to write the segment, from the first byte encoded to the last one durable


@dataclass(frozen=True)
class SaveTask:
    """One save on one rank. ``segment`` has no fragments yet; they come from ``staged``. ``finish`` adds the run state.

    If the state could not be copied or captured, ``failure`` is the error, and nothing is written."""

    files: Files
    segment: SegmentDraft
    finish: Finish
    staged: Sequence[StagedUnit]
    copying: AsyncCopy
    meter: DriftMeter
    packing: SavePacking
    commit_plan: CommitPlan | None
    failure: Exception | None
    check: SelfCheck | None = None
    notes: tuple[str, ...] = ()  # why no state of this step is exact
    beside: Beside = alone
    owner: object = None  # stays alive until the save is over
    progress: Progress = field(default_factory=Progress)

    def meter_stage(self, unit: StagedUnit) -> None:
        """Give a unit's copies to the meter as the next drift reference."""
        self.meter.stage(unit.unit, unit.copies)
        self.progress.metered.add(unit.unit)


@dataclass(frozen=True)
class SaveResult:
    """A finished save."""

    prepared: PreparedCommit | None  # the commit; rank 0 only
    seconds: float
    written_bytes: int = 0  # over all ranks; rank 0 only


def empty_segment(
    job: JobContext, store_id: str, save: SaveId, plan: str, differs: tuple[str, ...] = ()
) -> SegmentDraft:
    """Return this rank's segment without its fragments and the run state."""
    rank, world_size = job.group.rank, job.group.world_size
    return SegmentDraft(store_id, save, rank, world_size, plan, (), None, (), {}, differs)


def require_storable(job: JobContext, store_id: str, survey: Survey, whole: bool) -> None:
    """Raise on all ranks if a part of the job can never be stored. Collective. whole: whether no rank has trouble now.

    Raises UnstorableError for a tensor of a type that no save can hold, UnsupportedError for such a run state."""

    def check() -> None:
        if survey.trouble is not None and survey.permanent:
            raise UnstorableError(survey.trouble)
        if whole:
            segment, finish = begin_run_state(empty_segment(job, store_id, SaveId(0, 1), ""), job)
            finish(segment)

    job.rank_buffers.compare()
    run_on_all_ranks(job.group, check)


def begin_run_state(
    segment: SegmentDraft, job: JobContext, captured: Callable[[CapturedState], None] = lambda _: None
) -> tuple[SegmentDraft, Finish]:
    """Add the layout, on rank 0, and capture the run state. Return also a function that encodes it and adds it.

    Any thread may call that. Call ``job.rank_buffers.compare()`` before, on all ranks. Raises any exception of the
    user's objects. captured: called with the run state."""
    state = capture_run_state(job.adapter, job.user, segment.rank, job.rank_buffers)
    captured(state)
    encode = Once(begin_tree(state))
    facts = job.adapter.layout_facts() if segment.rank == 0 else {}

    def finish(draft: SegmentDraft) -> SegmentDraft:
        tree, leaves = encode()
        return replace(draft, run_state=tree, run_leaves=leaves)

    return replace(segment, facts=facts), finish


def run_save(task: SaveTask) -> SaveResult:
    """Run a save. If it raises a DriftpointError, no commit was acknowledged."""
    began = time.monotonic()
    with closing(task.copying):
        task.copying.finish(task.beside)
        task.copying.require_whole()
        if task.failure is not None:
            raise task.failure
        require_present(task.files, task.segment.save.epoch)
        units = [_Encoding(task, unit) for unit in task.staged]
        segment = task.finish(replace(task.segment, fragments=[one for unit in units for one in unit.fragments]))
        differs = segment.differs if task.check is None else task.check.compare(segment, task.staged)
        segment = replace(segment, differs=(*task.notes, *differs))
        written = time.monotonic()
        write = partial(write_segment, task.files, segment, lambda: [unit.record() for unit in units])
        task.beside([unit.record for unit in units if not unit.lossy], write)
        task.progress.write_seconds = time.monotonic() - written
    if task.commit_plan is None:
        return SaveResult(None, time.monotonic() - began)
    return _commit(task, task.commit_plan, began)


def check_after_commit(task: SaveTask) -> None:
    """Read the segment back and compare it with the live state, if this save is to be checked."""
    if task.check is not None and task.progress.write_seconds > 0.0:
        task.check.read_back(task.files, task.segment.store_id, task.segment.rank)


def prune_after_commit(task: SaveTask, epoch: int) -> None:
    """Update LATEST and prune, if :func:`run_save` committed. ``epoch``: the job's newest. Rank 0 only.

    Raises SaveError with all problems. The commit stands in any case, and the next save tries again."""
    prepared, commit_plan, notes = task.progress.prepared, task.commit_plan, []
    if prepared is None or commit_plan is None or commit_plan.give_up.is_set():  # or the job went back meanwhile
        return
    try:
        hint_latest(task.files, prepared.manifest.save)
    except StorageError as error:
        notes.append(f"LATEST was not updated: {error}")
    try:
        prune(task.files, commit_plan.catalog, commit_plan.retention, epoch)
        if task.packing.differences:
            task.progress.short = bytes_to_free(commit_plan.catalog, commit_plan.retention, saves=2) > 0
    except (SaveError, StorageError, DamagedError) as error:
        notes.append(f"pruning stopped: {error}")
    if notes:
        raise SaveError("; ".join(notes))


def make_room(task: SaveTask, epoch: int) -> None:
    """Free what the next save needs, after this one failed because the disk was full. Rank 0 only.

    Also if its manifest was attempted: a full disk may hold the segments only. ``epoch``: the job's newest. The journal
    goes first: it cannot go on there, nor does it help if no save succeeds any more."""
    plan = task.commit_plan
    if plan is not None:
        draft, journal = plan.draft, task.files.below(JOURNAL)
        remove_failed(task.files, draft.save, epoch)
        freed = bool(recorded(journal))
        prune_journal(journal, task.files, epoch, draft.save.step)
        retention = replace(plan.retention, max_share=None)  # what the save lacked, and no more
        groups = frozenset(map(SaveId.parse, draft.groups))
        prune(task.files, plan.catalog, retention, epoch, failed=not freed, continued=draft.previous, groups=groups)


def prune(
    files: Files,
    catalog: Catalog,
    retention: Retention,
    epoch: int,
    *,
    failed: bool = False,
    continued: SaveId | None = None,
    groups: frozenset[SaveId] = frozenset(),
) -> None:
    """Delete what retention does not keep, and more if another full save does not fit. Log a warning then.

    Drops records that are not needed any more from the catalog's cache. ``failed``: whether a save failed because the
    disk was full. The commit that the job continues (``continued``) and the segment groups that its next commit refers
    to (``groups``) are not deleted. Raises SaveError if nothing may be deleted, because a commit cannot be read."""
    wanted, without_share = bytes_to_free(catalog, retention, failed=failed), replace(retention, max_share=None)
    lacking = bytes_to_free(catalog, without_share) if wanted else 0
    if lacking:
        before = catalog.manifest(catalog.saves()[0]).oldest.step  # the newest commit needs no record up to here
        prune_journal(files.below(JOURNAL), files, epoch, before)
        wanted, lacking = bytes_to_free(catalog, retention, failed=failed), bytes_to_free(catalog, without_share)
    fits, unexplained = not (failed or lacking), failed and not lacking
    least = 2 if fits else 1  # for the share of the disk alone, no bit rot may cost the only commit
    plan = plan_prune(catalog, retention, epoch, wanted, continued, commits=catalog.survey, groups=groups, least=least)
    execute(files, plan)
    catalog.retain(plan.keep[-1:])
    if plan.blocked:
        raise SaveError(plan.blocked)
    name = f"driftpoint-weights-{catalog.store_id}"
    if plan.to_copy and all(thread.name != name for thread in threading.enumerate()):  # no save waits for it
        run_in_background(name, partial(_keep_weights, catalog, plan))
    place = getattr(files, "root", "the store")
    why = "would take more than its share of the disk" if fits else "has too little room for another full save"
    why = "refused a save for want of room, which its free space does not show (a quota?)" if unexplained else why
    if plan.given_up:
        _log.warning(
            "%s %s: deleted the commits of steps %s, which `retention:` keeps otherwise; %d bytes freed. Free space "
            "or keep fewer commits",
            *(place, why, ", ".join(str(save.step) for save in plan.given_up), plan.freed_bytes),
        )
    if failed and plan.freed_bytes < wanted:
        missing = wanted - plan.freed_bytes
        more = "" if unexplained else f". A save needs about {missing} bytes more: free space on that disk"
        text = "%s %s; no more can be deleted: it holds the newest commit and the last one resumed from (steps %s) only"
        text += "%s"
        _log.warning(text, place, why, ", ".join(str(save.step) for save in plan.keep), more)


def _keep_weights(catalog: Catalog, plan: PrunePlan) -> None:
    for problem in keep_named_weights(catalog, plan):
        _log.warning("%s", problem)


def discard(files: Files, save: SaveId, rank: int) -> None:
    """Remove this rank's files of a failed save that no manifest can refer to.

    On a disk that is nearly full, the files of failed saves would make the next ones fail too."""
    try:
        require_present(files, save.epoch)
    except StorageError:  # the store is away; at its path may be another one, with a commit of this name
        return
    remove_segment(files, save, rank)
    with suppress(StorageError):  # other ranks' files may still be there
        files.remove_dir(segment_dir(save))


class _Encoding:
    """Encodes a unit into the segment, and measures it before and after."""

    def __init__(self, task: SaveTask, unit: StagedUnit) -> None:
        unit = unit._replace(copies=tuple(late.copy for late in unit.late) or unit.copies)
        self._task, self._unit, self._before = task, unit, unit.measure
        if not encoding_named(unit.encoding).lossless and self._before is None:
            self._before = self._measure_copies()  # later the copies hold decoded values
        healthy = self._before is None or self._before.finite
        encoding = unit.encoding if healthy else RAW  # non-finite values are never committed
        sources = unit.late or unit.encoded or unit.copies
        encoded = encode_unit(unit.unit, encoding, unit.fragments, sources, task.packing)
        self.fragments, self._lost, self._bases = encoded.fragments, encoded.lost, encoded.bases
        self.lossy = encoded.lossy  # writing its fragments changes the copies
        self.record = Once(self._measure)
        if unit.late and unit.unit not in task.progress.metered:
            unit.late[-1].written, self.lossy = self.record, True  # measure before other units reuse the memory

    def _measure(self) -> MeasureRecord:
        """Return the unit's record for the part, after its fragments are written. Copies become the reference."""
        if self.lossy:
            self._task.meter.measure(self._unit.unit, self._unit.copies)  # the signature of the decoded values
        elif self._before is None:
            self._before = self._measure_copies()
        assert self._before is not None
        if self._unit.unit not in self._task.progress.metered:
            self._task.meter_stage(self._unit)
        return self._before.replace(**vars(self._lost), bases=self._bases)

    def _measure_copies(self) -> MeasureRecord:
        measure = self._task.meter.measure(self._unit.unit, self._unit.copies)
        if measure.signature is not None:
            self._task.progress.signatures[self._unit.unit] = measure.signature
        return measure_record(self._unit.unit, measure)


def _commit(task: SaveTask, commit_plan: CommitPlan, began: float) -> SaveResult:
    segment = task.segment
    expected = Expected(segment.store_id, segment.save, segment.world_size, segment.plan)
    group = wait_for_group(task.files, expected, commit_plan.timeout, aborted=commit_plan.give_up.is_set)
    prepared = build_manifest(commit_plan.draft, group)
    task.progress.attempted = True
    commit(task.files, prepared.manifest)
    prepared.manifest.versions  # noqa: B018 - listed here, not in the training thread
    task.progress.prepared = prepared
    return SaveResult(prepared, time.monotonic() - began, group.record.payload_bytes)
