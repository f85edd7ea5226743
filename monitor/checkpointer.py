"""The object in the user's training loop: measure, decide, stage, and let the background thread do the rest.

All public methods are called by the training thread of every rank, in the same order: they hold collectives.
Rank 0 keeps the ledger and decides; every rank stages and writes its own segment. References (what drift is
measured against) move only when a save is known to be committed, at the next decision.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import TracebackType

from monitor.context import JobContext
from monitor.decide.budget_tracker import BudgetTracker
from monitor.decide.decider import Decider
from monitor.distributed import collect_messages
from monitor.events import AttachEvent, DecisionEvent, MeasuredEvent, ResumeEvent
from monitor.memory.tier import memory_tier
from monitor.observe.units import LocalUnit, Surveyor
from monitor.preemption import FinalSave, Preemption
from monitor.resume.read import ReadBuffers
from monitor.resume.resume import ResumeResult, build_certificate, reset_ledger, resume, resumed
from monitor.save.dry_run import DryRunSaver
from monitor.save.saver import Saver
from monitor.save.store_session import StoreSession
from monitor.telemetry.metrics import Metrics
from monitor.types import DecisionResult, Preempted, SaveRequest, StepReport
from store.catalog import Catalog
from store.certificate import Certificate
from store.commit import mark_proven
from store.errors import ConfigError
from store.location import store_place
from store.names import Unit

_log = logging.getLogger("driftpoint")


class Checkpointer:
    """Made by :func:`monitor.attach`. Usable as a context manager, which closes it."""

    def __init__(
        self,
        job: JobContext,
        metrics: Metrics,
        spending: BudgetTracker,
        opened: StoreSession | None,
        catalog: Catalog | None,
    ) -> None:
        self.config = job.config
        self.metrics = metrics
        self.certificate: Certificate | None = None
        """What was resumed, on every rank; None where nothing was."""
        self.preempted = False
        """Whether the end of the job was announced, and all ranks have saved what time allowed: leave the loop."""
        self._job = job
        self._group = job.group
        self._opened = opened
        self._catalog = catalog
        self._spending = spending
        self._decider = Decider(job, spending)
        self._listeners = job.listeners
        self._pace = job.pace
        saver = None if opened is None else Saver(job, opened)
        self._saver: Saver | DryRunSaver = saver or DryRunSaver(job)
        self._saver.reserve(job.table.local())
        self._memory = memory_tier(job, opened, saver)
        self._surveyor = Surveyor(job.adapter, job.table)
        self._step = job.completed_steps() or 0
        self._resumed: ResumeResult | None = None
        self._asked_to_resume = False
        self._updates = 0
        job.adapter.before_update(self._count_update)
        self._proven = False
        self._closed = False
        self._process = os.getpid()
        self._forget_exit = _close_at_exit(self)
        self._preemption = Preemption(job.config.preemption, job.group, active=opened is not None)
        self._attached(opened)

    def _attached(self, opened: StoreSession | None) -> None:
        """Tell the listeners, and serve the metrics. Collective."""
        self._listeners.on_attach(
            AttachEvent(
                rank=self._group.rank,
                world_size=self._group.world_size,
                store=str(store_place(self.config.store)),
                store_id=None if opened is None else opened.catalog.store_id,
                epoch=0 if opened is None else opened.epoch,
            )
        )
        settings = self.config.metrics
        if self._group.rank == 0 and settings.enabled:
            self.metrics.serve(settings.host, settings.port, settings.security())

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers found, in model order."""
        return tuple(layer.name for layer in self._job.table.layers)

    @property
    def rank(self) -> int:
        """Of this process among those of the job."""
        return self._group.rank

    @property
    def resumed(self) -> ResumeResult | None:
        """What the job was brought back to, in full; see ``certificate`` for what to tell of it."""
        return self._resumed

    @property
    def holds_commits(self) -> bool:
        """Whether there was anything in the store when the job attached to it."""
        return self._opened is not None and self._opened.has_commits

    def resume(self, *, memory: bool = True) -> int:
        """Bring the newest resumable commit into the model, the optimizer and the run state.

        memory: whether what the memory tier holds counts.

        Returns the step to continue from: 0 where the store holds nothing yet; else the commit's, or, where its weights
        come from several steps, the saved step nearest to their effective step (see ``resume:`` in the settings).

        Raises, on all ranks and with the job left as it was: NothingToResumeError where no commit is whole,
        ModelMismatchError where the store is another model's, UsageError where an object in ``state=[...]`` does not
        take its state.
        """
        if self._asked_to_resume:  # what is still being written is of a branch that this job may be about to leave
            self.flush()
            self._saver.settle(self._step, False)
        job, found = self._job, None
        room = ReadBuffers(self._saver.lend(job.table.local()))
        if self._catalog is not None:
            remembered = self._memory.find(self._catalog) if memory and self._memory is not None else None
            live = partial(resume, adapter=job.adapter, group=self._group, user=job.user, room=room)
            found = resumed(partial(live, settings=self.config.resume), self._catalog, remembered)
        self._saver.keep(job.table.local(), room.buffers)
        self._asked_to_resume = True
        self._updates = 0
        self._pace.restart()
        self._surveyor.mark()
        if found is not None and self._catalog is not None:
            self._stand_on(found, self._catalog)
        if self._memory is not None:
            self._memory.begin(job.table.local(), None if found is None else found.memory)
        return self._step

    def _stand_on(self, found: ResumeResult, catalog: Catalog) -> None:
        """The job is what was resumed: count from there, and measure from there."""
        self._resumed = found
        self._saver.went_back()
        self._step = found.onward.save.step
        self.certificate = build_certificate(found)
        reset_ledger(self._job, catalog, found, self._step)
        for unit, part in self._job.table.local().items():
            if unit in found.resolution.versions:
                self._job.meter.reset(unit, part.tensors)
        manifest = found.resolution.manifest
        self._listeners.on_resume(
            ResumeEvent(
                step=self._step,
                commit=manifest.step,
                created=manifest.created,
                newest=self._job.ledger.newest,
                certificate=self.certificate,
                from_memory=found.memory is not None,
                replicas=len(found.replicas),
                fallbacks=len(found.resolution.fallbacks),
                passed_over=found.passed_over,
                notes=found.notes,
            )
        )

    def step(self) -> StepReport | None:
        """Call after every optimizer step. When it is time for that (``every``) it decides, and perhaps begins a save.

        Returns what was decided, or None where it was not time for a decision. Never waits for the disk, but where a
        signal announced the end of the job: then it saves what time allows, alike on all ranks, and raises
        :class:`monitor.Preempted`, which ends the process with code 75. Under ``preemption: {exit: false}`` it returns,
        and the loop is to be left (see ``preempted``)."""
        began = time.perf_counter()
        self._require_open()
        if not self._advanced():
            return None
        self._require_asked()
        self._mark_proven()
        self._listeners.on_step(self._step, began)
        if self._preemption.agreed():
            return self._leave()
        with self._job.adapter.cache_lookups():
            report = self._decide(began, None) if self._pace.due(self._step) else None
            self._remember(looked=report is not None)
        return report

    def save(self, *, wait: bool = False) -> StepReport:
        """Save everything now, whatever the policy says, after the save under way.

        ``wait``: return when it is committed, or failed. Collective."""
        self._require_open()
        self._require_asked()
        self._require_told()
        self._step = self._job.completed_steps() or self._step
        self.flush()
        with self._job.adapter.cache_lookups():
            report = self._decide(time.perf_counter(), SaveRequest("asked for by save()"))
        if wait:
            self.flush()
            self._saver.settle(self._step, False)
            if self._group.all_reduce_max([self._saver.failed])[0]:
                return replace(report, skipped="failed", saved={})
        return report

    def preempt(self) -> None:
        """The end of the job is announced, as by a signal: for handlers of your own, and for threads that ask a cloud.

        Any thread, on any rank; a note and no more: the next ``step()`` sees to it. ConfigError where it is off."""
        self._preemption.preempt()

    def flush(self) -> None:
        """Wait, at most ``timeouts.close`` seconds, until this rank's part of the save under way is done.

        On rank 0 that is the commit. Not collective."""
        self._saver.flush(self.config.timeouts.close)

    def copied(self) -> None:
        """Have what is being saved copied whole, as before an optimizer step: from then on the state may be changed by
        other means, such as another checkpoint that is loaded over it. Not collective."""
        self._saver.copied()
        if self._memory is not None:
            self._memory.copied()

    def close(self) -> None:
        """Wait, at most ``timeouts.close`` seconds, for the save under way; let go of the store and the port.

        Called while an error is on its way out (from ``finally:``, say), it leaves what a restart goes on from. In a
        forked child it does nothing: all of this is its parent's."""
        clean = sys.exc_info()[0] is None
        self._close(self.config.timeouts.close, clean=clean, ended=clean)

    def finish(self, *, clean: bool) -> None:
        """:meth:`close`, by somebody who knows. clean: the job ends as it was meant to, and nobody goes on from it."""
        self._close(self.config.timeouts.close if clean else self._patience, clean=clean, ended=clean)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(clean=kind is None)

    @property
    def _patience(self) -> float:
        # After an error other ranks may be gone, and what they owe to a commit with them.
        return min(30.0, self.config.timeouts.close)

    def _close(self, timeout: float, clean: bool, ended: bool) -> None:
        """clean: as far as can be told, the job ends as it was meant to. ended: that is certain."""
        if not self._closed and os.getpid() == self._process:
            self._closed = True
            self._forget_exit()
            self._saver.close(timeout, clean and not self.preempted)
            if self._memory is not None:
                self._memory.close(remove=ended and not self.preempted)
            self._listeners.on_close(ended and not self.preempted, timeout)
            self._preemption.close(leaving=self.preempted and self.config.preemption.exit)

    def _leave(self) -> StepReport:
        """The last step: save what time allows. Where the process is to end, it ends in time whatever happens."""
        assert isinstance(self._saver, Saver)  # nothing is heeded where nothing is saved
        last = FinalSave(
            self._job,
            self._saver,
            self._step,
            lambda demand: self._decide(time.perf_counter(), demand),
            self._spending.writing.affordable,
        )
        deadline = self._preemption.deadline()
        with deadline.enforced() if self.config.preemption.exit else nullcontext():
            report = last.make(deadline)
            self.preempted = True
            if not self.config.preemption.exit:
                return report
            self._close(deadline.to_leave, clean=False, ended=False)
        raise Preempted(report)

    def _require_told(self) -> None:
        if self._job.completed_steps() is None and self._updates:
            raise ConfigError(
                "save() was called between optimizer.step() and ckpt.step(), so the state would be filed under the "
                "step before: call ckpt.step() first"
            )

    def _count_update(self) -> None:
        self._updates += 1

    def _advanced(self) -> bool:
        self._updates = 0
        counted = self._job.completed_steps()
        if counted is None:
            self._step += 1
            return True
        if counted == self._step:
            return False  # a micro step of gradient accumulation
        self._step = counted
        return True

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError("this checkpointer is closed: attach a new one")

    def _require_asked(self) -> None:
        if not self._asked_to_resume and self._opened is not None and self._opened.has_commits:
            raise ConfigError(
                f"the store {self.config.store} holds commits and resume() was not called: going on would bury them. "
                "Begin the loop with `range(ckpt.resume(), total_steps)`, or name another `store:`"
            )
        if not self._asked_to_resume and self._memory is not None:
            self._memory.begin(self._job.table.local(), None)
        self._asked_to_resume = True

    def _mark_proven(self) -> None:
        opened, resumed = self._opened, self._resumed
        if self._proven or resumed is None or opened is None or resumed.memory is not None:
            return
        self._proven = True
        save = resumed.resolution.manifest.save
        if self._group.rank == 0:
            self._saver.upkeep(
                lambda: mark_proven(opened.files, opened.catalog.store_id, save, opened.epoch),
                "marking the commit proven",
            )

    def _decide(self, began: float, demand: SaveRequest | None) -> StepReport:
        survey = self._surveyor.survey(stepped=demand is None)
        local, trouble = survey.local, survey.trouble is not None
        settled = self._saver.settle(self._step, not trouble and self._job.table.changed(local), trouble)
        if settled.skip is not None:
            if demand is None:
                self._pace.put_off(self._step, busy=settled.skip == "busy")
            problem = collect_messages(self._group, survey.trouble) if settled.skip == "unsupported" else None
            return self._skipped(settled.skip, began, None, problem)
        if settled.changed:
            self._agree(local)
        decided = self._decider.decide(self._step, local, demand)
        self._pace.agreed(self._step, decided.interval)
        if self._group.rank == 0:
            committed = self._job.ledger.versions.keys()
            self._listeners.on_measured(MeasuredEvent(self._step, decided, self._job.table.sizes, committed))
        if decided.lacking:
            return self._skipped("withheld", began, decided)
        if not decided.saved:
            if self._memory is not None:
                self._memory.decided(self._step, ())
            return self._skipped("nothing", began, decided)
        unnamed = self._saver.claim_name(self._step)
        if unnamed is not None:
            return self._skipped(unnamed, began, decided)
        staged = self._saver.begin(self._step, decided, local)
        if self._memory is not None:
            self._memory.decided(self._step, decided.saved)
        return self._report("observe" if self._opened is None else None, began, decided, staged)

    def _remember(self, looked: bool) -> None:
        """Keep a version of this step in memory, where it is time for that. looked: a decision surveyed the job."""
        memory, began = self._memory, time.perf_counter()
        if memory is None or not memory.due(self._step):
            return
        survey = self._surveyor.survey(stepped=not looked)
        local, trouble = survey.local, survey.trouble is not None
        agreed = memory.settle(self._step, not trouble and self._job.table.changed(local), trouble)
        if agreed.skip in (None, "unready") and agreed.changed:
            self._agree(local)
        if agreed.skip is None:
            memory.keep(self._step, local, began)

    def _agree(self, local: Mapping[Unit, LocalUnit]) -> None:
        for unit in self._job.table.agree(local):
            if unit in local:  # the old reference fits no more; the unit counts as lost until it is saved
                self._job.meter.reset(unit, local[unit].tensors)
        self._listeners.on_units_changed(local)

    def _skipped(
        self, reason: str, began: float, decided: DecisionResult | None, problem: str | None = None
    ) -> StepReport:
        return replace(self._report(reason, began, decided, 0, problem), problem=problem)

    def _report(
        self, skipped: str | None, began: float, decided: DecisionResult | None, staged: int, problem: str | None = None
    ) -> StepReport:
        stall = time.perf_counter() - began
        why = None if skipped == "observe" else skipped
        commits = self._job.ledger.commits
        self._listeners.on_decision(DecisionEvent(self._step, why, problem, stall, decided, commits))
        if decided is None:
            return StepReport(self._step, skipped, stall_seconds=stall)
        saved = decided.saved if skipped in (None, "observe") else {}
        return StepReport(
            self._step, skipped, decided.stats, saved, decided.choices, staged, stall, interval=decided.interval
        )


def _close_at_exit(checkpointer: Checkpointer) -> Callable[[], None]:
    """A script that ends without ``close()``, or by an error, still gets the save that is under way."""
    reference = weakref.ref(checkpointer)

    def close() -> None:
        living = reference()
        if living is not None:
            # last_value: set by an error that nobody caught, but not by sys.exit(1).
            living._close(living._patience, clean=not hasattr(sys, "last_value"), ended=False)

    atexit.register(close)
    return lambda: atexit.unregister(close)
