"""Make the last save of a job: by the deadline of a preemption, or of the last step when the training is complete.

Training thread; collective."""

import atexit
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

from monitor.context import JobContext
from monitor.events import PreemptedEvent
from monitor.observe.units import is_moving
from monitor.preemption import Deadline
from monitor.save.saver import Saver
from monitor.telemetry.log import log_startup
from monitor.types import SKIP_REASONS, SaveRequest, StepReport, newest_text
from policies.base import Choice
from store.certificate import is_lossy
from store.errors import CollectiveError, SaveError
from store.names import Unit

_log = logging.getLogger("driftpoint")

_MAX_SAVES = 8  # last saves at most: each is expected to use most of the time left
_LEAST = 0.05  # seconds; no save is durable in less


def not_committed(job: JobContext, saver: Saver, report: StepReport, strict: bool) -> StepReport:
    """Raise SaveError, on all ranks, for a save that was waited for and is not committed; if not strict, log it."""
    why = saver.failure() if report.skipped == "failed" else report.problem or SKIP_REASONS[report.skipped]
    newest = job.group.broadcast(newest_text(job.ledger.newest))
    text = f"step {report.step} is not committed: {why}; {newest}"
    if strict:
        raise SaveError(text)
    if job.group.rank == 0:
        _log.warning("%s", text)
    return replace(report, saved={})


def unreachable(job: JobContext, saver: Saver, step: int, timeout: float) -> SaveError:
    """Return the error of a save that failed, or whose outcome is unknown, because a rank is late or gone.

    Not collective. Rank 0 waits for the save under way, and names the newest commit."""
    known = ""
    if job.group.rank == 0:
        saver.wait(timeout)
        known = f"; {newest_text(saver.newest)}"
    return SaveError(f"step {step} is not known to be committed: {SKIP_REASONS['unreachable']}{known}")


@dataclass(frozen=True)
class LastStep:
    """Commits the last step of a job that ends as intended."""

    job: JobContext
    saver: Saver
    step: int
    meet: Callable[[], bool]  # waits until all ranks are here; see :meth:`monitor.distributed.Group.barrier`
    save: Callable[[], object]  # saves all units and waits for the commit. Raises SaveError, on all ranks

    def commit(self, *, uncounted: bool) -> bool:
        """Wait for the save under way, and save the step if it is not committed whole. Return whether it now is.

        uncounted: whether an optimizer step was taken without a call of :meth:`monitor.Checkpointer.step`."""
        timeout = self.job.config.timeouts.close
        if not self.meet():
            text = "the last step %d is not saved: not all ranks closed in time (timeouts.close), or a group is gone"
            _log.error(text, self.step)
            return False
        if self.job.group.all_reduce_max([uncounted])[0]:
            _log.warning("the last optimizer step is not saved: call ckpt.step() after every optimizer.step()")
            return True  # all steps that were counted may be committed
        self.saver.settle_commit(self.step, timeout)
        if not self.job.group.broadcast(self._is_committed()):
            if self.saver.changed_at == self.step:  # the live state is now that of no step
                known = self.job.group.broadcast(newest_text(self.job.ledger.newest))
                raise SaveError(
                    f"the last step {self.step} is not committed: the state was changed while it was saved, and what "
                    f"is live now is not the state of that step; {known}. Change it after ckpt.copied() or ckpt.close()"
                )
            self.save()
        whole: bool = self.job.group.broadcast(self._is_committed())
        if self.job.group.rank == 0 and whole:
            log_startup(f"the last step {self.step} is committed to {self.job.config.store_path}")
        elif self.job.group.rank == 0:
            layers = ", ".join(sorted({unit.layer for unit in self.saver.dropped}))
            text = "the last step %d is not committed whole: %s keep an older version, for they hold NaN or Inf now"
            _log.error(text, self.step, layers)
        return whole

    def _is_committed(self) -> bool:
        """Return whether every unit of the newest commit is of the last step. Rank 0."""
        ledger, moving = self.job.ledger, [unit for unit in self.job.table.sizes if is_moving(unit)]
        at_step = ledger.newest is not None and ledger.newest.step == self.step
        return at_step and all(ledger.staleness(unit, self.step) == 0 for unit in moving)


