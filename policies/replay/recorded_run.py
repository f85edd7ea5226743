"""A trace as decisions and uninterrupted segments.

A recorded run as a replay needs it: decisions with what became of their saves, and stretches of unbroken training.

Made of the lines of a trace. Pure. It does not know how far units moved (:mod:`policies.replay.movement`), nor what
another
policy would have done (:mod:`policies.replay.replay`).

At which recorded decisions another configuration would decide. Pure.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from policies.accounting import Fitted
from store.errors import UsageError
from store.trace import (
    CommitLine,
    DecisionLine,
    FailedLine,
    JobLine,
    Line,
    MovedLine,
    ResumedLine,
    Trace,
    TracedUnit,
    incarnations,
)

_PRETENDED = "observe"
"""Why a decision of an observed run did not save."""


@dataclass(frozen=True)
class DecisionPoint:
    """A decision, and what became of the save that it began, if it did.

    copied: seconds that the next optimizer step waited for copies of that save. commit, failed: neither where nothing
    was saved, or where the process ended first."""

    line: DecisionLine
    copied: float = 0.0
    commit: CommitLine | None = None
    failed: bool = False

    @property
    def saved(self) -> bool:
        """Whether a save began, or would have."""
        return bool(self.line.saved) and self.line.skipped in (None, _PRETENDED)


@dataclass(frozen=True)
class RunSegment:
    """Training without a break: no restart, no resume. Movement is known within one only.

    begins: the step at which it begins, if that is known. process: a new one began here, so that the clock starts at
    0 and so does the account. resumed: the state was that of a commit, of step ``newest``."""

    job: JobLine
    begins: int | None
    process: bool
    resumed: bool
    moments: tuple[DecisionPoint, ...]
    moved: Mapping[int, MovedLine]
    newest: int | None = None

    @property
    def units(self) -> tuple[TracedUnit, ...]:
        """What there was to save."""
        return self.job.units

    @property
    def start(self) -> int:
        """The first step of which the state is known, or guessed: one interval before the first decision."""
        if self.begins is not None:
            return self.begins
        steps = [moment.line.step for moment in self.moments]
        return max(0, 2 * steps[0] - steps[1]) if len(steps) > 1 else 0


@dataclass(frozen=True)
class Costs:
    """What saves took in the recorded run. stall: seconds by bytes copied, raw; a decision that saves nothing copies
    none. write: seconds to the commit by bytes written. overhead: bytes that a save writes besides units."""

    stall: Fitted = field(default_factory=Fitted)
    write: Fitted = field(default_factory=Fitted)
    overhead: float = 0.0


@dataclass(frozen=True)
class Run:
    """All of it."""

    eras: tuple[RunSegment, ...]
    seconds: float
    costs: Costs

    @property
    def settings(self) -> Mapping[str, Any]:
        """The configuration of the newest incarnation, as far as it was set."""
        return self.eras[-1].job.settings

    @property
    def moments(self) -> Sequence[DecisionPoint]:
        """All decisions."""
        return [moment for era in self.eras for moment in era.moments]


def run_of(trace: Trace) -> Run:
    """The run that a trace tells of. Incarnations without a decision are left out."""
    eras: list[RunSegment] = []
    seconds: dict[float, float] = {}
    before: JobLine | None = None
    for job, lines in incarnations(trace):
        again = before is not None and job.started == before.started
        before = job
        _require_one_job(job, lines)
        latest = max((line.seconds for line in lines if isinstance(line, DecisionLine | CommitLine)), default=0.0)
        seconds[job.started] = max(seconds.get(job.started, 0.0), latest)
        eras += [era for era in _eras(job, lines, again) if era.moments and era.units]
    if not eras:
        raise UsageError("the trace holds no decision yet: let the job run on, or give another trace")
    return Run(tuple(eras), sum(seconds.values()), _costs(eras))


def _require_one_job(job: JobLine, lines: Sequence[Line]) -> None:
    """Two jobs that wrote one file, or a first line that is lost, would make figures of nothing."""
    told = [line.seconds for line in lines if not isinstance(line, MovedLine | JobLine)]
    back = any(later < earlier for earlier, later in pairwise(told))
    if back or not all(_fits(line, len(job.units)) for line in lines):
        raise UsageError(
            f"the trace is not of one job: lines after the beginning of epoch {job.epoch} do not follow from each "
            "other. Did two jobs write it, or is the first line of one lost? Give each job a `trace: {path: ...}` of "
            "its own"
        )


def _fits(line: Line, units: int) -> bool:
    if isinstance(line, DecisionLine):
        columns = (line.drift, line.staleness, line.error, line.encoding, line.stored_bytes)
        named = (*line.saved, *line.sick, *line.changed)
        return all(len(column) in (0, units) for column in columns) and all(0 <= index < units for index in named)
    if isinstance(line, CommitLine):
        return all(0 <= index < units for index in line.sizes)
    if isinstance(line, MovedLine):
        return all(len(column) == units for column in line.since.values())
    return True


def _eras(job: JobLine, lines: Sequence[object], again: bool) -> Iterator[RunSegment]:
    resumed: ResumedLine | None = None
    held: list[object] = []
    process = not again
    for line in lines:
        if isinstance(line, ResumedLine):
            yield _era(job, held, resumed, process)
            resumed, held, process = line, [], process and not _decided(held)
        else:
            held.append(line)
    yield _era(job, held, resumed, process)


def _decided(lines: Sequence[object]) -> bool:
    return any(isinstance(line, DecisionLine) for line in lines)


def _era(job: JobLine, lines: Sequence[object], resumed: ResumedLine | None, process: bool) -> RunSegment:
    moments: list[DecisionPoint] = []
    under_way: int | None = None
    for line in lines:
        if isinstance(line, DecisionLine):
            if under_way is not None and under_way == len(moments) - 1:
                last = moments[under_way]
                moments[under_way] = DecisionPoint(last.line, line.copy_wait, last.commit, last.failed)
            moments.append(DecisionPoint(line))
            under_way = len(moments) - 1 if moments[-1].saved else under_way
        elif isinstance(line, CommitLine | FailedLine):
            found = _of_step(moments, line.step)
            if found is not None:
                one = moments[found]
                committed = line if isinstance(line, CommitLine) else None
                moments[found] = DecisionPoint(one.line, one.copied, committed, committed is None)
    moved = {line.step: line for line in lines if isinstance(line, MovedLine)}
    begins, newest = (resumed.step, resumed.newest) if resumed else (None, None)
    return RunSegment(job, begins, process, resumed is not None, tuple(moments), moved, newest)


def _of_step(moments: Sequence[DecisionPoint], step: int) -> int | None:
    """The newest save of a step: one at a time is under way."""
    return next((i for i in range(len(moments) - 1, -1, -1) if moments[i].line.step == step and moments[i].saved), None)


def _costs(eras: Sequence[RunSegment]) -> Costs:
    """An observed run copies and writes nothing, so that nothing is learned of it but what deciding takes."""
    costs = Costs()
    overheads = []
    for era in eras:
        for moment in era.moments:
            line, commit = moment.line, moment.commit
            if line.drift or moment.saved:
                copied = sum(era.units[index].nbytes for index in line.saved) if moment.saved else 0
                costs.stall.learn(0 if era.job.observing else copied, line.stall + moment.copied)
            if commit is not None and not era.job.observing:
                costs.write.learn(commit.written, commit.took)
                overheads.append(commit.written - sum(size[0] for size in commit.sizes.values()))
    return Costs(costs.stall, costs.write, max(0.0, min(overheads, default=0.0)))


def chosen(moments: Sequence[DecisionPoint], every: int | None) -> list[DecisionPoint]:
    """The moments nearest to the multiples of ``every``, the later of two equally near, and those that were forced.

    None: all of them. Where the trace is coarser than ``every``, all of them too."""
    if every is None or not moments:
        return list(moments)
    steps = [moment.line.step for moment in moments]
    first = -(-steps[0] // every) * every
    nearest = {_nearest(steps, step) for step in range(first, steps[-1] + 1, every)}
    return [moment for i, moment in enumerate(moments) if i in nearest or moment.line.forced]


def widest(moments: Sequence[DecisionPoint]) -> int | None:
    """The most steps between two of them; None where there are fewer than two."""
    steps = [moment.line.step for moment in moments]
    return max((later - step for step, later in itertools.pairwise(steps)), default=None)


def _nearest(steps: Sequence[int], step: int) -> int:
    after = bisect_left(steps, step)
    if after == len(steps):
        return after - 1
    return after if after == 0 or steps[after] - step <= step - steps[after - 1] else after - 1
