"""One decision: measure what the policy needs, let rank 0 choose, measure the rest. Training thread; collective.

A policy that does not look at drift decides first; what it saves is measured later, on the staged copies, by
the background thread. So the training thread passes over each byte once: it either copies or measures it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from monitor.agree import on_first
from monitor.decided import Decided
from monitor.drift.base import Measure
from monitor.guard import Guard
from monitor.job import Job
from monitor.measuring import Measured, measure_all, unit_stats
from monitor.units import LocalUnit, is_moving
from policies.base import Budget, Choice, Decision, History, UnitStats
from policies.bounds import incomplete
from policies.forced import forced
from store.names import Unit


class Decider:
    """Asks the policy."""

    def __init__(self, job: Job) -> None:
        self._policy = Guard(job.policy, job.config, job.metrics)
        self._sees_all = job.policy.needs_drift or job.observing
        self._meter = job.meter
        self._group = job.group
        self._table = job.table
        self._ledger = job.ledger
        self._spending = job.spending
        self._pace = job.pace

    def decide(self, step: int, local: Mapping[Unit, LocalUnit], reason: str | None) -> Decided:
        """Decide on every unit; ``reason`` saves everything that is finite, for that reason."""
        units = list(self._table.sizes)
        first = [unit for unit in units if self._sees_all or not is_moving(unit)]
        measured, mine = self._measure(first, local)
        stats = unit_stats(self._table, self._ledger, step, measured)
        made, saved, lacking, interval = self._chosen(step, stats, reason)
        rest = [unit for unit in units if unit not in measured and unit not in saved]
        measured_too, mine_too = self._measure(rest, local)
        drift = {unit: found.drift for unit, found in {**measured, **measured_too}.items()}
        shown = unit_stats(self._table, self._ledger, step, {**measured, **measured_too})
        found = Decided((), {}, saved, drift, {**mine, **mine_too}, lacking, reason is not None, interval)
        if made is None:
            return found
        decision, budget = made
        return replace(
            found,
            stats=shown,
            choices=decision.choices,
            seen=stats,
            offered=budget.bytes,
            commits=self._ledger.commits,
        )

    def _measure(
        self, units: list[Unit], local: Mapping[Unit, LocalUnit]
    ) -> tuple[dict[Unit, Measured], dict[Unit, Measure]]:
        measured, mine = measure_all(self._meter, self._group, units, local)
        for unit in self._table.lost & measured.keys():
            measured[unit] = replace(measured[unit], drift=None)
        return measured, mine

    def _chosen(
        self, step: int, stats: tuple[UnitStats, ...], reason: str | None
    ) -> tuple[tuple[Decision, Budget] | None, dict[Unit, Choice], tuple[Unit, ...], int | None]:
        made: list[tuple[Decision, Budget]] = []

        def choose() -> tuple[list[tuple[int, str, str]], list[int], int | None]:
            interval, budget = self._pace.choose(), self._spending.offer(stats)
            decision = self._select(stats, budget, reason, History(step, self._ledger.commits, interval))
            made.append((decision, budget))
            saved = [
                (index, choice.encoding, choice.reason)
                for index, one in enumerate(stats)
                if (choice := decision.choices[one.unit]).encoding is not None
            ]
            lacking = set(incomplete(stats, decision))
            return saved, [index for index, one in enumerate(stats) if one.unit in lacking], interval

        saved, lacking, interval = on_first(self._group, choose)
        return (
            made[0] if made else None,
            {stats[index].unit: Choice(encoding, reason) for index, encoding, reason in saved},
            tuple(stats[index].unit for index in lacking),
            interval,
        )

    def _select(self, stats: tuple[UnitStats, ...], budget: Budget, reason: str | None, history: History) -> Decision:
        decision = self._policy.select(stats, budget, history)
        return decision if reason is None else forced(decision, stats, reason)
