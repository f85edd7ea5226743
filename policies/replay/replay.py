"""Replay a recorded run under another configuration, with the same policy code and the recorded clock.

Recorded values are used while the replay agrees with the recorded run: the drift of a unit whose version is the
recorded one, the bytes of a unit stored as recorded, stall and write time of an equal decision, and budget offers while
all decisions were equal. So the recorded configuration reproduces the recorded run to the byte. Everything else is
estimated: movement, bytes (:mod:`policies.encodings`), seconds (:mod:`policies.accounting`); see docs/simulate.md."""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest

import numpy as np

from policies.base import Budget, Decision, History, UnitStats
from policies.bounds import forced, hurried, incomplete
from policies.builtin import Fallback
from policies.encodings import expected_bytes, expected_error
from policies.replay.failure_cost import Held, StoreTimeline, TimelineInterval
from policies.replay.movement import Movement, movement_of
from policies.replay.recorded_run import DecisionPoint, Run, RunSegment, chosen
from policies.replay.state import Pending, ReplayedDecision, ReplayPlan, ReplayResult, ReplayState, Version
from policies.validation import Failure, failure_of
from store.names import Unit
from store.trace import TracedUnit

_OUTSIDE = frozenset({"disagree", "unreachable", "unsupported", "fenced", "storage"})
"""``skipped`` values that do not depend on the policy."""


def replay(run: Run, plan: ReplayPlan) -> ReplayResult:
    """Replay a run. Deterministic."""
    return _Replay(run, plan).result()


