"""Decide what to save: measure the units, ask the policy on rank 0, and broadcast its choices.

A policy that needs no drift decides first; what it saves is then measured on the staged copies by the background
thread. So the training thread reads each byte once: it either copies or measures it. Training thread; collective."""

import logging
import math
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from monitor.config.load import Config
from monitor.context import JobContext
from monitor.decide.budget_tracker import BudgetTracker
from monitor.distributed import Group, run_on_rank0
from monitor.events import Listeners
from monitor.ledger import Ledger, staleness_of
from monitor.observe.drift_meter import DriftMeter, Measure, drift_ratio
from monitor.observe.units import LocalUnit, UnitTable
from monitor.types import Chosen, DecisionResult, SaveRequest
from policies.base import Budget, Choice, Decision, History, Policy, UnitStats
from policies.bounds import forced, incomplete
from policies.builtin import Fallback
from policies.deadline import DeadlinePolicy, Nothing
from policies.validation import Failure, failure_of
from store.errors import NotFiniteError
from store.names import Unit
from store.text import listed

_log = logging.getLogger("driftpoint")

_LONGEST = 512  # most bytes of choices that rank 0 sends along with the exchange of ranks before a save

_MAX_LOGGED = 100  # distinct errors that are logged; the metric counts all of them


@dataclass(frozen=True)
class Measured:
    """Measurement of a unit over all ranks. ``drift`` is None if it is not finite."""

    drift: float | None
    finite: bool


def measure_all(
    meter: DriftMeter, group: Group, units: Collection[Unit], local: Mapping[Unit, LocalUnit]
) -> tuple[dict[Unit, Measured], dict[Unit, Measure]]:
    """Measure ``units`` on live tensors. Return the results over all ranks, and those of this rank. Collective.

    Drift that a rank cannot measure (out of memory, say) is unknown on all ranks. ``units`` must be the same on all."""
    if not units:
        return {}, {}
    unknown = set[Unit]()
    mine = meter.measure_many({unit: local[unit].tensors for unit in units if unit in local})
    for unit in units:
        try:
            if unit in local and unit not in mine:
                mine[unit] = meter.measure(unit, local[unit].tensors)
        except (MemoryError, RuntimeError) as error:  # raised, it would leave the other ranks waiting below
            _log.warning("%s cannot be measured, so its drift is unknown at this decision: %r", unit, error)
            unknown.add(unit)
    rows = torch.tensor(
        [_UNKNOWN if unit in unknown else _row(mine.get(unit)) for unit in units], dtype=torch.float64, device="cpu"
    ).reshape(-1, 4)
    summed = group.all_reduce_sum(rows).tolist()
    measured = {}
    for unit, (moved, reference, nonfinite, unmeasured) in zip(units, summed, strict=True):
        drift = drift_ratio(moved, reference) if not (nonfinite or unmeasured) else None
        measured[unit] = Measured(drift if drift is None or math.isfinite(drift) else None, nonfinite == 0)
    return measured, mine


def unit_stats(table: UnitTable, ledger: Ledger, step: int, measured: Mapping[Unit, Measured]) -> tuple[UnitStats, ...]:
    """Return the statistics shown to the policy. Units that were not measured have no drift."""
    stats, versions, ages = [], ledger.versions, dict[str, int | None]()  # a save holds versions of many units
    for unit, layer, size, moving in table.rows:
        version, measurement = versions.get(unit), measured.get(unit)
        saved_in = "" if version is None else version.save
        if saved_in not in ages:
            ages[saved_in] = staleness_of(version, step)
        staleness = ages[saved_in]
        known = measurement is not None and staleness is not None
        # A frozen unit whose drift is unknown may have changed, and must be saved then.
        lost = unit in table.lost or (measurement is not None and measurement.finite and measurement.drift is None)
        stats.append(
            UnitStats.of(
                unit=unit,
                position=layer.position,
                block=layer.block,
                nbytes=size.nbytes,
                drift=measurement.drift if known and measurement is not None else None,
                staleness=staleness,
                finite=measurement is None or measurement.finite,
                moving=moving,
                changed_shape=version is not None and (version.members != size.members or (not moving and lost)),
                error=version.error if version is not None else 0.0,
                numel=size.numel,
                encoding=version.encoding if version is not None else None,
                stored_bytes=ledger.expected.get(unit, version.nbytes) if version is not None else 0,
            )
        )
    return tuple(stats)


