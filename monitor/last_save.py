"""The last saves of a job that is about to be ended: as much as can become durable by the deadline.

First the save under way is waited for, then as much is saved as is expected to fit. Where time is left after that,
which happens where nothing was known of the storage, or it was faster than it used to be, another save takes more of
what is left. Every one of them is a commit like any other: whatever the deadline cuts off, the one before it stands.

Training thread; collective. It does not know when a job is to end, nor how its process does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from monitor.decided import Demand
from monitor.events import PreemptedEvent
from monitor.job import Job
from monitor.preemption import Deadline
from monitor.report import StepReport
from monitor.saver import Saver
from monitor.units import is_moving
from policies.base import Choice
from store.certificate import is_lossy
from store.names import Unit

_log = logging.getLogger("driftpoint")

_ROUNDS = 8
"""Saves at most: each is expected to take most of the time left, so that more are of no use."""


@dataclass
class LastSaves:
    """Of one job, at ``step``. decide: measures, decides and begins a save; ``save`` and ``saver`` are its.

    affordable: bytes that are expected to become durable in so many seconds, on rank 0."""

    job: Job
    saver: Saver
    step: int
    decide: Callable[[Demand], StepReport]
    affordable: Callable[[float], float]

    def make(self, deadline: Deadline) -> StepReport:
        """Save. Returns what was decided and became of it, alike on all ranks. Raises nothing that a rank that is gone
        makes the others raise: the job ends anyhow."""
        try:
            return self._made(deadline)
        except RuntimeError as error:
            _log.error("preempted: another rank is gone, and nothing more can be saved: %s", error)
        return StepReport(self.step, "failed", saved={}, preempted=True)

    def _made(self, deadline: Deadline) -> StepReport:
        demand = Demand("preempted", lambda: self.affordable(deadline.left))
        saved: dict[Unit, Choice] = {}
        self.saver.wait(deadline.left)
        report = self._one(demand, deadline, saved)
        first, rounds = report, 1
        while report.skipped is None and rounds < _ROUNDS and not self._whole() and self._in_time(deadline):
            report, rounds = self._one(demand, deadline, saved), rounds + 1
        if self.job.group.rank == 0:
            self.job.listeners.on_preempted(self._outcome(deadline.passed, report.skipped))
        return replace(first, saved=saved, preempted=True)

    def _one(self, demand: Demand, deadline: Deadline, saved: dict[Unit, Choice]) -> StepReport:
        report = self.decide(demand)
        if report.skipped is not None:
            return report
        self.saver.wait(deadline.left)
        busy = self.saver.settle(self.step, False).skip == "busy"
        failed = bool(self.job.group.largest([self.saver.failed])[0])
        if busy or failed:
            return replace(report, skipped="busy" if busy else "failed", saved={})
        saved.update(report.saved or {})
        return report

    def _whole(self) -> bool:
        return bool(self.job.group.from_first(not stale_units(self.job, self.step)))

    def _outcome(self, seconds: float, skipped: str | None) -> PreemptedEvent:
        ledger, moving = self.job.ledger, [unit for unit in self.job.table.sizes if is_moving(unit)]
        ages = [ledger.staleness(unit, self.step) for unit in moving]
        whole = ages.count(0) == len(moving)
        records = [ledger.versions[unit] for unit in moving] if whole else []
        return PreemptedEvent(
            step=self.step,
            seconds=seconds,
            skipped=skipped,
            moving=len(moving),
            fresh=ages.count(0),
            oldest=max((age for age in ages if age is not None), default=0),
            exact=whole and all(one.version == ledger.newest and not is_lossy(one.encoding) for one in records),
            newest=ledger.newest,
        )

    def _in_time(self, deadline: Deadline) -> bool:
        return bool(self.job.group.from_first(deadline.left > 0.0))


def stale_units(job: Job, step: int) -> Mapping[Unit, int | None]:
    """Rank 0: the moving units whose newest version is not of this step, and how many steps old it is."""
    found = {unit: job.ledger.staleness(unit, step) for unit in job.table.sizes if is_moving(unit)}
    return {unit: staleness for unit, staleness in found.items() if staleness != 0}
