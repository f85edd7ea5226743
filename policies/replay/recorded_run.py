"""Build a recorded run from a trace: decisions with the outcome of their saves, and segments of unbroken training.

Also selects the recorded decisions at which another configuration would decide. Pure."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from policies.accounting import Fitted
from store import trace as traces
from store.errors import UsageError

_OBSERVED = "observe"  # ``skipped`` of decisions under policy observe


@dataclass(frozen=True)
class DecisionPoint:
    """A decision and the outcome of its save; neither ``commit`` nor ``failed`` is set if the process ended first."""

    line: traces.DecisionLine
    copied: float = 0.0  # seconds that the next optimizer step waited for copies of the save
    commit: traces.CommitLine | None = None
    failed: bool = False

    @property
    def saved(self) -> bool:
        """Whether a save began, or would have under policy observe."""
        return bool(self.line.saved) and self.line.skipped in (None, _OBSERVED)


@dataclass(frozen=True)
class RunSegment:
    """Training without a restart or resume. Movement is known only within a segment."""

    job: traces.JobLine
    begins: int | None  # first step, if known
    process: bool  # a new process began here: clock and account start at 0
    resumed: bool  # the state was that of a commit, of step ``newest``
    decisions: tuple[DecisionPoint, ...]
    moved: Mapping[int, traces.MovedLine]
    newest: int | None = None

    @property
    def units(self) -> tuple[traces.TracedUnit, ...]:
        return self.job.units

    @property
    def start(self) -> int:
        """First step whose state is known; if unknown, one interval before the first decision."""
        if self.begins is not None:
            return self.begins
        steps = [point.line.step for point in self.decisions]
        return max(0, 2 * steps[0] - steps[1]) if len(steps) > 1 else 0

    def moves_from(self, version: int) -> int:
        """Return the step from which live values move away from a version: the resume, if that is later."""
        return max(version, self.start) if self.resumed else version


@dataclass(frozen=True)
class Costs:
    """Costs of saves in the recorded run."""

    stall: Fitted = field(default_factory=Fitted)  # seconds of stall by raw bytes copied
    write: Fitted = field(default_factory=Fitted)  # seconds to the commit by bytes written
    overhead: float = 0.0  # bytes that a save writes besides units


@dataclass(frozen=True)
class Run:
    """A recorded run: its segments, total seconds, and costs."""

    segments: tuple[RunSegment, ...]
    seconds: float
    costs: Costs

    @property
    def settings(self) -> Mapping[str, Any]:
        """Explicitly set configuration of the newest incarnation."""
        return self.segments[-1].job.settings

    @property
    def decisions(self) -> Sequence[DecisionPoint]:
        """All decisions, in order."""
        return [point for segment in self.segments for point in segment.decisions]


def run_of(trace: traces.Trace) -> Run:
    """Build the run recorded in a trace. Incarnations without a decision are left out.

    Raises UsageError if the trace has no decisions, or mixes several jobs."""
    segments: list[RunSegment] = []
    seconds: dict[float, float] = {}
    before: traces.JobLine | None = None
    for job, lines in traces.incarnations(trace):
        same_process, before = before is not None and job.started == before.started, job
        _require_one_job(job, lines)
        latest = max(
            (one.seconds for one in lines if isinstance(one, traces.DecisionLine | traces.CommitLine)), default=0.0
        )
        seconds[job.started] = max(seconds.get(job.started, 0.0), latest)
        segments += [one for one in _segments(job, lines, same_process) if one.decisions and one.units]
    if not segments:
        raise UsageError("the trace holds no decision yet: let the job continue, or use another trace")
    return Run(tuple(segments), sum(seconds.values()), _costs(segments))


def _require_one_job(job: traces.JobLine, lines: Sequence[traces.Line]) -> None:
    """Raise UsageError if two jobs wrote one file, or the first line of a job is lost."""
    seconds = [line.seconds for line in lines if not isinstance(line, traces.MovedLine | traces.JobLine)]
    back = any(later < earlier for earlier, later in pairwise(seconds))
    if back or not all(traces.fits(line, len(job.units)) for line in lines):
        raise UsageError(
            f"the trace mixes several jobs: the lines after the start of epoch {job.epoch} are inconsistent. Two jobs "
            "may have written it, or the first line of one is lost. Set a separate `trace: {path: ...}` for each job"
        )


def _segments(job: traces.JobLine, lines: Sequence[object], same_process: bool) -> Iterator[RunSegment]:
    resumed: traces.ResumedLine | None = None
    since: list[object] = []  # lines since the last resume
    process = not same_process
    for line in lines:
        if isinstance(line, traces.ResumedLine):
            yield _segment(job, since, resumed, process)
            process = process and not any(isinstance(earlier, traces.DecisionLine) for earlier in since)
            resumed, since = line, []
        else:
            since.append(line)
    yield _segment(job, since, resumed, process)


def _segment(
    job: traces.JobLine, lines: Sequence[object], resumed: traces.ResumedLine | None, process: bool
) -> RunSegment:
    points: list[DecisionPoint] = []
    under_way: int | None = None
    for line in lines:
        if isinstance(line, traces.DecisionLine):
            if under_way is not None and under_way == len(points) - 1:
                points[under_way] = replace(points[under_way], copied=line.copy_wait)
            points.append(DecisionPoint(line))
            under_way = len(points) - 1 if points[-1].saved else under_way
        elif isinstance(line, traces.CommitLine | traces.FailedLine):
            # Only one save runs at a time, so the line is about the newest save of its step.
            saves = (i for i in range(len(points) - 1, -1, -1) if points[i].saved)
            if (at := next((i for i in saves if points[i].line.step == line.step), None)) is not None:
                committed = line if isinstance(line, traces.CommitLine) else None
                points[at] = replace(points[at], commit=committed, failed=committed is None)
    moved = {line.step: line for line in lines if isinstance(line, traces.MovedLine)}
    begins, newest = (resumed.step, resumed.newest) if resumed else (None, None)
    return RunSegment(job, begins, process, resumed is not None, tuple(points), moved, newest)


def _costs(segments: Sequence[RunSegment]) -> Costs:
    """Learn the costs of saves. From a run under policy observe, only the time of decisions can be learned."""
    costs = Costs()
    overheads = []
    for segment in segments:
        for point in segment.decisions:
            line, commit = point.line, point.commit
            if line.drift or point.saved:
                copied = sum(segment.units[index].nbytes for index in line.saved) if point.saved else 0
                costs.stall.learn(0 if segment.job.observing else copied, line.stall + point.copied)
            if commit is not None and not segment.job.observing:
                costs.write.learn(commit.written, commit.took)
                overheads.append(commit.written - sum(size[0] for size in commit.sizes.values()))
    return Costs(costs.stall, costs.write, max(0.0, min(overheads, default=0.0)))


def chosen(points: Sequence[DecisionPoint], every: int | None) -> list[DecisionPoint]:
    """Select the decisions closest to the multiples of ``every`` (the later of a tie), and the forced ones.

    ``every`` None, or finer than the trace: all decisions."""
    if every is None or not points:
        return list(points)
    steps = [point.line.step for point in points]
    first = -(-steps[0] // every) * every
    nearest = {_nearest(steps, step) for step in range(first, steps[-1] + 1, every)}
    return [point for i, point in enumerate(points) if i in nearest or point.line.forced]


def widest(points: Sequence[DecisionPoint]) -> int | None:
    """Return the most steps between two decisions; None if there are fewer than two."""
    return max((later.line.step - point.line.step for point, later in pairwise(points)), default=None)


def _nearest(steps: Sequence[int], step: int) -> int:
    after = bisect_left(steps, step)
    if after == len(steps):
        return after - 1
    return after if after == 0 or steps[after] - step <= step - steps[after - 1] else after - 1
