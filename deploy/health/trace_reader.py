"""Describe the newest state of a job in its drift trace, and drop the trace's implausible lines.

A trace is a plain file, and wrong numbers must not stop its reader."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from store.names import Unit
from store.trace import CommitLine, DecisionLine, FailedLine, JobLine, Line, ResumedLine

_LATEST = 253_000_000_000.0  # largest Unix time that a calendar can represent
_MOST = float(1 << 60)  # largest plausible number of steps, bytes or seconds


@dataclass(frozen=True)
class LastDecision:
    """A decision. ``at`` is Unix time. ``measured``: whether units were, then or when its save was staged."""

    step: int
    at: float
    sick: frozenset[Unit]
    measured: bool
    skipped: str | None


@dataclass(frozen=True)
class LastSave:
    """A commit. ``full``: raw bytes of a full save; ``gap``: seconds since the previous commit of this run, or None."""

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
        measured = next((one for one in reversed(self.decisions) if one.measured or one.sick), None)
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