@dataclass
class FinalSave:
    """Saves as much of a job at ``step`` as can become durable by the deadline.

    It waits for the save under way, then saves what should fit, and again while there is time (speed unknown or
    better). Each is an ordinary commit, so the deadline cuts off only the last. Training thread; collective."""

    job: JobContext
    saver: Saver
    step: int
    decide: Callable[[SaveRequest], StepReport]  # measures, decides and begins a save
    affordable: Callable[[float], float]  # bytes expected to become durable in a number of seconds; called on rank 0

    def run(self, deadline: Deadline) -> StepReport:
        """Save and return the report of the first save with the units of all of them, alike on all ranks.

        If another rank is gone the error is logged, not raised: the job ends in any case."""
        try:
            return self._save_until(deadline)
        except (CollectiveError, RuntimeError) as error:  # the latter from a collective or device of the framework
            _log.error("preempted: no further save is possible: %s", error)
        return StepReport(self.step, "failed", saved={}, preempted=True)

    def _save_until(self, deadline: Deadline) -> StepReport:
        request = SaveRequest("preempted", lambda: self.affordable(deadline.left))
        saved: dict[Unit, Choice] = {}
        self.saver.preempted = True
        self.saver.wait(deadline.left)
        reports: list[StepReport] = []
        while len(reports) < _MAX_SAVES:
            reports.append(self._save(request, deadline, saved))
            # A save that failed may succeed now, because pruning made room on the disk, for example.
            again = reports[-1].skipped == "failed" and [one.skipped for one in reports].count("failed") == 1
            useful = again or (reports[-1].skipped is None and reports[-1].saved)
            stale = any(age != 0 for age in self._ages())  # on rank 0
            if not useful or not self.job.group.broadcast(stale and deadline.left > _LEAST):
                break
        if self.job.group.rank == 0:
            self.job.listeners.on_preempted(self._outcome(deadline.passed, reports[-1].skipped))
        return replace(next((one for one in reports if one.skipped is None), reports[0]), saved=saved, preempted=True)

    def _ages(self) -> list[int | None]:
        return [self.job.ledger.staleness(unit, self.step) for unit in self.job.table.sizes if is_moving(unit)]

    def _save(self, request: SaveRequest, deadline: Deadline, saved: dict[Unit, Choice]) -> StepReport:
        report = self.decide(request)
        if report.skipped is not None:
            return report
        skipped = self.saver.settle_commit(self.step, deadline.left)
        if skipped is not None:
            return replace(report, skipped=skipped, saved={})
        report = report.without(self.saver.dropped)
        saved.update(report.saved or {})
        return report

    def _outcome(self, seconds: float, skipped: str | None) -> PreemptedEvent:
        ledger, moving = self.job.ledger, [unit for unit in self.job.table.sizes if is_moving(unit)]
        ages = self._ages()
        complete = ages.count(0) == len(moving)
        records = [ledger.versions[unit] for unit in moving] if complete else []
        return PreemptedEvent(
            step=self.step,
            seconds=seconds,
            skipped=skipped,
            moving=len(moving),
            fresh=ages.count(0),
            oldest=max((age for age in ages if age is not None), default=0),
            exact=complete and all(one.version == ledger.newest and not is_lossy(one.encoding) for one in records),
            newest=ledger.newest,
        )


def at_exit(method: Callable[[], None]) -> Callable[[], object]:
    """Call a bound method at interpreter exit, if its object still lives then. Return the function that undoes it."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        living = reference()
        if living is not None:
            living()

    atexit.register(call)
    return lambda: atexit.unregister(call)
