"""Save and resume from the training loop: measure drift, decide, stage, and commit in the background.

The public methods contain collectives: the training thread of every rank calls them in the same order, except where
the docstring says otherwise. Rank 0 keeps the ledger and decides; every rank stages and writes its own segment. The
references that drift is measured against move at the next decision after a save is known to be committed."""

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from monitor.background import training_first
from monitor.context import JobContext
from monitor.decide.budget_tracker import BudgetTracker
from monitor.decide.decider import Decider
from monitor.distributed import collect_messages, run_on_all_ranks
from monitor.events import AttachEvent, DecisionEvent, MeasuredEvent
from monitor.memory.tier import MemoryTier
from monitor.observe.units import LocalUnit, Surveyor
from monitor.preemption import Preemption
from monitor.resume.journal_replay import resume_with_journal
from monitor.resume.resume import LiveState, ResumeResult, build_certificate, go_on_from, resume, resume_memory_or_store
from monitor.save.dry_run import DryRunSaver
from monitor.save.final_save import FinalSave, LastStep, at_exit, not_committed, unreachable
from monitor.save.journaled_saver import JournaledSaver
from monitor.save.saver import Saver
from monitor.save.store_session import StoreSession
from monitor.telemetry.log import NESTED, MisuseNotices, warn_of_beginning
from monitor.telemetry.metrics import Metrics
from monitor.types import DecisionResult, Preempted, SaveRequest, StepReport
from store.catalog import Catalog
from store.certificate import Certificate
from store.errors import CollectiveError, ConfigError, SaveError
from store.location import store_place
from store.names import Unit
from store.schema import without_gc

_log = logging.getLogger("driftpoint")

_ERROR_WAIT = 30.0  # seconds to wait for the save under way after an error, because other ranks may be gone


