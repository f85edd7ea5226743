"""Read the newest state of a job from its drift trace, line by line.

:class:`TraceValidator` drops implausible lines: a trace is a plain file, and wrong numbers must not stop its reader.
:class:`TraceFollower` keeps the last few decisions and saves, never the whole trace. Each is owned by one thread."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from store.names import Unit
from store.trace import CommitLine, DecisionLine, FailedLine, JobLine, Line, ResumedLine

_DECISIONS = 64  # decisions kept
_FEW = 32  # saves and intervals from which rates are computed
_LATEST = 253_000_000_000.0  # largest Unix time that a calendar can represent
_MOST = float(1 << 60)  # largest plausible number of steps, bytes or seconds


@dataclass(frozen=True)
class LastDecision:
    """A decision with the drift of each unit, as measured then or when its save was staged. ``at`` is Unix time."""

    step: int
    at: float
    drift: Mapping[Unit, float]
    sick: frozenset[Unit]
    skipped: str | None


@dataclass(frozen=True)
class LastSave:
    """A commit. ``full``: raw bytes of a full save; ``gap``: seconds since the previous commit of this run, or None."""

    step: int
    at: float
    written: int
    full: int
    gap: float | None


@dataclass(frozen=True)
class JobStatus:
    """State of the newest incarnation of a job."""

    job: JobLine
    last_seen: float
    decisions: Sequence[LastDecision]  # the last few, newest last; ``saves`` likewise
    saves: Sequence[LastSave]
    failed: tuple[str, ...]  # reasons of the saves that failed since the newest commit
    step_seconds: float | None  # seconds per step, None if unknown
    decision_gap: float | None
    interval: int | None
    full_bytes: int  # raw bytes of a save of everything that changes

    @property
    def newest(self) -> LastDecision | None:
        return self.decisions[-1] if self.decisions else None

    @property
    def save_gap(self) -> float | None:
        """Return the median seconds between commits, None with fewer than two."""
        gaps = [one.gap for one in self.saves if one.gap is not None]
        return median(gaps) if gaps else None

    @property
    def sick(self) -> frozenset[Unit]:
        """Return the units with NaN or Inf at the last decision that measured."""
        measured = next((one for one in reversed(self.decisions) if one.drift or one.sick), None)
        return frozenset() if measured is None else measured.sick

    @property
    def next_gap(self) -> float | None:
        """Return the announced seconds to the next decision. With ``every: auto`` intervals grow up to fourfold at a
        time."""
        if self.interval is None or self.step_seconds is None:
            return None
        return self.interval * self.step_seconds

    def step_at(self, now: float) -> float | None:
        """Estimate the job's step at ``now``, at most the step of its next decision."""
        last = self.newest
        if last is None or self.step_seconds is None:
            return None if last is None else float(last.step)
        ahead = max(0.0, now - last.at) / self.step_seconds if self.step_seconds else 0.0
        most = self.interval if self.interval is not None else ahead
        return last.step + min(ahead, float(most))


