"""Begins saves on the training thread and settles them at the next decision.

One save at a time. Ranks exchange its outcome in one small message at the next decision, and nothing else.
The background thread owns staged copies from :meth:`Saver.begin` until the save is finished."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch

from monitor.background import BackgroundWorker, Once, TaskResult
from monitor.context import JobContext
from monitor.distributed import collect_messages
from monitor.events import BackgroundFailureEvent, CommitEvent, SaveBeginEvent, SaveFailedEvent
from monitor.ledger import AS_RESUMED, CommitDraft, PreparedCommit
from monitor.observe.drift_meter import Signature
from monitor.observe.units import LocalUnit, Survey
from monitor.save import save_task
from monitor.save.async_copy import CopyTiming, UnfinishedCopy, WaveCopy
from monitor.save.encode import Packer, SavePacking, StagedUnit, encoded_bytes
from monitor.save.save_task import CommitPlan, Finish, SaveResult, SaveTask
from monitor.save.self_check import SelfChecker
from monitor.save.staging import Stager
from monitor.save.store_session import StoreSession
from monitor.types import Chosen, DecisionResult, SaveStatus, newest_text
from store import errors
from store.certificate import Certificate
from store.encoding import encoding_named
from store.names import SaveId, Unit
from store.schema import digest, seal
from store.segment import SegmentDraft
from store.storage.local import LocalFiles

_log = logging.getLogger("driftpoint")

_MEETING = 0.5  # seconds until ranks that wait for a commit tell each other whether their part failed


class _Outcome(NamedTuple):
    """What rank 0 knows of a finished save."""

    committed: bool
    dropped: tuple[Unit, ...]  # units with NaN or Inf
    attempted: bool  # the manifest may exist
    short: bool  # the next save should be whole, while there is room for it
    groups: tuple[str, ...]  # segment groups that the next commit may refer to


class _RankStatus(NamedTuple):
    """What a rank tells the others before the next save."""

    step: int
    busy: bool
    failed: bool
    full: bool  # the disk
    torn: bool
    changed: bool
    fenced: bool
    trouble: bool
    back: bool
    buffers: int  # hash of the persistent buffers
    trained: tuple[str, str, str, str]  # see RankComparison
    outcome: _Outcome | None  # on rank 0
    proposed: Chosen | None  # on rank 0, what it chose for the next save


@dataclass(frozen=True)
class _Pending:
    number: int
    task: SaveTask
    saved: frozenset[Unit]
    abandoned: bool = False  # the job went back to an earlier step
    reported: bool = False

    @property
    def save(self) -> SaveId:
        return self.task.segment.save


class Saver:
    """Begins and settles the saves of one rank."""

    def __init__(self, job: JobContext, session: StoreSession) -> None:
        self._job, self._group = job, job.group
        self._meter, self._listeners = job.meter, job.listeners
        self.owner: object = None  # stays alive while a save is under way, so that it can be waited for at exit
        self._session = session
        self._stager, self._packer = Stager(job.meter, job.config), Packer(job.config.packing, job.config.differences)
        self._began: float | None = None
        self._writer: BackgroundWorker[SaveResult | None] = BackgroundWorker(f"driftpoint-writer-{job.group.rank}")
        self._mover: BackgroundWorker[None] = BackgroundWorker(f"driftpoint-pages-{job.group.rank}")
        self._pending: _Pending | None = None
        self._outcome: TaskResult[SaveResult | None] | None = None
        self.copy_timing = CopyTiming(job.config.copies.mode, private=job.adapter.state_is_private)
        self._upkeep: dict[int, tuple[str, int]] = {}  # names and epochs of short jobs, by number
        self._fenced = self._committed = self._closing = self.preempted = False
        self._renewing, self._back, self._stepped = not session.claimed, False, 0
        self._failure: str | None = None
        self._buffers: Sequence[int] = ()  # of all ranks, hashes at the last :meth:`settle`
        self.checker = SelfChecker(job)
        self.dropped: tuple[Unit, ...] = ()  # units with NaN or Inf, left out of the save settled last; on all ranks
        self.changed_at: int | None = None  # step of the last save whose state changed under it; on all ranks
        self._copies = UnfinishedCopy(job.adapter, job.listeners.on_copy_wait)
        self._notes: tuple[str, ...] = ()  # why nothing is exact that is saved now
        job.adapter.before_update(self._updated)
        self._highest_step, self._highest_snapshot, self._retention = -1, -1, job.config.retention_rule()
        self._root = session.files.root if isinstance(session.files, LocalFiles) else None
        self._check_free_space()

    @property
    def in_progress(self) -> bool:
        """Whether a save began and is not settled. The same on all ranks."""
        return self._pending is not None

    @property
    def task(self) -> SaveTask | None:
        """The save that began and is not settled. One on each rank, or none on any."""
        return None if self._pending is None else self._pending.task

    def take_dropped(self) -> tuple[Unit, ...]:
        """Return :attr:`dropped` once, so that a decision hears of it and the next one does not."""
        dropped, self.dropped = self.dropped, ()
        return dropped

    def keep_buffers(self) -> None:
        """Keep buffers from now on: no memory is lent any more."""
        self._stager.keeps = True

    def reserve(self, local: Mapping[Unit, LocalUnit]) -> None:
        """Allocate the staging buffers. Raises SaveError if there is not enough memory."""
        try:
            self._stager.reserve(local)
        except (MemoryError, RuntimeError) as error:  # torch raises either, by device and allocator
            nbytes = sum(part.layout.nbytes for part in local.values())
            raise errors.SaveError(
                f"no memory on this rank for the copies that a save makes ({nbytes / 1e9:.1f} GB of host memory): "
                f"{error}. Give the job more memory, or run fewer ranks on this machine"
            ) from error

    def prepare_buffers(self, local: Mapping[Unit, LocalUnit]) -> None:
        """Touch the memory of the staging buffers in the background, once the state is as training begins."""
        touch = partial(self._stager.prepare, local, lambda: self.in_progress)  # a save touches what it needs
        self.upkeep(touch, "touching the memory for the copies of a save")

    def measure_later(self, measure: Callable[[], None]) -> None:
        """Measure the state in the background, at the latest before it changes or the next decision."""
        once = Once(measure)
        self._copies.set(once)
        self.upkeep(once, "measuring the resumed state")

    def stepped(self, step: int) -> None:
        """Take note of an optimizer step."""
        self._collect()
        self.checker.ranks.stepped(step)
        back, over = step <= self._stepped, self._outcome
        if over is not None and (back or over.error is not None):  # commits count at the next decision, on all ranks
            self._report_outcome()
        if back:  # the framework loaded an older checkpoint: what it does now needs names of its own
            self._back = True  # told at the next decision: ranks may disagree
            if over is None:  # a save that is over counts
                self._abandon()
            self._job.ledger.leave(step)
        self._stepped = step

    def resumed(self, certificate: Certificate) -> None:
        """Begin anew. No save is exact if the resume was not, until the optimizer takes a step.

        No delta is taken to an earlier save: those of this process may be abandoned or damaged."""
        self._packer.reset()
        self._stepped, self.changed_at, self.dropped = 0, None, ()
        self._notes = () if certificate.exact else (AS_RESUMED,)
        self.checker.ranks.resumed()

    def _updated(self) -> None:
        self._notes = ()

    def settle(
        self, step: int, changed: bool, trouble: bool = False, propose: Callable[[], Chosen | None] = lambda: None
    ) -> SaveStatus:
        """Finish the pending save on all ranks, and move the drift references if it is committed. Collective.

        ``changed``: whether the pieces of this rank changed. ``trouble``: whether this rank's part of the job cannot be
        saved as it is now. ``propose``: chooses what to save next, on rank 0, once the ledger is at the newest commit.
        """
        self._copies.finish()
        self._collect()
        self._report_outcome()
        rank0, pending, done = self._group.rank == 0, self._pending, self._outcome
        error = None if done is None else done.error
        status = _RankStatus(
            step=step,
            busy=pending is not None and done is None,
            failed=error is not None,
            full=isinstance(error, errors.NoSpaceError),
            torn=isinstance(error, errors.StateChangedError),
            changed=changed,
            fenced=self._fenced,
            trouble=trouble,
            back=self._back,
            buffers=self._job.rank_buffers.note(),
            trained=self.checker.ranks.trained(),
            outcome=self._outcome_of(pending, done) if pending and done and rank0 else None,
            proposed=propose() if rank0 and (pending is None or done) and not (changed or trouble) else None,
        )
        ranks = self._group.all_gather(status)
        self._renewing, self._back = self._renewing or any(one.back for one in ranks), False
        self._buffers = [one.buffers for one in ranks]
        self.checker.ranks.compare_trained([one.trained for one in ranks])
        changed, unsupported = any(one.changed for one in ranks), any(one.trouble for one in ranks)
        if pending is not None and any(one.torn for one in ranks):
            self.changed_at = pending.save.step
        if any(one.busy for one in ranks):
            if pending is not None and pending.task.commit_plan is not None and any(one.failed for one in ranks):
                pending.task.commit_plan.give_up.set()  # one rank's part failed: rank 0 need not wait for it
            return SaveStatus("unsupported" if unsupported else "busy", changed)
        outcome, full = ranks[0].outcome, any(one.full for one in ranks)
        self._listeners.on_settled(self._finish(pending, done, outcome, full) if pending and done and outcome else {})
        if len({one.step for one in ranks}) > 1:
            return SaveStatus("disagree", changed)
        fenced = "fenced" if any(one.fenced for one in ranks) else None
        return SaveStatus("unsupported" if unsupported else fenced, changed, None if changed else ranks[0].proposed)

    def require_storable(self, survey: Survey, whole: bool) -> None:
        """Raise on all ranks if a part of the job can never be stored; not for trouble that may pass. Collective."""
        save_task.require_storable(self._job, self._session.catalog.store_id, survey, whole)

    def settle_commit(self, step: int, timeout: float) -> str | None:
        """Wait at most so many seconds for the pending save, and finish it on all ranks. Collective.

        The ranks meet from time to time, so that none waits for one whose part failed. Return None if it is committed,
        ``busy`` if a rank is still writing, else ``failed``."""
        until = time.monotonic() + timeout
        while True:
            self.wait(max(0.0, min(until - time.monotonic(), _MEETING)))
            if self.settle(step, False).skip != "busy":
                return None if self._committed else "failed"
            if not self._group.broadcast(time.monotonic() < until):
                return "busy"

    def abandon(self, step: int, timeout: float) -> None:
        """Finish the pending save before the job goes back. If it is not over in time, it never counts. Collective."""
        self.flush(timeout)
        if self.settle(step, False).skip == "busy":
            self._abandon()

    def _abandon(self) -> None:
        pending = self._pending
        if pending is not None and pending.task.commit_plan is not None:  # rank 0 commits
            pending.task.commit_plan.give_up.set()
            self._pending = replace(pending, abandoned=True)

    def failure(self) -> str:
        """Return why the last save failed, with the rank that says so. Collective."""
        return collect_messages(self._group, self._failure)

    def begin(
        self,
        step: int,
        decided: DecisionResult,
        local: Mapping[Unit, LocalUnit],
        lent: Mapping[Unit, list[torch.Tensor]] = MappingProxyType({}),
    ) -> int:
        """Stage the decided units and hand them to the background thread. Collective.

        ``lent``: buffers of units, until the save is settled. Returns the bytes staged on this rank."""
        self._highest_step = max(step, self._highest_step)
        save = SaveId(step, self._session.epoch)
        known = self._job.rank_buffers.every_scalar
        self.checker.compare_ranks()
        self._job.rank_buffers.compare(self._buffers if self._job.rank_buffers.every_scalar == known else ())
        staged, copying, failure = self._stager.stage_all(decided, local, lent, self.copy_timing)
        self._copies.set(copying)  # now: the next change of state completes them, even if an error follows
        plan = None
        if self._group.rank == 0:
            plan = self._commit_plan(save, decided)
            first = self._job.ledger.newest is None
            self._listeners.on_save_begin(SaveBeginEvent(step, decided, self._job.table.sizes, first))
        segment, finish, error = self._segment(save, decided)
        check = self.checker.begin(save, [local[unit] for unit in decided.saved if unit in local])
        packing = self._packing(save, staged, decided)
        notes = (*self._notes, *self.checker.ranks.unlike)
        rest = failure or error, check, notes, partial(self._writer.share, self._mover), self.owner
        task = SaveTask(self._session.files, segment, finish, staged, copying, self._meter, packing, plan, *rest)
        for unit in staged:
            if unit.measure is not None and encoding_named(unit.encoding).lossless:
                task.meter_stage(unit)
        self._outcome = None
        self._pending = _Pending(self._writer.submit(lambda: save_task.run_save(task)), task, frozenset(decided.saved))
        if plan is not None:
            what = f"tidying up after the commit of step {step}"
            self.upkeep(lambda: save_task.prune_after_commit(task, self._session.epoch), what)
            self._check_free_space()
        if check is not None:
            self.upkeep(lambda: save_task.check_after_commit(task), f"the self-check of step {step}")
        if decided.preempted:
            self.checker.stop()
        else:
            self.upkeep(partial(self._consolidate, task), "moving memory to huge pages")
        if isinstance(copying, WaveCopy) and not (copying.lazy or decided.preempted):  # then the save is waited for
            self._writer.wait(self._pending.number, 0.0)  # hands it over
            copying.let_change(self._job.config.timeouts.close if decided.forced else None)
        return sum([unit.layout.nbytes for unit in staged])

    def claim_name(self, step: int, *, snapshot: bool = False) -> str | None:
        """Ensure that the name of a save of ``step`` was never used; claim a new epoch if needed. Collective.

        A save may have the name of an in-memory snapshot of the same step, which holds the same state, unless the job
        went back to before it. ``snapshot``: whether the save is one. Returns why no name can be claimed, or None."""
        used = step <= self._highest_snapshot if snapshot else step < self._highest_snapshot
        if step > self._highest_step and not used and not self._renewing:
            return None
        if self._renewing:  # the job went back, and no delta may be taken to what it left
            self._packer.reset()
        self._renewing = True  # until it succeeds: a failed claim may have left a record, which fences this epoch
        try:
            self._session.renew(self._group)  # the job rolled back, or saves a step again: it needs a later epoch
            self._highest_step, self._highest_snapshot, self._renewing = -1, -1, False
            self._listeners.on_epoch(self._session.epoch)
        except errors.FencedError:
            self._fenced = True
            return "fenced"
        except errors.StoreError as error:
            _log.warning("%s", error)
            return "storage"
        return None

    def note_snapshot(self, step: int) -> None:
        """Record that an in-memory snapshot of ``step`` takes its name."""
        self._highest_snapshot = max(step, self._highest_snapshot)

    def upkeep(self, job: Callable[[], None], what: str) -> None:
        """Run a short job in the background. A failure is reported as "``what`` failed" and has no other effect."""
        self._upkeep[self._writer.submit(job)] = what, self._session.epoch

    @property
    def newest(self) -> SaveId | None:
        """The newest commit of the job, settled or not. Rank 0 only."""
        self._collect()
        commit = None if self._pending is None else _commit_of(self._pending, self._outcome)
        return self._job.ledger.newest if commit is None else commit.manifest.save

    def wait(self, timeout: float) -> bool:
        """Wait for the pending save on this rank, but not for upkeep. Return whether it is over. Not collective."""
        over = self._pending is None or self._writer.wait(self._pending.number, timeout)
        self._collect()
        return over

    def flush(self, timeout: float) -> None:
        """Wait for the pending save on this rank and for upkeep. Not collective. Rank 0 waits for the commit."""
        if not self._writer.join(timeout) and self.wait(0.0):
            message = f"upkeep of the store is not finished after {timeout:.0f} s, and is left to the next job"
            self._listeners.on_background_failure(BackgroundFailureEvent("close_timeout", message))
        elif not self.wait(0.0):
            step = self._pending.save.step if self._pending else "?"
            known = "" if self._group.rank else f"; {newest_text(self._job.ledger.newest)}"
            message = f"the save of step {step} is not finished after {timeout:.0f} s and is given up{known}"
            self._listeners.on_background_failure(BackgroundFailureEvent("close_timeout", message, severe=True))

    def _consolidate(self, task: SaveTask) -> None:
        """Begin to move memory to huge pages, until the save is settled or the job ends. Background thread."""
        self._mover.submit(partial(task.copying.consolidate, lambda: self._closing or self.task is not task))

    def finish_copies(self) -> None:
        self._copies.finish()
        self._copies.before_update()

    def close(self, timeout: float, clean: bool) -> None:
        """Wait ``timeout`` seconds for the pending save, report its outcome and release the store.

        ``clean``: whether the job ends as intended, so that its end is no interruption."""
        if clean and self._session.incarnation is not None:
            self.upkeep(self._session.mark_closed, "noting that the job was closed")
        self.flush(timeout)
        self._report_outcome()
        self._pending, self._closing = None if self._outcome else self._pending, True
        self._writer.stop()
        self._mover.stop()
        self._session.release()

    def _check_free_space(self) -> None:
        if (root := self._root) is not None and self._group.rank == 0:
            self.upkeep(lambda: self._listeners.on_store_check(root), f"reading the free space of {root}")

    def _collect(self) -> None:
        for moved in self._mover.finished():
            if moved.error is not None:
                message = f"work beside a save failed: {moved.error}"
                self._listeners.on_background_failure(BackgroundFailureEvent("upkeep", message, moved.error))
        for done in self._writer.finished():
            if self._pending is not None and done.number == self._pending.number:
                self._outcome = done
                self._failure = None if done.error is None else str(done.error) or repr(done.error)
                by_another = self._pending.save.epoch == self._session.epoch  # not by this job's own next epoch
                self._fenced = self._fenced or (isinstance(done.error, errors.FencedError) and by_another)
            elif done.error is not None:
                what, epoch = self._upkeep.pop(done.number, ("upkeep", -1))
                if isinstance(done.error, errors.FencedError) and epoch != self._session.epoch:
                    continue  # fenced by this job's own next epoch; the next save repeats it
                message = f"{what} failed: {done.error}"
                self._listeners.on_background_failure(BackgroundFailureEvent("upkeep", message, done.error))
            self._upkeep.pop(done.number, None)
        self.checker.collect()

    def _outcome_of(self, pending: _Pending, done: TaskResult[SaveResult | None]) -> _Outcome:
        commit = _commit_of(pending, done)
        sick = commit.dropped if commit else done.error.units if isinstance(done.error, errors.NotFiniteError) else ()
        groups, progress = commit.manifest.groups if commit else self._job.ledger.groups, pending.task.progress
        return _Outcome(commit is not None, tuple(sick), progress.attempted, progress.short, tuple(groups))

    def _finish(
        self, pending: _Pending, done: TaskResult[SaveResult | None], outcome: _Outcome, full: bool
    ) -> Mapping[Unit, Signature]:
        """Move the drift references if the save is committed. Return the signatures of staged units."""
        task, progress = pending.task, pending.task.progress
        early = {unit.unit: unit.signature for unit in task.staged if unit.signature is not None}
        self._committed, self.dropped = outcome.committed, outcome.dropped
        moved_units = pending.saved - set(outcome.dropped) if outcome.committed else frozenset()
        groups = frozenset(outcome.groups)
        self._packer.settle(task.packing, progress.write_seconds, moved_units.__contains__, groups, outcome.short)
        self._meter.settle({one.unit: one.unit in moved_units for one in task.staged if one.unit in progress.metered})
        self._stager.unstage_all(task.staged)
        self._job.table.lost -= moved_units
        if not outcome.committed:
            self.checker.repeat()
        if not outcome.committed and not outcome.attempted and not isinstance(done.error, errors.ExistsError):
            remove = partial(save_task.discard, task.files, pending.save, self._group.rank)
            self.upkeep(remove, f"removing the files of the failed save {pending.save.name}")
        if full and not outcome.committed and self._group.rank == 0:
            self.upkeep(lambda: save_task.make_room(task, self._session.epoch), "making room for the next save")
        self._pending = self._outcome = None
        return {**early, **progress.signatures}

    def _packing(self, save: SaveId, staged: Sequence[StagedUnit], decided: DecisionResult) -> SavePacking:
        before, self._began = self._began, time.monotonic()
        nbytes = sum(map(encoded_bytes, staged)) if self._job.config.packing == "auto" else 0  # chooses the level
        interval = 0.0 if decided.preempted else self._began - before if before else None  # preempted: fastest level
        alone = decided.forced and not decided.preempted  # preempted: fewer bytes matter more
        return self._packer.begin(save, nbytes, interval, lasting=not decided.forced, alone=alone)

    def _report_outcome(self) -> None:
        """Advance the ledger to the commit of a save that is over, on rank 0, or report the failure; once."""
        pending, outcome = self._pending, self._outcome
        if pending is None or outcome is None or pending.reported:
            return
        self._pending = replace(pending, reported=True)
        saved, commit, step = outcome.result, _commit_of(pending, outcome), pending.save.step
        error = errors.SaveError("the job went back to an earlier step") if pending.abandoned else outcome.error
        ledger = self._job.ledger
        if saved is None or commit is None:
            if isinstance(error, errors.MissingSegmentsError):
                ledger.drop(error.saves)
            if error is not None or self._group.rank == 0:
                self._listeners.on_save_failed(SaveFailedEvent(step, error, ledger.newest))
            return
        before = ledger.versions
        ledger.advance(commit.manifest)
        self._listeners.on_commit(CommitEvent(commit, saved.seconds, saved.written_bytes, before))

    def _segment(self, save: SaveId, decided: DecisionResult) -> tuple[SegmentDraft, Finish, errors.UsageError | None]:
        """Return the segment, what adds the run state, and the error if that cannot be captured.

        Such an error does not stop training: the save fails and is reported like any other."""
        units = [[unit.layer, unit.slot, choice.encoding] for unit, choice in decided.saved.items()]
        store_id, plan = self._session.catalog.store_id, digest(seal([save.name, units]))
        segment = save_task.empty_segment(self._job, store_id, save, plan)
        try:
            segment, finish = save_task.begin_run_state(segment, self._job, self.checker.describe)
            return replace(segment, differs=self.checker.recorded), finish, None
        except errors.UsageError as error:
            return segment, replace, error
        except Exception as error:  # noqa: BLE001 - the edge to the user's own objects: kept as the save's failure
            return segment, replace, errors.UnsupportedError(f"the run state could not be captured: {error!r}")

    def _commit_plan(self, save: SaveId, decided: DecisionResult) -> CommitPlan:
        draft = CommitDraft(
            facts=self._job.facts(self._session.catalog.store_id),
            save=save,
            world_size=self._group.world_size,
            commits=self._job.ledger.commits + 1,
            previous=self._job.ledger.newest,
            find_kept=partial(replace(self._job.ledger).kept, save.step, decided.drift, self._job.table.sizes),
            saved=decided.saved,
            sizes=self._job.table.sizes,
            groups=dict(self._job.ledger.groups),
            partial=self._job.config.bounds.nonfinite == "hold",
        )
        return CommitPlan(draft, self._job.config.timeouts.commit, self._session.catalog, self._retention)


def _commit_of(pending: _Pending, done: TaskResult[SaveResult | None] | None) -> PreparedCommit | None:
    """Return the commit that a save made, on rank 0. None if it failed, or the job went back to an earlier step."""
    return None if done is None or done.result is None or pending.abandoned else done.result.prepared
