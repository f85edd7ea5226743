"""Saves, as the training thread sees them: begin one, and later learn what became of it.

One save at a time. Ranks learn each other's state through one small reduction at the next decision; nothing
else is exchanged. The background thread owns staged copies from :meth:`Saver.begin` until the save is finished.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from monitor.background import BackgroundWorker, TaskResult
from monitor.context import JobContext
from monitor.distributed import run_on_rank0
from monitor.events import BackgroundFailureEvent, CommitEvent, SaveBeginEvent, SaveFailedEvent
from monitor.ledger import CommitDraft, JobFacts, PreparedCommit
from monitor.observe.drift_meter import Signature
from monitor.observe.units import LocalUnit
from monitor.run_state import capture_run_state, to_tree
from monitor.save.encode import Packer, SavePacking
from monitor.save.save_task import (
    CommitPlan,
    SaveResult,
    SaveTask,
    StagedUnit,
    Stager,
    discard,
    encoded_bytes,
    prune_after_commit,
    run_save,
)
from monitor.save.staging import AsyncCopy
from monitor.save.store_session import StoreSession
from monitor.types import DecisionResult
from store.encoding import encoding_named
from store.errors import ExistsError, FencedError, StoreError, UnsupportedError, UsageError
from store.names import Fragment, SaveId, Unit
from store.schema import digest, seal
from store.segment import SegmentDraft
from store.session import claim_epoch, require_newest
from store.storage.local import LocalFiles

_log = logging.getLogger("driftpoint")


@dataclass(frozen=True)
class SaveStatus:
    """How things stand over all ranks. skip: why no save may begin now. changed: some rank's pieces changed."""

    skip: str | None
    changed: bool


@dataclass(frozen=True)
class _Pending:
    number: int
    job: SaveTask
    saved: frozenset[Unit]

    @property
    def save(self) -> SaveId:
        return self.job.segment.save