class _Replay:
    _segment: RunSegment
    _movement: Movement

    def __init__(self, run: Run, plan: ReplayPlan) -> None:
        self._run, self._plan = run, plan
        self._costs = plan.costs or run.costs
        self._sees_all = plan.policy.needs_drift or plan.sees_all
        self._state = ReplayState()
        self._now = 0.0
        self._account = plan.account(lambda: self._now)
        self._copied = 0.0
        self._decisions: list[ReplayedDecision] = []
        self._committed: list[ReplayedDecision] = []
        self._failures: list[Failure] = []
        self._intervals: list[TimelineInterval] = []
        self._segments: list[tuple[tuple[TracedUnit, ...], Movement]] = []

    def result(self) -> ReplayResult:
        for segment, following in zip_longest(self._run.segments, self._run.segments[1:]):
            self._begin(segment)
            self._replay_decisions()
            pending, self._state.pending = self._state.pending, None
            if pending is not None and not pending.failed and self._becomes_durable(pending, following):
                self._commit(pending)
        decisions, committed, failures = tuple(self._decisions), tuple(self._committed), tuple(self._failures)
        timeline = StoreTimeline(self._segments, self._intervals)
        return ReplayResult(self._plan, decisions, committed, timeline, self._state.on_path, failures)

    def _begin(self, segment: RunSegment) -> None:
        self._segment, self._movement, self._copied = segment, movement_of(segment), 0.0
        self._segments.append((segment.units, self._movement))
        state, line = self._state, segment.decisions[0].line
        if segment.process:
            self._now = 0.0
            self._account = self._plan.account(lambda: self._now)
        empty = bool(line.staleness) and all(staleness is None for staleness in line.staleness)  # the store
        if len(self._segments) == 1 or (empty and not segment.resumed and segment.process):
            state.begin(segment)
        elif segment.resumed:
            state.resume(segment, self._plan.goes_back, self._account.limited)
        else:
            state.durable, state.durable_newest = state.versions, state.newest

    def _becomes_durable(self, pending: Pending, following: RunSegment | None) -> bool:
        """Return whether the save under way at the end of the segment becomes durable.

        A trace records a commit when training learns of it, so the last commit of a killed job may be missing. The next
        resume shows it by ``newest``; a step beyond the segment is that of a commit made before the segment."""
        segment, step = self._segment, pending.decision.step
        last = next((point for point in reversed(segment.decisions) if point.saved), None)
        unknown = last is not None and last.commit is None and not last.failed
        if last is None or not unknown or following is None or segment.job.observing:
            return True
        final = segment.decisions[-1].line
        if following.newest is not None and last.line.step <= following.newest <= final.step:
            return step <= following.newest
        return step < last.line.step and pending.done_at <= final.seconds

    def _commit(self, pending: Pending) -> None:
        state = self._state
        state.versions = {**state.versions, **pending.versions}
        state.commits += 1
        state.newest = pending.decision.step
        state.durable, state.durable_newest = state.versions, state.newest
        self._committed.append(pending.decision)

    def _replay_decisions(self) -> None:
        """Replay the decisions of the segment; steps between them count even without a decision there."""
        segment, points = self._segment, self._segment.decisions
        deciding = {id(point) for point in chosen(points, self._plan.every)}
        # The first step that counts is that of the resume, or the beginning if the store is still empty.
        if segment.resumed or (segment.process and self._held() is None):
            self._between(float(segment.start), float(points[0].line.step))
        for point, following in zip_longest(points, points[1:]):
            if id(point) in deciding:
                self._now = point.line.seconds
                self._decide(point)
            if following is not None:
                self._expose(point, following, id(following) in deciding)

    def _between(self, begin: float, end: float) -> None:
        if begin < end:
            self._intervals.append(TimelineInterval(len(self._segments) - 1, begin, end, self._held()))

    def _decide(self, point: DecisionPoint) -> None:
        line, state = point.line, self._state
        if self._copied:
            self._account.stalled(self._copied)
            self._copied = 0.0
        impossible = line.skipped if line.skipped in _OUTSIDE else None
        if not self._settled(point):
            impossible = "busy"
        if impossible:
            self._add(ReplayedDecision(line.step, line.seconds, None, (), {}, impossible), point)
            return
        stats = self._stats(point)
        budget = self._offer(point, stats)
        decision = self._select(stats, budget, point)
        saved = {unit: choice.encoding for unit, choice in decision.choices.items() if choice.encoding is not None}
        skipped = "withheld" if incomplete(stats, decision) else None if saved else "nothing"
        replayed = ReplayedDecision(line.step, line.seconds, budget.bytes, stats, {} if skipped else saved, skipped)
        if skipped is None:
            replayed = self._save(replayed, point)
        state.on_path = state.on_path and self._as_recorded(replayed, point)
        self._add(replayed, point)

    def _settled(self, point: DecisionPoint) -> bool:
        """Commit the save under way if it has finished. Return whether none is under way any more."""
        state, pending, line = self._state, self._state.pending, point.line
        if pending is None:
            return True
        late = line.skipped == "busy" if state.on_path else pending.done_at > line.seconds
        if late and not line.forced:
            return False
        state.pending = None
        if not pending.failed:
            self._account.committed(pending.decision.written, pending.decision.took)
            self._commit(pending)
        return True

    def _stats(self, point: DecisionPoint) -> tuple[UnitStats, ...]:
        state, line, units = self._state, point.line, self._segment.units
        state.note_changes(frozenset(units[index].unit for index in line.changed))
        found = (state.versions.get(unit.unit) for unit in units)
        versions = [None if one is None or one.step > line.step else one for one in found]
        since = np.array([np.inf if one is None else one.since for one in versions])
        moved, sick = self._movement.distance(line.step, since), set(line.sick)
        if self._sees_all:
            sick |= self._found_nonfinite(point)
        shown = []
        for index, (traced, version) in enumerate(zip(units, versions, strict=True)):
            seen = self._sees_all or not traced.moving
            stats = UnitStats(
                unit=traced.unit,
                position=traced.position,
                block=traced.block,
                nbytes=traced.nbytes,
                drift=None,
                staleness=None,
                finite=not seen or index not in sick,
                moving=traced.moving,
                numel=traced.numel,
            )
            if version is not None:
                marked = state.changes.get(traced.unit, 0)
                told = self._plan.same_sizes and self._recorded(point, index, version)
                stats = replace(
                    stats,
                    drift=self._drift(point, index, version, moved[index]) if seen and index not in sick else None,
                    staleness=line.step - version.step,
                    changed_shape=version.size != (traced.nbytes, traced.numel) or version.marked != marked,
                    error=version.error,
                    encoding=version.encoding,
                    stored_bytes=line.stored_bytes[index] if told else version.nbytes,
                )
            shown.append(stats)
        return tuple(shown)

    def _drift(self, point: DecisionPoint, index: int, version: Version, moved: float) -> float | None:
        """Return the recorded drift if the recorded run had this version, or else an estimate; None if unknown."""
        recorded = self._recorded(point, index, version)
        drift = point.line.drift[index] if recorded else None
        # If the job resumed from memory and this version is older, its drift was unknown.
        unknown = recorded and self._segment.resumed and version.step <= self._segment.start
        if drift is not None or unknown or not np.isfinite(moved):
            return drift
        return float(np.hypot(moved, version.error))

    def _recorded(self, point: DecisionPoint, index: int, version: Version) -> bool:
        line = point.line
        if index >= min(len(line.drift), len(line.staleness)) or (staleness := line.staleness[index]) is None:
            return False
        return (line.step - staleness, line.encoding[index]) == (version.step, version.encoding)

    def _offer(self, point: DecisionPoint, stats: tuple[UnitStats, ...]) -> Budget:
        if not self._account.limited:
            return Budget()
        self._account.make_room(max((one.nbytes for one in stats), default=0), sum(one.nbytes for one in stats))
        offered, line = self._account.offer(), point.line
        budget = self._account.budget(line.step, None if offered == math.inf else offered)
        if self._state.on_path and self._plan.same_offers and line.staleness:
            return Budget(line.offered, frozenset(), line.per_step, line.most, line.resumed_for)
        return budget

    def _select(self, stats: tuple[UnitStats, ...], budget: Budget, point: DecisionPoint) -> Decision:
        line = point.line
        history = History(line.step, self._state.commits, line.interval if self._plan.varying else None)
        decision = self._query_policy(stats, budget, history)
        if line.preempted:
            saved = {self._segment.units[index].unit: encoding for index, encoding in line.saved.items()}
            return hurried(decision, stats, saved)
        return forced(decision, stats, "asked for by save()") if line.forced else decision

    def _query_policy(self, stats: tuple[UnitStats, ...], budget: Budget, history: History) -> Decision:
        """Return the policy's decision; if it fails everything is saved, as in a live run."""
        policy = self._plan.policy
        try:
            return policy.select(stats, budget, history)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the edge to the user's own code
            failure = failure_of(error)
        self._failures.append(failure)
        fallback = Fallback(policy.name, failure)
        return fallback.named(self._plan.bounded(fallback).select(stats, budget, history))

    def _save(self, replayed: ReplayedDecision, point: DecisionPoint) -> ReplayedDecision:
        shown = {one.unit: one for one in replayed.stats}
        expected = sum(expected_bytes(shown[unit], encoding) for unit, encoding in replayed.saved.items())
        self._account.begin(expected, free=self._state.newest is None)
        versions = self._stored(replayed, point, shown)
        recorded = point.commit if self._as_recorded(replayed, point) else None
        written = sum(one.nbytes for one in versions.values()) + round(self._costs.overhead)
        if recorded is not None and self._plan.same_sizes:
            written = recorded.written
        took = self._costs.write.cost(written)
        if recorded is not None and self._plan.costs is None:
            took = recorded.took
        replayed = replace(replayed, written=written, took=took)
        # A commit leaves out layers with NaN or infinity.
        sick = {self._segment.units[index].layer for index in (*point.line.sick, *self._found_nonfinite(point))}
        finite = {unit: one for unit, one in versions.items() if unit.layer not in sick}
        self._state.pending = Pending(replayed, finite, point.line.seconds + took, point.failed or not finite)
        return replayed

    def _stored(
        self, replayed: ReplayedDecision, point: DecisionPoint, shown: Mapping[Unit, UnitStats]
    ) -> dict[Unit, Version]:
        sizes = point.commit.sizes if point.commit is not None and self._plan.same_sizes else {}
        versions = {}
        for index, traced in enumerate(self._segment.units):
            unit, encoding = traced.unit, replayed.saved.get(traced.unit)
            if encoding is None:
                continue
            error, nbytes, stored_as = expected_error(shown[unit], encoding), expected_bytes(shown[unit], encoding), ""
            if index in sizes and point.line.saved.get(index) == encoding:
                nbytes, stored_as, error, _ = sizes[index]
            size, marked = (traced.nbytes, traced.numel), self._state.changes.get(unit, 0)
            step = replayed.step
            versions[unit] = Version(step, step, stored_as or encoding, error, int(nbytes), size, marked)
        return versions

    def _found_nonfinite(self, point: DecisionPoint) -> set[int]:
        """Return units that were found to have NaN or infinity only while they were saved."""
        commit = point.commit
        return set() if commit is None else {index for index in point.line.saved if index not in commit.sizes}

    def _as_recorded(self, replayed: ReplayedDecision, point: DecisionPoint) -> bool:
        recorded = point.line.saved if point.saved else {}
        return {self._segment.units[index].unit: encoding for index, encoding in recorded.items()} == replayed.saved

    def _add(self, replayed: ReplayedDecision, point: DecisionPoint) -> None:
        """Append a decision, and charge its stall: the recorded one if the decision equals the recorded one."""
        if self._plan.costs is None and self._as_recorded(replayed, point):
            stall, self._copied = point.line.stall, point.copied
        else:
            copied = sum(unit.nbytes for unit in self._segment.units if unit.unit in replayed.saved)
            stall, self._copied = self._costs.stall.cost(copied), 0.0
        self._account.stalled(stall)
        self._decisions.append(replace(replayed, stall=stall + self._copied))

    def _expose(self, point: DecisionPoint, following: DecisionPoint, deciding: bool) -> None:
        """Record the store's state up to the next recorded decision, before and after the save becomes durable.

        deciding: this configuration decides at the next one too."""
        state, begin, end = self._state, float(point.line.step), float(following.line.step)
        pending = state.pending
        if pending is None or pending.failed:
            self._between(begin, end)
            return
        span = following.line.seconds - point.line.seconds
        busy = state.on_path and deciding
        late = following.line.skipped == "busy" if busy else pending.done_at > following.line.seconds
        share = 1.0 if late or span <= 0 else min(1.0, max(0.0, (pending.done_at - point.line.seconds) / span))
        durable_at = begin + share * (end - begin)
        self._between(begin, durable_at)
        if share < 1.0 or not late:
            state.durable = {**state.versions, **pending.versions}
            state.durable_newest = pending.decision.step
            self._between(durable_at, end)

    def _held(self) -> Held | None:
        newest, durable = self._state.durable_newest, self._state.durable
        known = [durable[unit.unit] for unit in self._segment.units if unit.unit in durable]
        if newest is None or len(known) < len(self._segment.units):
            return None
        return Held(
            np.array([float(one.step) for one in known]),
            np.array([float(one.since) for one in known]),
            np.array([one.error for one in known]),
            float(newest),
        )
