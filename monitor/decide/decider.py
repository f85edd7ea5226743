"""Measure, ask the policy on rank 0, broadcast; fallback on policy errors.

The edge to the policy in mid-run: where it fails, this decision saves everything, and training goes on.

Rank 0 only. The next decision asks the policy again. It does not know what a decision is for; a policy that never comes
back stops the job, as any code in the training loop would.

One decision: measure what the policy needs, let rank 0 choose, measure the rest. Training thread; collective.

A policy that does not look at drift decides first; what it saves is measured later, on the staged copies, by
the background thread. So the training thread passes over each byte once: it either copies or measures it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from monitor.config.load import Config
from monitor.context import JobContext
from monitor.decide.budget_tracker import BudgetTracker
from monitor.decide.statistics import Measured, measure_all, unit_stats
from monitor.distributed import run_on_rank0
from monitor.events import Listeners
from monitor.observe.drift_meter import Measure
from monitor.observe.units import LocalUnit, is_moving
from monitor.types import DecisionResult, SaveRequest
from policies.base import Budget, Choice, Decision, History, Policy, UnitStats
from policies.bounds import forced, incomplete
from policies.builtin import Fallback
from policies.deadline import DeadlinePolicy, Nothing
from policies.validation import Failure, failure_of
from store.names import Unit

_log = logging.getLogger("driftpoint")

_MOST_TOLD = 100
"""Distinct errors that are logged; beyond them the metric counts on."""


class SafePolicy:
    """Asks the policy of a job, and stands in for it where it raises or breaks its contract."""

    def __init__(self, policy: Policy, config: Config, listeners: Listeners) -> None:
        self._policy = policy
        self._config = config
        self._listeners = listeners
        self._told: set[str] = set()

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        """The policy's decision. Where it fails: everything, inside the job's bounds and in its encodings."""
        try:
            return self._policy.select(stats, budget, history)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the edge to the user's own code
            failure = failure_of(error)
            self._listeners.on_policy_failed(error)
            self._tell(failure, error, history.step)
        fallback = Fallback(self._policy.name, failure)
        return fallback.named(self._config.in_bounds(fallback).select(stats, budget, history))

    def _tell(self, failure: Failure, error: BaseException, step: int) -> None:
        if failure.kind in self._told or len(self._told) >= _MOST_TOLD:
            return
        self._told.add(failure.kind)
        _log.error(
            "policy %s %s at step %d: everything is saved at this decision, as under full, and whenever it fails again "
            "(this error is not logged again; driftpoint_policy_failures_total counts on)",
            self._policy.name,
            failure.what,
            step,
            exc_info=error,
        )


class Decider:
    """Asks the policy. spending: says what a decision may cost."""

    def __init__(self, job: JobContext, spending: BudgetTracker) -> None:
        self._policy = SafePolicy(job.policy, job.config, job.listeners)
        self._sees_all = job.policy.needs_drift or job.observing
        self._meter = job.meter
        self._group = job.group
        self._table = job.table
        self._ledger = job.ledger
        self._spending = spending
        self._pace = job.pace
        self._urgent = DeadlinePolicy(job.config.in_bounds(Nothing()), job.config.encodings())

    def decide(self, step: int, local: Mapping[Unit, LocalUnit], demand: SaveRequest | None) -> DecisionResult:
        """Decide on every unit; with ``demand`` not as the policy says, but as that does."""
        units = list(self._table.sizes)
        first = [unit for unit in units if self._sees_all or not is_moving(unit)]
        measured, mine = self._measure(first, local)
        stats = unit_stats(self._table, self._ledger, step, measured)
        if demand is not None and demand.purse is not None and not self._fits(step, stats, demand.purse):
            more, mine_too = self._measure([unit for unit in units if unit not in measured], local)
            measured, mine = {**measured, **more}, {**mine, **mine_too}
            stats = unit_stats(self._table, self._ledger, step, measured)
        made, saved, lacking, interval = self._chosen(step, stats, demand)
        rest = [unit for unit in units if unit not in measured and unit not in saved]
        measured_too, mine_too = self._measure(rest, local)
        drift = {unit: found.drift for unit, found in {**measured, **measured_too}.items()}
        shown = unit_stats(self._table, self._ledger, step, {**measured, **measured_too})
        found = DecisionResult((), {}, saved, drift, {**mine, **mine_too}, lacking, demand is not None, interval)
        found = replace(found, preempted=demand is not None and demand.purse is not None)
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

    def _fits(self, step: int, stats: tuple[UnitStats, ...], purse: Callable[[], float]) -> bool:
        """Whether everything is saved in any case, so that nothing more need be measured first. Collective."""
        history = History(step, self._ledger.commits)
        return run_on_rank0(self._group, lambda: self._urgent.fits(stats, purse(), history))

    def _measure(
        self, units: list[Unit], local: Mapping[Unit, LocalUnit]
    ) -> tuple[dict[Unit, Measured], dict[Unit, Measure]]:
        measured, mine = measure_all(self._meter, self._group, units, local)
        for unit in self._table.lost & measured.keys():
            measured[unit] = replace(measured[unit], drift=None)
        return measured, mine

    def _chosen(
        self, step: int, stats: tuple[UnitStats, ...], demand: SaveRequest | None
    ) -> tuple[tuple[Decision, Budget] | None, dict[Unit, Choice], tuple[Unit, ...], int | None]:
        made: list[tuple[Decision, Budget]] = []

        def choose() -> tuple[list[tuple[int, str, str]], list[int], int | None]:
            interval, budget = self._pace.choose(), self._spending.offer(stats)
            decision = self._select(stats, budget, demand, History(step, self._ledger.commits, interval))
            made.append((decision, budget))
            saved = [
                (index, choice.encoding, choice.reason)
                for index, one in enumerate(stats)
                if (choice := decision.choices[one.unit]).encoding is not None
            ]
            lacking = set(incomplete(stats, decision))
            return saved, [index for index, one in enumerate(stats) if one.unit in lacking], interval

        saved, lacking, interval = run_on_rank0(self._group, choose)
        return (
            made[0] if made else None,
            {stats[index].unit: Choice(encoding, reason) for index, encoding, reason in saved},
            tuple(stats[index].unit for index in lacking),
            interval,
        )

    def _select(
        self, stats: tuple[UnitStats, ...], budget: Budget, demand: SaveRequest | None, history: History
    ) -> Decision:
        if demand is not None and demand.purse is not None:
            return self._urgent.select(stats, demand.purse(), history)
        decision = self._policy.select(stats, budget, history)
        return decision if demand is None else forced(decision, stats, demand.reason)
