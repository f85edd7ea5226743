"""Replay a recorded run under another configuration, with the same policy code and the recorded clock.

Recorded values are used while the replay agrees with the recorded run: the drift of a unit whose version is the
recorded one, the bytes of a unit stored as recorded, stall and write time of an equal decision, and budget offers while
all decisions were equal. So the recorded configuration reproduces the recorded run to the byte. Everything else is
estimated: movement (:mod:`policies.replay.movement`), bytes (:mod:`policies.encodings`), seconds
(:mod:`policies.accounting`). docs/simulate.md describes the method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from policies.base import Budget, Decision, History, UnitStats
from policies.bounds import forced, hurried, incomplete
from policies.builtin import Fallback
from policies.encodings import expected_bytes, expected_error
from policies.replay.failure_cost import Held, StoreTimeline, TimelineInterval
from policies.replay.movement import Movement, movement_of
from policies.replay.recorded_run import DecisionPoint, Run, RunSegment, chosen
from policies.replay.state import Pending, ReplayedSave, ReplayPlan, ReplayResult, ReplayState, Version
from policies.validation import Failure, failure_of
from store.names import Unit

_OUTSIDE = frozenset({"disagree", "unsupported", "fenced", "storage"})
"""``skipped`` values that do not depend on the policy."""


def replay(run: Run, plan: ReplayPlan) -> ReplayResult:
    """Replay a run. Deterministic."""
    return _Replay(run, plan).result()


class _Replay:
    def __init__(self, run: Run, plan: ReplayPlan) -> None:
        self._run = run
        self._plan = plan
        self._costs = plan.costs or run.costs
        self._sees_all = plan.policy.needs_drift or plan.sees_all
        self._state = ReplayState()
        self._now = 0.0
        self._account = plan.account(lambda: self._now)
        self._made: list[ReplayedSave] = []
        self._committed: list[ReplayedSave] = []
        self._failures: list[Failure] = []
        self._stretches: list[TimelineInterval] = []
        self._movements: list[Movement] = []

    def result(self) -> ReplayResult:
        for number, era in enumerate(self._run.eras):
            self._begin_era(era, first=number == 0)
            _EraReplay(self, era, number).run()
            self._end_era(era, self._run.eras[number + 1] if number + 1 < len(self._run.eras) else None)
        eras = tuple((era.units, movement) for era, movement in zip(self._run.eras, self._movements, strict=True))
        course = StoreTimeline(eras, tuple(self._stretches))
        made, committed, failures = tuple(self._made), tuple(self._committed), tuple(self._failures)
        return ReplayResult(self._plan, made, committed, course, self._state.on_path, failures)

    def _begin_era(self, era: RunSegment, first: bool) -> None:
        state = self._state
        line = era.moments[0].line
        if era.process:
            self._now = 0.0
            self._account = self._plan.account(lambda: self._now)
        anew = bool(line.staleness) and all(one is None for one in line.staleness)
        if first or (anew and not era.resumed and era.process):
            state.begin(era)
        elif era.resumed:
            state.resume(era, self._plan.goes_back)
        else:
            state.durable, state.durable_newest = dict(state.versions), state.newest

    def _end_era(self, era: RunSegment, following: RunSegment | None) -> None:
        pending, self._state.pending = self._state.pending, None
        if pending is not None and not pending.failed and self._becomes_durable(pending, era, following):
            self._commit(pending)

    def _becomes_durable(self, pending: Pending, era: RunSegment, following: RunSegment | None) -> bool:
        """Return whether the save under way at the end of a segment becomes durable.

        A trace records a commit when training learns of it, so the last commit of a killed job may be missing. The next
        resume shows it. Steps beyond the segment belong to commits before it."""
        last = next((moment for moment in reversed(era.moments) if moment.saved), None)
        cut = last is not None and last.commit is None and not last.failed
        if last is None or not cut or following is None or era.job.observing:
            return True
        final = era.moments[-1].line
        if following.newest is not None and last.line.step <= following.newest <= final.step:
            return pending.made.step <= following.newest
        return pending.made.step < last.line.step and pending.done_at <= final.seconds

    def _commit(self, pending: Pending) -> None:
        state, made = self._state, pending.made
        state.versions.update(pending.versions)
        state.commits += 1
        state.newest = made.step
        state.durable, state.durable_newest = dict(state.versions), state.newest
        self._committed.append(made)


class _EraReplay:
    """Replays one segment."""

    def __init__(self, owner: _Replay, era: RunSegment, number: int) -> None:
        self._owner = owner
        self._era = era
        self._number = number
        self._plan = owner._plan
        self._state = owner._state
        self._movement: Movement = movement_of(era)
        owner._movements.append(self._movement)
        self._copied = 0.0

    def run(self) -> None:
        """Replay all recorded decisions; steps between them count even if this configuration does not decide there."""
        moments = self._era.moments
        deciding = {id(moment) for moment in chosen(moments, self._plan.every)}
        self._between(self._begin(), float(moments[0].line.step))
        for number, moment in enumerate(moments):
            if id(moment) in deciding:
                self._owner._now = moment.line.seconds
                self._decide(moment)
            if number + 1 < len(moments):
                then = moments[number + 1]
                self._expose(moment, then, id(then) in deciding)

    def _begin(self) -> float:
        """Return the first step that counts: that of the resume, or the beginning if the store is still empty."""
        era = self._era
        known = era.resumed or (era.process and self._held() is None)
        return float(min(era.start, era.moments[0].line.step) if known else era.moments[0].line.step)

    def _between(self, begin: float, end: float) -> None:
        if begin < end:
            self._owner._stretches.append(TimelineInterval(self._number, begin, end, self._held()))

    def _decide(self, moment: DecisionPoint) -> None:
        line, account, state = moment.line, self._owner._account, self._state
        if self._copied:
            account.stalled(self._copied)
            self._copied = 0.0
        if not self._settled(moment):
            self._add(ReplayedSave(line.step, line.seconds, None, (), {}, "busy"), moment)
            return
        if line.skipped in _OUTSIDE:
            self._add(ReplayedSave(line.step, line.seconds, None, (), {}, line.skipped), moment)
            return
        stats = self._stats(moment)
        budget = self._offer(moment, stats)
        decision = self._select(stats, budget, moment)
        saved = {unit: choice.encoding for unit, choice in decision.choices.items() if choice.encoding is not None}
        skipped = "withheld" if incomplete(stats, decision) else None if saved else "nothing"
        made = ReplayedSave(line.step, line.seconds, budget.bytes, stats, {} if skipped else saved, skipped)
        if skipped is None:
            made = self._save(made, moment)
        state.on_path = state.on_path and self._as_recorded(made, moment)
        self._add(made, moment)

    def _settled(self, moment: DecisionPoint) -> bool:
        """Commit a finished save; return whether none is under way."""
        state, pending, line = self._state, self._state.pending, moment.line
        if pending is None:
            return True
        late = line.skipped == "busy" if state.on_path else pending.done_at > line.seconds
        if late and not line.forced:
            return False
        state.pending = None
        if not pending.failed:
            self._owner._account.committed(pending.made.written, pending.made.took)
            self._owner._commit(pending)
        return True

    def _stats(self, moment: DecisionPoint) -> tuple[UnitStats, ...]:
        state, line = self._state, moment.line
        names = [unit.unit for unit in self._era.units]
        self._note_changes(moment, names)
        versions = [self._version(unit, line.step) for unit in names]
        since = np.array([np.inf if one is None else one.since for one in versions])
        moved = self._movement.distance(line.step, since)
        sick = set(line.sick)
        if self._owner._sees_all:
            sick |= self._found_nonfinite(moment)
        shown = []
        for index, (traced, version) in enumerate(zip(self._era.units, versions, strict=True)):
            seen = self._owner._sees_all or not traced.moving
            drift = None
            if version is not None and seen and index not in sick:
                drift = self._recorded_drift(moment, index, version)
                if drift is None and np.isfinite(moved[index]) and not self._drift_unknown(moment, index, version):
                    drift = float(np.hypot(moved[index], version.error))
            size = (traced.nbytes, traced.numel)
            changed = version is not None and (
                version.size != size or version.marked != state.changes.get(traced.unit, 0)
            )
            shown.append(
                UnitStats(
                    unit=traced.unit,
                    position=traced.position,
                    block=traced.block,
                    nbytes=traced.nbytes,
                    drift=drift,
                    staleness=None if version is None else line.step - version.step,
                    finite=not seen or index not in sick,
                    moving=traced.moving,
                    changed_shape=changed,
                    error=0.0 if version is None else version.error,
                    numel=traced.numel,
                    encoding=None if version is None else version.encoding,
                    stored_bytes=0 if version is None else version.nbytes,
                )
            )
        return tuple(shown)

    def _note_changes(self, moment: DecisionPoint, names: Sequence[Unit]) -> None:
        """Mark units whose set of parameters changed, so that earlier versions do not cover them."""
        state, now = self._state, frozenset(names[index] for index in moment.line.changed)
        for unit in now - state.changed:
            state.changes[unit] = state.changes.get(unit, 0) + 1
        state.changed = now

    def _version(self, unit: Unit, step: int) -> Version | None:
        found = self._state.versions.get(unit)
        return None if found is None or found.step > step else found

    def _recorded_drift(self, moment: DecisionPoint, index: int, version: Version) -> float | None:
        return moment.line.drift[index] if self._is_recorded(moment, index, version) else None

    def _drift_unknown(self, moment: DecisionPoint, index: int, version: Version) -> bool:
        """Return whether the drift was unknown: the job resumed from memory and this version is older."""
        before = self._era.resumed and version.step <= self._era.start
        return before and self._is_recorded(moment, index, version) and moment.line.drift[index] is None

    def _is_recorded(self, moment: DecisionPoint, index: int, version: Version) -> bool:
        """Return whether the recorded run had this version at that decision."""
        line = moment.line
        if index >= len(line.drift) or index >= len(line.staleness):
            return False
        staleness = line.staleness[index]
        found = None if staleness is None else (line.step - staleness, line.encoding[index])
        return found == (version.step, version.encoding)

    def _offer(self, moment: DecisionPoint, stats: tuple[UnitStats, ...]) -> Budget:
        account = self._owner._account
        if not account.limited:
            return Budget()
        account.make_room(max((one.nbytes for one in stats), default=0), sum(one.nbytes for one in stats))
        offered = account.offer()
        if self._state.on_path and self._plan.same_offers and moment.line.staleness:
            return Budget(moment.line.offered)
        return Budget(None if offered == math.inf else offered)

    def _select(self, stats: tuple[UnitStats, ...], budget: Budget, moment: DecisionPoint) -> Decision:
        line = moment.line
        history = History(line.step, self._state.commits, line.interval if self._plan.varying else None)
        decision = self._query_policy(stats, budget, history)
        if line.preempted:
            saved = {self._era.units[index].unit: encoding for index, encoding in line.saved.items()}
            return hurried(decision, stats, saved)
        return forced(decision, stats, "asked for by save()") if line.forced else decision

    def _query_policy(self, stats: tuple[UnitStats, ...], budget: Budget, history: History) -> Decision:
        """Return the policy's decision; if it fails everything is saved, as in a live run."""
        policy = self._plan.policy
        try:
            return policy.select(stats, budget, history)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the edge to the user's own code
            failure = failure_of(error)
        self._owner._failures.append(failure)
        fallback = Fallback(policy.name, failure)
        return fallback.named(self._plan.bounded(fallback).select(stats, budget, history))

    def _save(self, made: ReplayedSave, moment: DecisionPoint) -> ReplayedSave:
        account, state = self._owner._account, self._state
        shown = {one.unit: one for one in made.stats}
        expected = sum(expected_bytes(shown[unit], encoding) for unit, encoding in made.saved.items())
        account.begin(expected, free=state.newest is None)
        versions = self._stored(made, moment, shown)
        same = self._same_save(made, moment)
        written = sum(one.nbytes for one in versions.values()) + round(self._owner._costs.overhead)
        commit = moment.commit
        if same and commit is not None and self._plan.same_sizes:
            written = commit.written
        took = self._owner._costs.write.cost(written)
        if same and commit is not None and self._plan.costs is None:
            took = commit.took
        made = replace(made, written=written, took=took)
        dropped = self._dropped(moment)
        kept = {unit: one for unit, one in versions.items() if unit.layer not in dropped}
        failed = moment.failed or not kept
        state.pending = Pending(made, kept, moment.line.seconds + took, failed)
        return made

    def _stored(
        self, made: ReplayedSave, moment: DecisionPoint, shown: Mapping[Unit, UnitStats]
    ) -> dict[Unit, Version]:
        sizes = moment.commit.sizes if moment.commit is not None and self._plan.same_sizes else {}
        found = {}
        for index, traced in enumerate(self._era.units):
            unit, encoding = traced.unit, made.saved.get(traced.unit)
            if encoding is None:
                continue
            error, nbytes, stored_as = expected_error(shown[unit], encoding), expected_bytes(shown[unit], encoding), ""
            if index in sizes and moment.line.saved.get(index) == encoding:
                nbytes, stored_as, error, _ = sizes[index]
            found[unit] = Version(
                made.step,
                made.step,
                stored_as or encoding,
                error,
                int(nbytes),
                (traced.nbytes, traced.numel),
                self._state.changes.get(unit, 0),
            )
        return found

    def _dropped(self, moment: DecisionPoint) -> set[str]:
        """Return the layers with NaN or infinity, which a commit leaves out."""
        return {self._era.units[index].layer for index in (*moment.line.sick, *self._found_nonfinite(moment))}

    def _found_nonfinite(self, moment: DecisionPoint) -> set[int]:
        """Return units that were found to have NaN or infinity only while they were saved."""
        commit = moment.commit
        return set() if commit is None else {index for index in moment.line.saved if index not in commit.sizes}

    def _same_save(self, made: ReplayedSave, moment: DecisionPoint) -> bool:
        if not moment.saved:
            return False
        names = self._era.units
        return {names[index].unit: encoding for index, encoding in moment.line.saved.items()} == dict(made.saved)

    def _as_recorded(self, made: ReplayedSave, moment: DecisionPoint) -> bool:
        return self._same_save(made, moment) if moment.saved else not made.saved

    def _add(self, made: ReplayedSave, moment: DecisionPoint) -> None:
        """Charge the stall of a decision: the recorded one if the decision is equal."""
        line, costs = moment.line, self._owner._costs
        if self._plan.costs is None and self._as_recorded(made, moment):
            stall, self._copied = line.stall, moment.copied
        else:
            raw = {unit.unit: unit.nbytes for unit in self._era.units}
            stall, self._copied = costs.stall.cost(sum(raw[unit] for unit in made.saved)), 0.0
        self._owner._account.stalled(stall)
        self._owner._made.append(replace(made, stall=stall + self._copied))

    def _expose(self, moment: DecisionPoint, then: DecisionPoint, deciding: bool) -> None:
        """Record the store's state up to the next recorded decision, before and after the save becomes durable.

        deciding: this configuration decides at the next one too."""
        state, begin, end = self._state, float(moment.line.step), float(then.line.step)
        pending = state.pending
        if pending is None or pending.failed:
            self._between(begin, end)
            return
        span = then.line.seconds - moment.line.seconds
        busy = state.on_path and deciding
        late = then.line.skipped == "busy" if busy else pending.done_at > then.line.seconds
        share = 1.0 if late or span <= 0 else min(1.0, max(0.0, (pending.done_at - moment.line.seconds) / span))
        durable_at = begin + share * (end - begin)
        self._between(begin, durable_at)
        if share < 1.0 or not late:
            state.durable = {**state.versions, **pending.versions}
            state.durable_newest = pending.made.step
            self._between(durable_at, end)

    def _held(self) -> Held | None:
        newest, versions = self._state.durable_newest, self._state.durable
        found = [versions.get(unit.unit) for unit in self._era.units]
        if newest is None or any(one is None for one in found):
            return None
        known = [one for one in found if one is not None]
        return Held(
            np.array([float(one.step) for one in known]),
            np.array([float(one.since) for one in known]),
            np.array([one.error for one in known]),
            float(newest),
        )