_UNKNOWN = [0.0, 0.0, 0.0, 1.0]


def _row(measure: Measure | None) -> list[float]:
    if measure is None:
        return [0.0, 0.0, 0.0, 0.0]
    if not measure.finite:
        return [0.0, 0.0, 1.0, 0.0]
    if not (math.isfinite(measure.moved_sq) and math.isfinite(measure.reference_sq)):
        return _UNKNOWN
    return [measure.moved_sq, measure.reference_sq, 0.0, 0.0]


class SafePolicy:
    """Asks the policy of a job; if it raises or returns an invalid decision, everything is saved. Rank 0 only.

    The next decision asks the policy again. A policy that never returns blocks the job."""

    def __init__(self, policy: Policy, config: Config, listeners: Listeners) -> None:
        self._policy = policy
        self._config = config
        self._listeners = listeners
        self._logged: set[str] = set()

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        """Return the policy's decision. If it fails: save everything, within the job's bounds and encodings."""
        try:
            return self._policy.select(stats, budget, history)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the edge to the user's own code
            failure = failure_of(error)
            self._listeners.on_policy_failed(error)
            self._log_failure(failure, error, history.step)
        fallback = Fallback(self._policy.name, failure)
        return fallback.named(self._config.in_bounds(fallback).select(stats, budget, history))

    def _log_failure(self, failure: Failure, error: BaseException, step: int) -> None:
        if failure.kind in self._logged or len(self._logged) >= _MAX_LOGGED:
            return
        self._logged.add(failure.kind)
        text = (
            "policy %s %s at step %d: everything is saved at this decision, and whenever it fails again (this error is "
            "logged once; driftpoint_policy_failures_total counts all)"
        )
        _log.error(text, self._policy.name, failure.what, step, exc_info=error)