class Saver:
    """Begins saves and settles them."""

    def __init__(self, job: JobContext, opened: StoreSession) -> None:
        self._job = job
        self._group = job.group
        self._meter = job.meter
        self._listeners = job.listeners
        self._opened = opened
        self._facts = JobFacts(
            store_id=opened.catalog.store_id,
            framework=job.adapter.framework,
            policy=job.policy.name,
            layers=job.table.layer_records(),
            tensors=job.table.tensor_records(),
        )
        self._stager = Stager(job.meter, job.config.encode)
        self._packer = Packer(job.config.packing, job.config.differences)
        self._began: float | None = None
        self._writer: BackgroundWorker[SaveResult | None] = BackgroundWorker(f"driftpoint-writer-{job.group.rank}")
        self._pending: _Pending | None = None
        self._outcome: TaskResult[SaveResult | None] | None = None
        self._copying: AsyncCopy | None = None
        staging = job.config.staging
        self._lazy = staging == "lazy" or (staging == "auto" and job.adapter.state_is_private)
        self._upkeep: dict[int, str] = {}
        self._fenced = self._failed = False
        job.adapter.before_update(self._before_update)
        self._highest_step = self._highest_kept = -1
        self._root = opened.files.root if isinstance(opened.files, LocalFiles) else None
        self._look_at_room()

    @property
    def lazy(self) -> bool:
        """Whether copies are made beside the next forward and backward."""
        return self._lazy

    @property
    def under_way(self) -> bool:
        """Whether a save began and is not settled. Alike on all ranks."""
        return self._pending is not None

    def reserve(self, local: Mapping[Unit, LocalUnit]) -> None:
        """See :meth:`monitor.save.save_task.Stager.reserve`."""
        self._stager.reserve(local)

    def lend(self, local: Mapping[Unit, LocalUnit]) -> Mapping[Fragment, torch.Tensor]:
        """See :meth:`monitor.save.save_task.Stager.lend`."""
        return self._stager.lend(local)

    def keep(self, local: Mapping[Unit, LocalUnit], buffers: Mapping[Fragment, torch.Tensor]) -> None:
        """See :meth:`monitor.save.save_task.Stager.keep`."""
        self._stager.keep(local, buffers)

    def went_back(self) -> None:
        """The job was brought to a commit: what this process saved since, or finds damaged now, is no base any more."""
        self._packer.reset()

    def settle(self, step: int, changed: bool, trouble: bool = False) -> SaveStatus:
        """Learn how the save under way stands, on all ranks, and move the references if it is committed. Collective.

        trouble: this rank's part of the job cannot be saved as it is now."""
        self._collect()
        pending, outcome = self._pending, self._outcome
        busy = pending is not None and outcome is None
        failed = outcome is not None and outcome.error is not None
        newest, oldest, *flags = self._group.all_reduce_max([step, -step, busy, failed, changed, self._fenced, trouble])
        any_busy, any_failed, any_changed, fenced, unsupported = (bool(flag) for flag in flags)
        if any_busy:
            if any_failed and pending is not None and pending.job.committing is not None:
                pending.job.committing.give_up.set()  # a rank cannot deliver: rank 0 need not wait for it
            return SaveStatus("unsupported" if unsupported else "busy", any_changed)
        self._listeners.on_settled({} if pending is None else self._finish(pending, outcome))
        if newest != -oldest:
            return SaveStatus("disagree", any_changed)
        return SaveStatus("unsupported" if unsupported else "fenced" if fenced else None, any_changed)

    def begin(self, step: int, decided: DecisionResult, local: Mapping[Unit, LocalUnit]) -> int:
        """Copy what was decided and hand it to the background thread. Returns the bytes copied on this rank."""
        self._highest_step = max(step, self._highest_step)
        save = SaveId(step, self._opened.epoch)
        copying = AsyncCopy()
        staged = tuple(
            self._stager.stage(local[unit], choice.encoding or "", decided.mine.get(unit), copying)
            for unit, choice in decided.saved.items()
            if unit in local
        )
        copying.start()
        if not self._lazy:
            copying.finish()
        committing = None
        if self._group.rank == 0:
            committing = self._committing(save, decided)
            first = self._job.ledger.newest is None
            self._listeners.on_save_begin(SaveBeginEvent(step, decided, self._job.table.sizes, first))
        segment, unstorable = self._segment(save, decided)
        packing = self._packing(save, staged, decided)
        job = SaveTask(self._opened.files, segment, staged, copying, self._meter, packing, committing, unstorable)
        for unit in staged:
            if unit.measure is not None and encoding_named(unit.encoding).lossless:
                job.meter_stage(unit)
        self._outcome = None
        self._copying = copying
        self._pending = _Pending(self._writer.submit(lambda: run_save(job)), job, frozenset(decided.saved))
        if committing is not None:
            self.upkeep(lambda: prune_after_commit(job), f"tidying up after the commit of step {step}")
            self._look_at_room()
        return sum(copy.numel() * copy.element_size() for unit in staged for copy in unit.copies)

    def claim_name(self, step: int, *, kept: bool = False) -> str | None:
        """Make sure that a save of ``step`` gets a name that was never used. Why it cannot, else None. Collective.

        kept: of a version in memory. A save may bear the name of one, since it is of the same state; but once the job
        went back behind one, it is of another."""
        used = step <= self._highest_kept if kept else step < self._highest_kept
        if step > self._highest_step and not used:
            return None
        try:
            self._renew_epoch()  # the job went back, or saves a step anew: newer has to mean a later epoch then
            self._highest_step = self._highest_kept = -1
            self._listeners.on_epoch(self._opened.epoch)
        except FencedError:
            self._fenced = True
            return "fenced"
        except StoreError as error:
            _log.warning("%s", error)
            return "storage"
        return None

    def kept(self, step: int) -> None:
        """A version of ``step`` goes into memory."""
        self._highest_kept = max(step, self._highest_kept)

    def upkeep(self, job: Callable[[], None], what: str) -> None:
        """Do something small in the background; failing, it is reported and costs nothing else."""

        def work() -> None:
            job()

        self._upkeep[self._writer.submit(work)] = what

    @property
    def failed(self) -> bool:
        """Whether the save that this rank settled or finished last failed."""
        return self._failed

    @property
    def newest(self) -> SaveId | None:
        """Rank 0: the newest commit of the job, settled or not."""
        self._collect()
        saved = None if self._outcome is None else self._outcome.result
        if self._pending is not None and saved is not None and saved.drawn is not None:
            return self._pending.save
        return self._job.ledger.newest

    def wait(self, timeout: float) -> bool:
        """Wait for the save under way on this rank, not for what is tidied up after it; not collective.

        Whether it is over, whatever became of it."""
        over = self._pending is None or self._writer.wait(self._pending.number, timeout)
        self._collect()
        return over

    def flush(self, timeout: float) -> None:
        """Wait for the save under way on this rank, and for upkeep; not collective. Rank 0 waits for the commit."""
        if not self._writer.join(timeout) and self.wait(0.0):
            message = f"upkeep of the store is not finished after {timeout:.0f} s, and is left to the next job"
            self._listeners.on_background_failure(BackgroundFailureEvent("close_timeout", message))
        elif not self.wait(0.0):
            message = (
                f"the save of step {self._pending.save.step if self._pending else '?'} is not finished after "
                f"{timeout:.0f} s and is given up; the commit before it is intact"
            )
            self._listeners.on_background_failure(BackgroundFailureEvent("close_timeout", message, severe=True))
        self._collect()

    def copied(self) -> None:
        """Have the copies of the save under way made, whoever makes them."""
        if self._copying is not None:
            self._copying.finish()

    def close(self, timeout: float, clean: bool) -> None:
        """Wait for the save under way, tell what became of it, and let go of the store. clean: the job ends as it was
        meant to."""
        if clean and self._opened.incarnation is not None:
            self.upkeep(self._opened.mark_closed, "noting that the job was closed")
        self.flush(timeout)
        if self._pending is not None and self._outcome is not None:
            self._told(self._pending, self._outcome)
            self._pending = None
        self._writer.stop()
        self._opened.release()

    def _look_at_room(self) -> None:
        root = self._root
        if root is not None and self._group.rank == 0:
            self.upkeep(lambda: self._listeners.on_store_check(root), f"asking how much room {root} has")

    def _renew_epoch(self) -> None:
        store_id, files = self._opened.catalog.store_id, self._opened.files

        def claim() -> tuple[int, str]:
            require_newest(files, self._opened.epoch)
            record = claim_epoch(files, store_id, self._opened.incarnation)
            return record.epoch, record.token

        self._opened.epoch, self._opened.token = run_on_rank0(self._group, claim)

    def _before_update(self) -> None:
        """An optimizer step is about to change the state: what is not copied yet must be waited for."""
        copying, self._copying = self._copying, None
        if copying is not None:
            began = time.perf_counter()
            copying.finish()
            self._listeners.on_copy_wait(time.perf_counter() - began)

    def _collect(self) -> None:
        for done in self._writer.finished():
            if self._pending is not None and done.number == self._pending.number:
                self._outcome = done
                self._failed = done.error is not None
                self._fenced = self._fenced or isinstance(done.error, FencedError)
            elif done.error is not None:
                message = f"{self._upkeep.get(done.number, 'upkeep')} failed: {done.error}"
                self._listeners.on_background_failure(BackgroundFailureEvent("upkeep", message, done.error))
            self._upkeep.pop(done.number, None)

    def _finish(self, pending: _Pending, outcome: TaskResult[SaveResult | None] | None) -> Mapping[Unit, Signature]:
        """Move the references if the save is committed. Return the signatures of what it staged. Collective."""
        drawn = self._told(pending, outcome) if outcome is not None else None
        early = {unit.unit: unit.signature for unit in pending.job.staged if unit.signature is not None}
        reached = tuple(self._job.ledger.groups)
        news = (drawn is not None, drawn.dropped if drawn else (), pending.job.progress.attempted, reached)
        committed, dropped, attempted, reached = self._group.broadcast(news)
        moved_units = pending.saved - set(dropped) if committed else frozenset()
        took = pending.job.progress.write_seconds
        self._packer.settle(pending.job.packing, took, moved_units.__contains__, frozenset(reached))
        for unit in pending.job.staged:
            settled = unit.unit in pending.job.progress.metered
            moved = committed and unit.unit not in dropped
            self._stager.unstage(unit, self._meter.settle(unit.unit, moved) if settled else unit.copies)
        if committed:
            self._job.table.lost -= pending.saved - set(dropped)
        elif not attempted and not (outcome is not None and isinstance(outcome.error, ExistsError)):
            files, save, rank = self._opened.files, pending.save, self._group.rank
            self.upkeep(lambda: discard(files, save, rank), f"removing what the failed save of step {save.step} left")
        self._pending = self._outcome = None
        return {**early, **pending.job.progress.signatures}

    def _packing(self, save: SaveId, staged: Sequence[StagedUnit], decided: DecisionResult) -> SavePacking:
        now, before = time.monotonic(), self._began
        self._began = now
        nbytes = sum(encoded_bytes(unit) for unit in staged)
        interval = 0.0 if decided.preempted else now - before if before else None  # no time to lose: the quickest
        return self._packer.begin(save, nbytes, interval, lasting=not decided.forced)

    def _told(self, pending: _Pending, outcome: TaskResult[SaveResult | None]) -> PreparedCommit | None:
        """Advance the ledger to the commit, or report the failure. Return the commit, on rank 0."""
        saved, step = outcome.result, pending.save.step
        if self._group.rank != 0:
            if outcome.error is not None:
                self._listeners.on_save_failed(SaveFailedEvent(step, outcome.error))
            return None
        if saved is None or saved.drawn is None:
            self._listeners.on_save_failed(SaveFailedEvent(step, outcome.error))
            return None
        ledger = self._job.ledger
        staleness = {unit: ledger.staleness(unit, step) for unit in saved.drawn.drift}
        ledger.advance(saved.drawn.manifest)
        self._listeners.on_commit(CommitEvent(saved.drawn, saved.seconds, saved.written_bytes, staleness))
        return saved.drawn

    def _segment(self, save: SaveId, decided: DecisionResult) -> tuple[SegmentDraft, UsageError | None]:
        """The segment without its fragments; and what in the run state cannot be stored, if anything.

        That is no reason to stop a training that runs: the save fails, and is reported like any other."""
        unstorable, facts = None, {}
        try:
            tree, leaves = to_tree(capture_run_state(self._job.adapter, self._job.user, self._group.rank))
            facts = self._job.adapter.layout_facts() if self._group.rank == 0 else {}
        except UsageError as error:
            tree, leaves, unstorable = None, [], error
        except Exception as error:  # noqa: BLE001 - the edge to the user's own objects: kept as the save's failure
            tree, leaves, unstorable = None, [], UnsupportedError(f"the run state could not be taken: {error!r}")
        plan = [save.name, [[unit.layer, unit.slot, choice.encoding] for unit, choice in decided.saved.items()]]
        segment = SegmentDraft(
            store_id=self._opened.catalog.store_id,
            save=save,
            rank=self._group.rank,
            world_size=self._group.world_size,
            plan=digest(seal(plan)),
            fragments=(),
            run_state=tree,
            run_leaves=leaves,
            facts=facts,
        )
        return segment, unstorable

    def _committing(self, save: SaveId, decided: DecisionResult) -> CommitPlan:
        draft = CommitDraft(
            facts=replace(self._facts, tensors=self._job.table.tensor_records()),
            save=save,
            world_size=self._group.world_size,
            commits=self._job.ledger.commits + 1,
            previous=self._job.ledger.newest,
            kept=self._job.ledger.kept(save.step, decided.drift, self._job.table.sizes),
            saved=decided.saved,
            sizes=self._job.table.sizes,
            groups=dict(self._job.ledger.groups),
        )
        return CommitPlan(
            draft, self._job.config.timeouts.commit, self._opened.catalog, self._job.config.retention_rule()
        )