class TraceFollower:
    """Tracks the state of a job line by line, keeping the last few decisions."""

    def __init__(self) -> None:
        self._job: JobLine | None = None
        self._units: tuple[Unit, ...] = ()
        self._full = 0
        self._last_seen = 0.0
        self._decisions: deque[LastDecision] = deque(maxlen=_DECISIONS)
        self._gaps: deque[tuple[int, float]] = deque(maxlen=_FEW)
        self._saves: deque[LastSave] = deque(maxlen=_FEW)
        self._failed: list[str] = []
        self._interval: int | None = None

    def feed(self, line: Line) -> None:
        if isinstance(line, JobLine):
            self._on_job(line)
        elif self._job is None:
            return
        elif isinstance(line, DecisionLine):
            self._on_decision(line, self._at(line.seconds))
        elif isinstance(line, CommitLine):
            self._on_commit(line, self._at(line.seconds))
        elif isinstance(line, FailedLine):
            self._failed.append(line.reason)
            self._at(line.seconds)
        elif isinstance(line, ResumedLine):
            self._gaps.clear()
            self._at(line.seconds)

    def job_status(self) -> JobStatus | None:
        """Return the state of the job, None before the first job line."""
        job = self._job
        if job is None:
            return None
        steps = [(later[0] - earlier[0], later[1] - earlier[1]) for earlier, later in pairwise(self._gaps)]
        paces = [seconds / count for count, seconds in steps if count > 0]
        return JobStatus(
            job=job,
            last_seen=self._last_seen,
            decisions=tuple(self._decisions),
            saves=tuple(self._saves),
            failed=tuple(self._failed[-_FEW:]),
            step_seconds=median(paces) if paces else None,
            decision_gap=median(seconds for _, seconds in steps) if steps else None,
            interval=self._interval,
            full_bytes=self._full,
        )

    def _at(self, seconds: float) -> float:
        started = 0.0 if self._job is None else self._job.started
        self._last_seen = max(self._last_seen, started + seconds)
        return started + seconds

    def _on_job(self, line: JobLine) -> None:
        if self._job is None or line.started != self._job.started:
            self._gaps.clear()
            self._saves.clear()
            self._failed.clear()
            self._last_seen = line.started
        self._job = line
        self._units = tuple(one.unit for one in line.units)
        self._full = sum(one.nbytes for one in line.units if one.moving)
        self._at(line.seconds)

    def _on_decision(self, line: DecisionLine, at: float) -> None:
        self._interval = line.interval if line.interval is not None else self._interval
        drift = {unit: value for unit, value in zip(self._units, line.drift, strict=False) if value is not None}
        sick = frozenset(self._units[index] for index in line.sick if 0 <= index < len(self._units))
        self._decisions.append(LastDecision(line.step, at, drift, sick, line.skipped))
        self._gaps.append((line.step, at))

    def _on_commit(self, line: CommitLine, at: float) -> None:
        gap = at - self._saves[-1].at if self._saves else None
        besides = max(0, line.written - sum(size[0] for size in line.sizes.values()))
        self._saves.append(LastSave(line.step, at, line.written, self._full + besides, gap))
        self._failed.clear()
        for place in range(len(self._decisions) - 1, -1, -1):
            one = self._decisions[place]
            if one.step == line.step:
                staged = {
                    self._units[index]: size[3]
                    for index, size in line.sizes.items()
                    if size[3] is not None and 0 <= index < len(self._units)
                }
                self._decisions[place] = replace(one, drift={**staged, **one.drift})
                return


class TraceValidator:
    """Checks the lines of one trace, in their order."""

    def __init__(self) -> None:
        self._units = 0

    def validate(self, lines: Iterable[Line | None]) -> Iterator[Line | None]:
        """Yield each line, or None if it is not plausible."""
        for line in lines:
            if line is None or not _plausible(line, self._units):
                yield None
                continue
            if isinstance(line, JobLine):
                self._units = len(line.units)
            yield line


def _plausible(line: Line, units: int) -> bool:
    if isinstance(line, JobLine):
        numbers = (number for one in line.units for number in (one.nbytes, abs(one.position)))
        return _within((line.started, line.seconds), _LATEST) and _within(numbers, _MOST)
    if isinstance(line, DecisionLine):
        named = (*line.saved, *line.sick, *line.changed)
        right = len(line.drift) in (0, units) and all(0 <= index < units for index in named)
        return right and _within((line.step, line.seconds, line.stall, line.copy_wait, line.interval or 0), _MOST)
    if isinstance(line, CommitLine):
        sizes = (size[0] for size in line.sizes.values())
        right = all(0 <= index < units for index in line.sizes)
        return right and _within((line.step, line.seconds, line.took, line.written, *sizes), _MOST)
    if isinstance(line, FailedLine):
        return _within((line.step, line.seconds), _MOST)
    return not isinstance(line, ResumedLine) or _within((line.step, line.newest, line.seconds), _MOST)


def _within(numbers: Iterable[float], most: float) -> bool:
    """Return whether all numbers are in range; false for NaN."""
    return all(0 <= number <= most for number in numbers)