class Decider:
    """Makes the decisions of a job."""

    def __init__(self, job: JobContext, budget_tracker: BudgetTracker) -> None:
        self._job, self._group, self._table, self._ledger = job, job.group, job.table, job.ledger
        self._policy = SafePolicy(job.policy, job.config, job.listeners)
        self.sees_all = job.policy.needs_drift or job.observing  # whether drift is measured before the choice
        self._budget_tracker = budget_tracker
        self._made: tuple[tuple[UnitStats, ...], Decision, Budget] | None = None  # the last decision, on rank 0
        self._proposed: tuple[int, Chosen] | None = None  # step and result of the last :meth:`propose`, on rank 0
        self._deadline_policy = DeadlinePolicy(job.config.in_bounds(Nothing()), job.config.encodings())

    def propose(self, step: int, request: SaveRequest | None) -> Chosen | None:
        """Choose before :meth:`decide`, so that the choice can go with an earlier exchange. Rank 0; not collective.

        Return None if the choice depends on measurements of all ranks or on a request, or is long."""
        alone = self._group.world_size == 1
        if alone or request is not None or self.sees_all or self._job.config.budget.limited or self._table.still:
            return None
        try:
            stats = unit_stats(self._table, self._ledger, step, {})
            chosen = self._choose_on_rank0(stats, self._job.policy.select, step)
        except (Exception, SystemExit):  # noqa: BLE001 - decide() meets it again, and reports it
            return None
        self._proposed = step, chosen
        return chosen if len(pickle.dumps(chosen)) <= _LONGEST else None

    def decide(
        self,
        step: int,
        local: Mapping[Unit, LocalUnit],
        request: SaveRequest | None,
        dropped: Collection[Unit] = (),
        proposed: Chosen | None = None,
    ) -> DecisionResult:
        """Decide on every unit: as ``request`` asks, or by the policy if it is None. Collective.

        ``proposed``: what rank 0 chose by :meth:`propose` at this step, if anything. ``dropped``: units with NaN or Inf
        that the last save left out. Under ``nonfinite: raise`` such units raise NotFiniteError on all ranks."""
        units = list(self._table.sizes)
        before_choice = units if self.sees_all else self._table.still
        measured: dict[Unit, Measured] = {}
        mine: dict[Unit, Measure] = {}
        self._measure(before_choice, local, measured, mine)
        stats = unit_stats(self._table, self._ledger, step, measured)
        if request is not None and request.budget_bytes is not None:
            history, budget_bytes = History(step, self._ledger.commits), request.budget_bytes
            if not run_on_rank0(self._group, lambda: self._deadline_policy.fits(stats, budget_bytes(), history)):
                self._measure(units, local, measured, mine)
                stats = unit_stats(self._table, self._ledger, step, measured)
        if proposed is None:
            proposed = run_on_rank0(self._group, partial(self._choose, step, stats, request))
        chosen: dict[int, Choice] = {}
        for encoding, reason, which in proposed.saved:
            chosen |= dict.fromkeys(which, Choice(encoding, reason))
        saved = {units[index]: chosen[index] for index in sorted(chosen)}
        measured_before = len(measured)
        self._measure([unit for unit in units if unit not in saved], local, measured, mine)
        nonfinite = (*dropped, *(unit for unit, one in measured.items() if not one.finite))
        if nonfinite and self._job.config.bounds.nonfinite == "raise" and request is None:
            by_layer = {unit.layer: unit for unit in nonfinite}
            raise NotFiniteError(
                f"NaN or Inf at step {step} in {listed(by_layer)}, which is not saved; the job ends (`bounds: "
                f"{{nonfinite: raise}}`). The next start resumes from the newest commit",
                tuple(by_layer.values()),
            )
        result = DecisionResult(
            stats=(),
            choices={},
            saved=saved,
            drift={unit: one.drift for unit, one in measured.items()},
            mine=mine,
            incomplete=tuple(stats[index].unit for index in proposed.missing),
            forced=request is not None,
            interval=proposed.interval,
            preempted=request is not None and request.preempted,
        )
        if self._made is None:
            return result
        (seen, decision, budget), self._made = self._made, None
        return replace(
            result,
            stats=stats if measured_before == len(measured) else unit_stats(self._table, self._ledger, step, measured),
            choices=decision.choices,
            seen=seen,
            offered=budget,
            commits=self._ledger.commits,
        )

    def _measure(
        self,
        units: Sequence[Unit],
        local: Mapping[Unit, LocalUnit],
        measured: dict[Unit, Measured],
        mine: dict[Unit, Measure],
    ) -> None:
        """Measure the units that are not measured yet, and add the results to ``measured`` and ``mine``. Collective."""
        more, own = measure_all(self._job.meter, self._group, [one for one in units if one not in measured], local)
        measured.update(
            (unit, replace(one, drift=None) if unit in self._table.lost else one) for unit, one in more.items()
        )
        mine.update(own)

    def _choose(self, step: int, stats: tuple[UnitStats, ...], request: SaveRequest | None) -> Chosen:
        early, self._proposed = self._proposed, None
        if early is not None and self._made is not None and (early[0], self._made[0], request) == (step, stats, None):
            return early[1]
        return self._choose_on_rank0(stats, partial(self._select, request), step)

    def _choose_on_rank0(
        self,
        stats: tuple[UnitStats, ...],
        select: Callable[[Sequence[UnitStats], Budget, History], Decision],
        step: int,
    ) -> Chosen:
        interval, budget = self._job.pace.choose(), self._budget_tracker.offer(stats, step, self._ledger.reserve)
        decision = select(stats, budget, History(step, self._ledger.commits, interval))
        self._made = stats, decision, budget
        by_choice: dict[tuple[str, str], list[int]] = {}
        for index, one in enumerate(stats):
            choice = decision.choices[one.unit]
            if choice.encoding is not None:
                by_choice.setdefault((choice.encoding, choice.reason), []).append(index)
        ranges = [(key, ones, range(ones[0], ones[-1] + 1)) for key, ones in by_choice.items()]
        missing = set(incomplete(stats, decision))
        return Chosen(
            tuple((*key, whole if len(whole) == len(ones) else ones) for key, ones, whole in ranges),
            [index for index, one in enumerate(stats) if one.unit in missing],
            interval,
        )

    def _select(
        self, request: SaveRequest | None, stats: Sequence[UnitStats], budget: Budget, history: History
    ) -> Decision:
        if request is not None and request.budget_bytes is not None:
            return self._deadline_policy.select(stats, request.budget_bytes(), history)
        decision = self._policy.select(stats, budget, history)
        return decision if request is None else forced(decision, stats, request.reason)