class Checkpointer:
    """Saves and resumes the state of one training job. A context manager. Create it with :func:`monitor.attach`.

    Example::

        with monitor.attach((model, optimizer), "driftpoint.yaml", state=[scheduler]) as ckpt:
            for step in range(ckpt.resume(), total_steps):
                train_one_step()
                ckpt.step()

    Attributes:
        config: The validated settings.
        metrics: Metrics of this job, served on the configured port by rank 0.
        certificate: Steps, encodings and exactness of the resumed state, on all ranks. None if nothing was resumed.
        resumed: The full result of the last resume, which ``certificate`` sums up. None if nothing was resumed.
        preempted: True once the job was preempted and the last save is done: leave the training loop."""

    def __init__(
        self,
        job: JobContext,
        metrics: Metrics,
        budget_tracker: BudgetTracker,
        opened: StoreSession | None,
        catalog: Catalog | None,
        *,
        local: Mapping[Unit, LocalUnit],
    ) -> None:
        self.config = job.config
        self.metrics = metrics
        self.certificate: Certificate | None = None
        self.resumed: ResumeResult | None = None
        self.preempted = False
        self._job = job
        self._group = job.group
        self._opened, self._catalog = opened, catalog
        self._budget_tracker = budget_tracker
        self._decider = Decider(job, budget_tracker)
        self._listeners = job.listeners
        self._pace = job.pace
        saver = None if opened is None else (JournaledSaver if job.config.journal.enabled else Saver)(job, opened)
        self._saver: Saver | DryRunSaver = saver or DryRunSaver(job)
        self._saver.owner = self
        run_on_all_ranks(job.group, lambda: self._saver.reserve(local))
        self._memory = MemoryTier(job, opened, saver) if opened and saver and job.config.memory.enabled else None
        self._surveyor = Surveyor(job.adapter, job.table)
        self._step = job.completed_steps() or 0
        self._live = LiveState()
        self._trained = False  # whether the live state may differ from every commit
        self._misuse = MisuseNotices(job.adapter, job.steps, self._group.rank, self._group.world_size)
        self._resume_called = self._checked = self._proven = self._closed = False
        self._saving_stopped = False  # a rank was late or is gone, so nothing is saved any more
        self._process = os.getpid()
        self._unregister_exit = at_exit(self._close_at_exit)
        self._preemption = Preemption(job.config.preemption, job.group, active=opened is not None)
        self._barrier = job.group.barrier(job.config.timeouts.close)
        self._attached(opened)

    def _attached(self, opened: StoreSession | None) -> None:
        """Notify the listeners and serve the metrics. Collective."""
        self._listeners.on_attach(
            AttachEvent(
                rank=self._group.rank,
                world_size=self._group.world_size,
                store=str(store_place(self.config.store_path)),
                store_id=None if opened is None else opened.catalog.store_id,
                epoch=0 if opened is None else opened.epoch,
            )
        )
        settings = self.config.metrics
        if self._group.rank == 0 and settings.enabled:
            self.metrics.serve(settings.host, settings.port, settings.security())

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the detected layers, in model order."""
        return tuple(layer.name for layer in self._job.table.layers)

    @property
    def rank(self) -> int:
        """Rank of this process in the job."""
        return self._group.rank

    @property
    def holds_commits(self) -> bool:
        """Whether the store contained commits when the job attached to it."""
        return self._opened is not None and self._opened.newest is not None

    @without_gc(lasting=True)
    def resume(self, *, step: int | None = None, memory: bool = True) -> int:
        """Load the newest resumable state into the model, the optimizer and the objects in ``state=[...]``.

        An in-memory snapshot is used if it is newer than the newest commit. A damaged fragment falls back to an older
        version. Call it before the first :meth:`step`; this is required if the store contains commits. Collective.

        Args:
            step: Go back to this step, exactly: of a commit, or one that the journal leads to. Commits it at once.
            memory: Whether to use in-memory snapshots. False reads the store only, and drops newer ones.

        Returns:
            The step to continue from. Without a commit, the steps taken so far: 0 in a new job. Otherwise the step of
            the commit; if its weights come from several steps, the saved step closest to their effective step.

        Raises:
            ConfigError: The checkpointer is closed.
            NothingToResumeError: The store contains commits, but none is complete or leads to ``step``.
            ModelMismatchError: The stored tensors or optimizer do not match this job.
            UsageError: An object in ``state=[...]`` rejects its saved state.
            DamagedError: Ranks could not read the records of the commit.
            StorageError: Ranks do not see the same store, or storage failed.

            These are raised on all ranks and leave the job unchanged. After any other DriftpointError call it again."""
        self._require_open()
        if self._resume_called:  # the save under way may belong to a branch that this resume leaves
            self.copied()
            self._saver.abandon(self._step, self.config.timeouts.close)
        job, result = self._job, None
        if self._catalog is not None:
            snapshot = self._memory.find(self._catalog) if memory and step is None and self._memory else None
            attempt = partial(resume, adapter=job.adapter, group=self._group, user=job.user, live=self._live)
            attempt = partial(attempt, settings=self.config.resume)
            follow = partial(resume_with_journal, job, self._live, step=step)
            either = follow if job.config.journal.enabled or step is not None else resume_memory_or_store
            result = either(attempt, self._catalog, snapshot)
        self._resume_called = True
        self._trained = result is not None and (result.memory is not None or result.replayed > 0)
        self._misuse.restart()
        self._misuse.resumed(sys._getframe(2), job.user.objects)  # below the decorator's frame
        self._pace.restart()
        with job.adapter.cache_lookups():
            self._surveyor.mark()
            local = job.table.local()
        if result is not None and self._catalog is not None:
            self._adopt(result, self._catalog, local)
        self._begin(result, local)
        if step is not None:
            self.save(wait=True)
        return self._step

    def _adopt(self, result: ResumeResult, catalog: Catalog, local: Mapping[Unit, LocalUnit]) -> None:
        """Count steps and measure drift from the resumed state."""
        self.resumed = result
        self._step = result.resume_point.save.step
        self.certificate = build_certificate(result)
        self._saver.resumed(self.certificate)
        self._job.rank_buffers.every_scalar = any("/" in name for name in result.resume_point.state.rank_buffers)
        go_on = partial(go_on_from, needs_drift=self._decider.sees_all, measure_later=self._saver.measure_later)
        go_on(result, self.certificate, self._job, catalog, local)

    def step(self) -> StepReport | None:
        """Count an optimizer step; if a decision is due (``every``), decide what to save and begin the save.

        Call it after every optimizer step. It copies what the policy chose and returns; writing happens in the
        background. It waits for storage only under ``staging: {max_bytes}``, and when the job is preempted: then all
        ranks save as much as the grace period allows. Collective.

        A rank that is late beyond the timeout of the job's process group raises nothing: an error is logged, and the
        job trains on, but saves nothing more until it is restarted (``skipped="unreachable"``).

        Returns:
            The decision; None if none was due. If it has ``preempted`` set, leave the training loop.

        Raises:
            Preempted: The job was preempted and the last save is done. Uncaught, it ends the process with code 75.
            UnsupportedError: At the first decision, the state has a part that no save can hold.
            NotFiniteError: A layer has NaN or Inf, and ``bounds: {nonfinite: raise}`` is set.
            ConfigError: The checkpointer is closed, or the store contains commits and :meth:`resume` was not called."""
        began = time.perf_counter()
        self._require_open()
        updates = self._misuse.updates if self._job.adapter.completed_steps() is not None else 0
        self._misuse.stepped()
        counted = self._job.completed_steps()
        before, self._step = self._step, self._step + 1 if counted is None else counted
        if self._step == before and not updates:  # a micro step of gradient accumulation
            return None
        self._listeners.on_step(self._step, began)
        report = self._misuse.watched(lambda: self._on_all_ranks(partial(self._step_on_all_ranks, began), began))
        leaving = self._saving_stopped and self._preemption.requested and not self.preempted
        return self._save_and_leave() if leaving else report

    def _step_on_all_ranks(self, began: float) -> StepReport | None:
        self._require_resume_called()
        self._mark_proven()
        self._trained = True
        with self._job.adapter.cache_lookups(), without_gc(), training_first():
            self._saver.stepped(self._step)
            if not self._preemption.agreed():
                report = self._decide(None, began) if self._pace.due(self._step) else None
                if self._memory is not None and self._memory.due(self._step):
                    self._memory.snapshot(self._step, partial(self._surveyor.survey, stepped=report is None))
                return report
        return self._save_and_leave()

    def _on_all_ranks(self, action: Callable[[], StepReport | None], began: float) -> StepReport | None:
        """Run a collective action. If a rank is late or gone, stop saving, but let the job train on."""
        try:
            with self._misuse.alone() as alone:
                return action() if alone else StepReport(self._step, "busy", saved={}, problem=NESTED)
        except CollectiveError as error:
            if not (self._stop_saving(error) or self._pace.due(self._step)):
                return None
        self._pace.put_off(self._step, busy=False)
        return self._report("unreachable", began, None)

    def save(self, *, wait: bool = False, strict: bool = True) -> StepReport:
        """Save all units now, regardless of the policy and of ``every``. Collective.

        Waits, at most ``timeouts.close`` seconds, for a save under way. Layers with NaN or Inf keep their old version.

        Args:
            wait: Whether to wait, at most ``timeouts.close`` seconds, until the save is committed on all ranks.
            strict: With ``wait``, whether to raise if it is not. Otherwise a warning is logged.

        Returns:
            The decision. ``skipped`` says why no save began or, with ``wait``, why it is not committed.

        Raises:
            SaveError: With ``wait`` and ``strict``, the save is not committed, on all ranks.
            ConfigError: The checkpointer is closed, the store contains commits and :meth:`resume` was not called, or
                an optimizer step was taken without :meth:`step`."""
        self._require_open()
        save = partial(self._save_on_all_ranks, wait, strict)
        report = self._on_all_ranks(save, time.perf_counter()) or StepReport(self._step, "unreachable", saved={})
        if wait and strict and report.problem == NESTED:
            raise SaveError(f"step {self._step} is not known to be committed: {NESTED}")
        if self._saving_stopped and wait and strict and isinstance(self._saver, Saver):
            raise unreachable(self._job, self._saver, self._step, self.config.timeouts.close)
        return report

    def _save_on_all_ranks(self, wait: bool, strict: bool) -> StepReport:
        self._require_resume_called()
        if self._job.completed_steps() is None and self._misuse.updates:
            raise ConfigError(
                "save() was called between optimizer.step() and ckpt.step(), so the state would be saved under the "
                "previous step number: call ckpt.step() first"
            )
        self._step = self._job.completed_steps() or self._step
        self.flush()
        if wait and self._memory is not None:  # so that there is memory to write the save from
            self._memory.wait(self.config.timeouts.close)
        with self._job.adapter.cache_lookups(), without_gc(), training_first():
            report = self._decide(SaveRequest("asked for by save()"))
        if not wait or not isinstance(self._saver, Saver):
            return report
        if report.skipped is None:
            skipped = self._saver.settle_commit(self._step, self.config.timeouts.close)
            report = replace(report, skipped=skipped).without(self._saver.dropped)
            if skipped != "busy":
                self.flush()  # upkeep
        return report if report.skipped is None else not_committed(self._job, self._saver, report, strict)

    def commit_last_step(self) -> bool:
        """Commit the state of the last step if it is not committed yet. Return whether all of it is. Collective.

        Waits, at most ``timeouts.close`` seconds each, for the other ranks, for the save under way and for its own. If
        another rank does not come, nothing more is saved and an error is logged. :meth:`close` calls it.

        Raises:
            SaveError: The step is not committed, on all ranks. In-memory snapshots stay for the next job."""
        self._require_open()
        left = self.preempted and self.config.preemption.exit
        trained = (self._trained or self._misuse.updates) and not self._live.mixed
        if isinstance(self._saver, Saver) and trained and not left:
            counted = self._job.completed_steps()
            step, save = counted or self._step, partial(self.save, wait=True)
            last_step = LastStep(self._job, self._saver, step, self._barrier, save)
            try:
                return last_step.commit(uncounted=counted is None and self._misuse.updates > 0)
            except CollectiveError as error:
                self._stop_saving(error)
                raise unreachable(self._job, self._saver, step, self.config.timeouts.close) from error
        return not self._live.mixed

    def preempt(self) -> None:
        """Announce the end of the job, like a signal does: the next :meth:`step` makes the last save.

        For your own signal handlers and for threads that poll a cloud provider. Any thread, any rank; returns at once.

        Raises:
            ConfigError: Preemption is off (``preemption: {signals: []}``, or policy ``observe``)."""
        self._preemption.preempt()

    def flush(self) -> None:
        """Wait, at most ``timeouts.close`` seconds, until this rank has finished its part of the save under way.

        On rank 0 this includes the commit. Not collective."""
        self._saver.flush(self.config.timeouts.close)

    def copied(self) -> None:
        """Wait until the save under way has copied its tensors, so that they may be changed. Not collective.

        Optimizer steps, ``load_state_dict()``, and DeepSpeed's ``load_checkpoint`` and ``safe_set_...`` wait by
        themselves. Call it before changing the state by other means, such as writing through ``.data``."""
        self._saver.finish_copies()
        if self._memory is not None:
            self._memory.finish_copies()

    def close(self, *, save: bool = True) -> None:
        """Commit the last step (see :meth:`commit_last_step`), and release the store and the metrics port.

        If an exception is propagating (for example in ``finally:``), it saves nothing more and waits shortly for the
        save under way. In-memory snapshots stay if newer than every commit. It saves the state as it is: swap in
        averaged weights (EMA) only after it. A second call, or one in a forked child, does nothing.

        Args:
            save: Whether to commit the last step. If False, only the save under way is waited for.

        Raises:
            SaveError: The last step is not committed. All is released nevertheless."""
        self._end(clean=sys.exc_info()[0] is None, save=save)

    def _end(self, *, clean: bool, save: bool = True) -> None:
        committed = clean and not save
        try:
            if clean and save and not self._closed and os.getpid() == self._process:
                committed = self.commit_last_step()
        finally:
            self.finish(clean=committed)

    def finish(self, *, clean: bool) -> None:
        """Close with a known outcome, without another save. clean: training is complete."""
        timeout = self.config.timeouts.close
        self._close(timeout if clean else min(_ERROR_WAIT, timeout), clean=clean, ended=clean)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(clean=kind is None)

    def _close(self, timeout: float, clean: bool, ended: bool) -> None:
        """Close, if not done. clean: no error is known. ended: the job is known to end as intended."""
        if not self._closed and os.getpid() == self._process:
            self._closed = True
            self._unregister_exit()
            self._misuse.close()
            self._saver.close(timeout, clean and not self.preempted)
            needed = self._memory is not None and self._memory.close()
            self._listeners.on_close(ended and not self.preempted and not needed, timeout)
            self._preemption.close(leaving=self.preempted and self.config.preemption.exit)
            if not self._saver.in_progress and (self._memory is None or self._memory.wait(0.0)):
                for hook in self._job.adapter.hooks:  # which the framework keeps. No copy needs them any more
                    hook.call = None
            self._job.group.leave()

    def _close_at_exit(self) -> None:
        # last_value: set by an uncaught exception, but not by sys.exit(1)
        self._close(min(_ERROR_WAIT, self.config.timeouts.close), clean=not hasattr(sys, "last_value"), ended=False)

    def _save_and_leave(self) -> StepReport:
        """Make the last save of a preempted job. If the process is to exit, it exits by the deadline in any case."""
        assert isinstance(self._saver, Saver)  # preemption is off if nothing is saved
        affordable = self._budget_tracker.writing.affordable
        final_save = FinalSave(self._job, self._saver, self._step, self._decide, affordable)
        deadline = self._preemption.deadline(alone=self._saving_stopped)
        with deadline.enforced() if self.config.preemption.exit else nullcontext():
            report = final_save.run(deadline)
            self.preempted = True
            if not self.config.preemption.exit:
                return report
            self._close(deadline.to_leave, clean=False, ended=False)
        raise Preempted(report)

    def _stop_saving(self, error: CollectiveError) -> bool:
        """Leave the collectives, which fail from then on. Return False if that was done before."""
        first, self._saving_stopped = not self._saving_stopped, True
        if first:
            self._group.leave()
            self._preemption.leave()
            _log.error("step %d: nothing is saved from now on, restart the job: %s", self._step, error)
        return first

    def _require_open(self) -> None:
        if self._closed or os.getpid() != self._process:  # a fork shares the store and, by descriptors, page tracking
            raise ConfigError("this checkpointer is closed, or that of a parent process: call monitor.attach() again")

    def _require_resume_called(self) -> None:
        if self._live.mixed:
            raise ConfigError("resume() failed midway, so the live state is a mixture: call resume() again, or restart")
        if not self._resume_called and self.holds_commits:
            raise ConfigError(
                f"the store {self.config.store_path} holds commits and resume() was not called, so new saves would "
                "replace them. Begin the loop with `range(ckpt.resume(), total_steps)`, or name another `store:`"
            )
        if not self._resume_called:
            self._begin(None, self._surveyor.local())
        self._resume_called = True

    def _begin(self, result: ResumeResult | None, local: Mapping[Unit, LocalUnit]) -> None:
        if result is None and self._group.rank == 0 and self._opened is not None:
            warn_of_beginning(self.config.store_path)
        self._saver.prepare_buffers(local)
        if self._memory is not None:
            self._memory.begin(local, None if result is None else result.memory)

    def _mark_proven(self) -> None:
        opened, resumed = self._opened, self.resumed
        if self._proven or resumed is None or opened is None or resumed.memory is not None or not opened.claimed:
            return
        self._proven = True
        if self._group.rank == 0:
            mark = partial(opened.mark_proven, resumed.resolution.manifest.save)
            self._saver.upkeep(mark, "marking the commit proven")

    def _decide(self, request: SaveRequest | None, began: float | None = None) -> StepReport:
        """Decide and begin a save. request: None if the policy decides. began: start of the stall. Collective."""
        began = time.perf_counter() if began is None else began
        survey = self._surveyor.survey(stepped=request is None)
        local, trouble = survey.local, survey.trouble is not None
        changed = not trouble and self._job.table.changed(local)
        settled = self._saver.settle(self._step, changed, trouble, lambda: self._decider.propose(self._step, request))
        if not self._checked and not (request is not None and request.preempted):
            self._saver.require_storable(survey, settled.skip != "unsupported")
            self._checked = settled.skip != "unsupported"
        if settled.skip is not None:
            if request is None:
                self._pace.put_off(self._step, busy=settled.skip == "busy")
            problem = collect_messages(self._group, survey.trouble) if settled.skip == "unsupported" else None
            return self._report(settled.skip, began, None, problem=problem)
        if settled.changed:
            self._job.agree(local)
        decided = self._decider.decide(self._step, local, request, self._saver.take_dropped(), settled.proposed)
        self._pace.agreed(self._step, decided.interval)
        if self._group.rank == 0:
            committed = self._job.ledger.versions.keys()
            self._listeners.on_measured(MeasuredEvent(self._step, decided, self._job.table.sizes, committed))
        if decided.incomplete:
            return self._report("withheld", began, decided)
        if not decided.saved:
            if self._memory is not None:
                self._memory.on_decision(self._step, ())
            return self._report("nothing", began, decided)
        if (refusal := self._saver.claim_name(self._step)) is not None:
            return self._report(refusal, began, decided)
        lent = {} if self._memory is None else self._memory.lend(self._step, decided, local)
        staged = self._saver.begin(self._step, decided, local, lent)
        if self._memory is not None:
            self._memory.on_decision(self._step, decided.saved)
        return self._report("observe" if self._opened is None else None, began, decided, staged)

    def _report(
        self,
        skipped: str | None,
        began: float,
        decided: DecisionResult | None,
        staged: int = 0,
        problem: str | None = None,
    ) -> StepReport:
        stall, why = time.perf_counter() - began, None if skipped == "observe" else skipped
        self._listeners.on_decision(DecisionEvent(self._step, why, problem, stall, decided, self._job.ledger.commits))
        if decided is None:
            return StepReport(self._step, skipped, stall_seconds=stall, problem=problem)
        saved = decided.saved if skipped in (None, "observe") else {}
        chosen, interval = decided.choices, decided.interval
        return StepReport(self._step, skipped, decided.stats, saved, chosen, staged, stall, interval=interval)
