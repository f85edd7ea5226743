"""What the newest lines of a trace say of a job: how far it is, how fast, what its last saves came to.

A :class:`Listener` is told lines in their order and keeps the last few; it never holds a trace. It knows no store and
no clock but the trace's own. Owned by whoever reads the trace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from store.names import Unit
from store.trace import CommitLine, DecisionLine, FailedLine, JobLine, Line, ResumedLine

_FEW = 32
"""Saves, and gaps between decisions, that rates are told from."""


@dataclass(frozen=True)
class Decided:
    """A decision, by unit. at: seconds since 1970. drift: as measured then, or when its save was staged."""

    step: int
    at: float
    drift: Mapping[Unit, float]
    sick: frozenset[Unit]
    skipped: str | None
    stall: float


@dataclass(frozen=True)
class Saved:
    """A commit. full: what everything, raw, would have taken in its place. gap: seconds since the one before it, None
    where there is none in this incarnation."""

    step: int
    at: float
    written: int
    full: int
    gap: float | None


@dataclass(frozen=True)
class Pulse:
    """Of the newest incarnation. decisions, saves: the last few, newest last.

    failed: reasons of the saves that failed since the newest commit. step_seconds: of a step; None where too little was
    seen. full_bytes: of a save of all that moves, raw. began: when the incarnation did."""

    job: JobLine
    began: float
    heard: float
    decisions: Sequence[Decided]
    saves: Sequence[Saved]
    failed: tuple[str, ...]
    step_seconds: float | None
    decision_gap: float | None
    interval: int | None
    full_bytes: int

    @property
    def newest(self) -> Decided | None:
        """The last decision."""
        return self.decisions[-1] if self.decisions else None

    @property
    def save_gap(self) -> float | None:
        """Seconds between two commits, usually; None where there were not two."""
        gaps = [one.gap for one in self.saves if one.gap is not None]
        return median(gaps) if gaps else None

    @property
    def stall_share(self) -> float | None:
        """Of wall time, over the decisions at hand."""
        if len(self.decisions) < 2 or self.decisions[-1].at <= self.decisions[0].at:
            return None
        stalled = sum(one.stall for one in self.decisions[1:])
        return stalled / (self.decisions[-1].at - self.decisions[0].at)

    @property
    def sick(self) -> frozenset[Unit]:
        """Units that were not finite at the last decision that measured anything."""
        measured = next((one for one in reversed(self.decisions) if one.drift or one.sick), None)
        return frozenset() if measured is None else measured.sick

    @property
    def next_gap(self) -> float | None:
        """Seconds from the last decision to the next one, by what the job said: under ``every: auto`` the interval
        grows fourfold at a time, so that what was usual is no measure."""
        if self.interval is None or self.step_seconds is None:
            return None
        return self.interval * self.step_seconds

    def step_at(self, now: float) -> float | None:
        """The step that the job is at, as far as can be told: no further than where its next decision would be."""
        last = self.newest
        if last is None or self.step_seconds is None:
            return None if last is None else float(last.step)
        ahead = max(0.0, now - last.at) / self.step_seconds if self.step_seconds else 0.0
        most = self.interval if self.interval is not None else ahead
        return last.step + min(ahead, float(most))


class Listener:
    """keep: decisions that are remembered."""

    def __init__(self, keep: int = 64) -> None:
        self._keep = keep
        self._job: JobLine | None = None
        self._units: tuple[Unit, ...] = ()
        self._full = 0
        self._heard = 0.0
        self._decisions: deque[Decided] = deque(maxlen=keep)
        self._gaps: deque[tuple[int, float]] = deque(maxlen=_FEW)
        self._saves: deque[Saved] = deque(maxlen=_FEW)
        self._failed: list[str] = []
        self._interval: int | None = None

    def hear(self, line: Line) -> None:
        """The next line."""
        if isinstance(line, JobLine):
            self._begun(line)
        elif self._job is None:
            return
        elif isinstance(line, DecisionLine):
            self._decided(line, self._at(line.seconds))
        elif isinstance(line, CommitLine):
            self._committed(line, self._at(line.seconds))
        elif isinstance(line, FailedLine):
            self._failed.append(line.reason)
            self._at(line.seconds)
        elif isinstance(line, ResumedLine):
            self._gaps.clear()
            self._at(line.seconds)

    def pulse(self) -> Pulse | None:
        """None where no job was heard of."""
        job = self._job
        if job is None:
            return None
        steps = [(later[0] - earlier[0], later[1] - earlier[1]) for earlier, later in pairwise(self._gaps)]
        paces = [seconds / count for count, seconds in steps if count > 0]
        return Pulse(
            job=job,
            began=job.started,
            heard=self._heard,
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
        self._heard = max(self._heard, started + seconds)
        return started + seconds

    def _begun(self, line: JobLine) -> None:
        if self._job is None or line.started != self._job.started:
            self._gaps.clear()
            self._saves.clear()
            self._failed.clear()
            self._heard = line.started
        self._job = line
        self._units = tuple(one.unit for one in line.units)
        self._full = sum(one.nbytes for one in line.units if one.moving)
        self._at(line.seconds)

    def _decided(self, line: DecisionLine, at: float) -> None:
        self._interval = line.interval if line.interval is not None else self._interval
        drift = {unit: value for unit, value in zip(self._units, line.drift, strict=False) if value is not None}
        sick = frozenset(self._named(line.sick))
        self._decisions.append(Decided(line.step, at, drift, sick, line.skipped, line.stall + line.copy_wait))
        self._gaps.append((line.step, at))

    def _committed(self, line: CommitLine, at: float) -> None:
        gap = at - self._saves[-1].at if self._saves else None
        besides = max(0, line.written - sum(size[0] for size in line.sizes.values()))
        self._saves.append(Saved(line.step, at, line.written, self._full + besides, gap))
        self._failed.clear()
        for place in range(len(self._decisions) - 1, -1, -1):
            one = self._decisions[place]
            if one.step == line.step:
                staged = {
                    self._units[index]: size[3]
                    for index, size in line.sizes.items()
                    if size[3] is not None and 0 <= index < len(self._units)
                }
                self._decisions[place] = Decided(
                    one.step, one.at, {**staged, **one.drift}, one.sick, one.skipped, one.stall
                )
                return

    def _named(self, indices: Iterable[int]) -> Iterable[Unit]:
        return (self._units[index] for index in indices if 0 <= index < len(self._units))
