"""Read a drift trace once, line by line, into time series of bounded size, and incidents.

When all columns are full, neighbours are merged: drift by maximum, marks by any, counts by sum. Lines of movement are
skipped. A condition that lasts for several decisions is one incident. Names in the texts are untrusted."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
import numpy.typing as npt

from deploy.format import plural, span_text
from deploy.health.facts import SKIPPED, JobStatus, LastDecision, LastSave, Severity
from store import trace as traces
from store.certificate import is_lossy
from store.names import Unit
from store.text import listed

_Floats = npt.NDArray[np.float64]
_MOVEMENT = b'{"kind":"moved"'  # start of the longest lines, which are not needed here
_ALL = 0.99  # share of all bytes from which a save counts as full
_FEW = 32  # newest saves and intervals from which its rates are computed


@dataclass
class Column:
    """Consecutive decisions merged into one column."""

    first_step: int
    last_step: int
    decisions: int = 1
    saves: int = 0
    written: int = 0
    full: int = 0  # bytes of full saves in place of the committed ones
    stall: float = 0.0  # seconds that training waited; ``longest`` is that of one decision
    longest: float = 0.0

    def merge(self, other: "Column") -> None:
        self.last_step = other.last_step
        self.decisions += other.decisions
        self.saves += other.saves
        self.written += other.written
        self.full += other.full
        self.stall += other.stall
        self.longest = max(self.longest, other.longest)


@dataclass
class Bins:
    """Time series by unit and column; all arrays are (units, columns).

    ``drift``: the largest one, NaN if unknown. ``saved``: decisions that stored the unit; ``rounded``: those of them
    with loss. ``sick``: decisions at which it was not finite."""

    most: int = 120  # number of columns, even
    width: int = 1  # decisions per column
    count: int = 0
    columns: list[Column] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.drift: _Floats = np.full((0, self.most), np.nan)
        self.saved, self.rounded, self.sick = np.zeros((3, 0, self.most), np.int64)

    def grow(self, units: int = 0, columns: int = 0) -> None:
        more = ((0, units), (0, columns))
        self.drift = np.pad(self.drift, more, constant_values=np.nan)
        self.saved, self.rounded, self.sick = (np.pad(old, more) for old in (self.saved, self.rounded, self.sick))

    def add(self, step: int) -> int:
        """Add a decision and return its number."""
        if self.count == self.most * self.width:
            self._halve()
        number, self.count = self.count, self.count + 1
        one = Column(step, step)
        if number // self.width == len(self.columns):
            self.columns.append(one)
        else:
            self.columns[-1].merge(one)
        return number

    def pick(self, rows: Sequence[int]) -> None:
        """Select rows in order and drop unused columns, at the end of the run."""
        end = len(self.columns)
        self.drift, self.saved = self.drift[rows, :end], self.saved[rows, :end]
        self.rounded, self.sick = self.rounded[rows, :end], self.sick[rows, :end]

    def _halve(self) -> None:
        self.width *= 2
        for left, right in zip(self.columns[::2], self.columns[1::2], strict=False):
            left.merge(right)
        self.columns = self.columns[::2]
        self.drift = np.fmax(self.drift[:, ::2], self.drift[:, 1::2])
        counts = (self.saved, self.rounded, self.sick)
        self.saved, self.rounded, self.sick = (old[:, ::2] + old[:, 1::2] for old in counts)
        self.grow(columns=self.most // 2)


@dataclass
class Totals(Column):
    """All columns of the trace merged into one, and further sums.

    ``full_stall``: estimate if all saves were full, from the ``full_seen`` ones that were; None without any."""

    failed: int = 0
    seconds: float = 0.0  # of training
    full_stall: float | None = None
    full_seen: int = 0
    incarnations: int = 0
    observing: bool = False


@dataclass(frozen=True)
class Incident:
    """An event in a run. ``step`` and ``at``: step and Unix time of its begin, None if unknown."""

    kind: str
    severity: Severity
    text: str
    step: int | None = None
    at: float | None = None
    until: int | None = None  # last step
    times: int = 1  # decisions at which it held
    key: str = ""  # consecutive incidents with the same key are merged


class Incidents:
    """Collects incidents in order and keeps the newest ``most``; ``dropped`` counts the others."""

    def __init__(self, most: int = 400) -> None:
        self._most = most
        self._found: list[Incident] = []
        self._open: dict[str, int] = {}
        self.dropped = 0

    def add(self, incident: Incident) -> None:
        self._found.append(incident)
        if len(self._found) > 2 * self._most:
            self.dropped += len(self._found) - self._most
            self._found = self._found[-self._most :]
            self._open.clear()

    def update(self, incidents: Sequence[Incident], step: int) -> None:
        """Update the conditions that hold at a decision: continue those that held before, begin new ones, end the rest.

        Harmless ones (``plain``) may pause: they are merged over the whole incarnation."""
        still = {key: place for key, place in self._open.items() if self._found[place].severity == "plain"}
        for incident in incidents:
            if (place := self._open.get(incident.key)) is None:
                self.add(incident)
                still[incident.key] = len(self._found) - 1
            else:
                before = self._found[place]
                self._found[place] = replace(before, until=step, times=before.times + 1)
                still[incident.key] = place
        self._open = still

    def ended(self) -> None:
        """End all conditions because the process ended."""
        self._open.clear()

    def listed(self) -> tuple[Incident, ...]:
        extra = max(0, len(self._found) - self._most)
        self.dropped += extra
        return tuple(self._found[extra:])


def nonfinite_incident(kind: Literal["not finite", "withheld"], units: Sequence[str], step: int, at: float) -> Incident:
    """Return the incident of units with NaN or Inf at a decision, or ``withheld`` from the commit that follows it."""
    when, key = ("", f"sick {'|'.join(units)}") if kind == "not finite" else (" when the save was written", "")
    text = f"{listed(units, 4)} contained NaN or Inf{when}: not saved, the last finite version is kept"
    return Incident(kind, "bad", text, step, at, key=key)


def restart_incident(line: traces.ResumedLine, epoch: int, at: float, gap: float, last_step: int | None) -> Incident:
    """Return the incident of a restart.

    ``gap``: seconds since the last line of the job before. ``last_step``: step of its last decision, or None."""
    text = f"epoch {epoch} resumed at step {line.step}"
    if line.newest != line.step:
        text += f", from the commit of step {line.newest}"
    if last_step is not None and last_step > line.step:
        text += f": {plural(last_step - line.step, 'step')} repeated"
    if gap > 1.0:
        text += f"; {span_text(gap)} after the last trace line of the job before"
    return Incident("restart", "look", text, line.step, at)


@dataclass(frozen=True)
class History:
    """A run as time series."""

    units: tuple[Unit, ...]  # rows of ``bins`` in model order
    blocks: frozenset[str]  # layers that are repeated blocks
    moving: frozenset[Unit]
    bins: Bins
    totals: Totals
    restarts: tuple[int, ...]  # decisions before which the job restarted
    incidents: tuple[Incident, ...]
    dropped: int  # incidents left out; ``skipped``: unreadable lines
    skipped: int
    job_status: JobStatus | None


def read_history(path: Path, most: int = 120, progress: Callable[[int], None] = lambda _: None) -> History:
    """Read a trace file, after the full one before it. ``progress`` gets the bytes of each line. Raises OSError."""
    with traces.opened(path) as file:
        return history_of(traces.iter_lines(_needed(file, progress)), most)


def _needed(file: Iterable[bytes], progress: Callable[[int], None]) -> Iterator[bytes]:
    for raw in file:
        progress(len(raw))
        if not raw.startswith(_MOVEMENT):
            yield raw


def history_of(lines: Iterable[traces.Line | None], most: int = 120) -> History:
    """Process lines in order; None stands for an unreadable one."""
    reader = _Reader(most)
    for line in lines:
        reader.feed(line)
    return reader.history()


class _Reader:
    def __init__(self, most: int) -> None:
        self._bins, self._totals, self._incidents = Bins(most), Totals(0, 0, decisions=0), Incidents()
        self._rows: dict[Unit, int] = {}
        self._order: dict[Unit, tuple[int, int]] = {}
        self._blocks: set[str] = set()
        self._moving: set[Unit] = set()
        self._units: tuple[Unit, ...] = ()
        self._nbytes: tuple[int, ...] = ()
        self._job: traces.JobLine | None = None
        self._last_seen: float | None = None
        self._last_step: int | None = None
        self._begun: tuple[int, int] | None = None
        self._saved: frozenset[int] = frozenset()
        self._full_waits: list[float] = []
        self._waits: tuple[float, float] | None = None
        self._restarts: list[int] = []
        self._first_at: float | None = None
        self._skipped = 0
        self._newest_at = 0.0  # time of the newest line of this incarnation
        self._newest: LastDecision | None = None
        self._sick: tuple[int, frozenset[Unit]] = (-1, frozenset())  # at the last step of this job that was measured
        self._gaps: deque[tuple[int, float]] = deque(maxlen=_FEW)  # steps and times of decisions
        self._saves: deque[LastSave] = deque(maxlen=_FEW)
        self._failed: list[str] = []
        self._interval: int | None = None

    def feed(self, line: traces.Line | None) -> None:
        if line is None or not traces.fits(line, len(self._units)):
            self._skipped += 1
            return
        if isinstance(line, traces.JobLine):
            self._on_job(line)
        if self._job is None or isinstance(line, traces.MovedLine):
            return
        at = self._job.started + line.seconds
        self._newest_at = max(self._newest_at, at)
        if isinstance(line, traces.DecisionLine):
            self._on_decision(line, at)
        elif isinstance(line, traces.CommitLine):
            self._on_commit(line, at)
        elif isinstance(line, traces.FailedLine):
            self._last_seen = at
            self._totals.failed += 1
            self._failed.append(line.reason)
            text = f"the save of step {line.step} failed ({line.reason}); the commit before stays the newest"
            self._incidents.add(Incident("save failed", "look", text, line.step, at))
        elif isinstance(line, traces.ResumedLine):
            self._on_resumed(line, self._job)

    def history(self) -> History:
        self._settle(0.0)
        self._close_incarnation()
        totals = self._totals
        for column in self._bins.columns:
            totals.merge(column)
        if self._full_waits:
            totals.full_stall, totals.full_seen = totals.saves * median(self._full_waits), len(self._full_waits)
        order = sorted(self._rows, key=self._order.__getitem__)
        self._bins.pick([self._rows[unit] for unit in order])
        return History(
            units=tuple(order),
            blocks=frozenset(self._blocks),
            moving=frozenset(self._moving),
            bins=self._bins,
            totals=totals,
            restarts=tuple(self._restarts),
            incidents=self._incidents.listed(),
            dropped=self._incidents.dropped,
            skipped=self._skipped,
            job_status=None if self._job is None else self._job_status(self._job),
        )

    def _job_status(self, job: traces.JobLine) -> JobStatus:
        steps = [(later[0] - earlier[0], later[1] - earlier[1]) for earlier, later in pairwise(self._gaps)]
        paces = [seconds / count for count, seconds in steps if count > 0]
        return JobStatus(
            job=job,
            last_seen=self._newest_at,
            newest=self._newest,
            sick=self._sick[1],
            saves=tuple(self._saves),
            failed=tuple(self._failed[-_FEW:]),
            step_seconds=median(paces) if paces else None,
            decision_gap=median(seconds for _, seconds in steps) if steps else None,
            interval=self._interval,
            full_bytes=sum(self._nbytes),
        )

    def _on_job(self, line: traces.JobLine) -> None:
        if self._job is None or line.started != self._job.started:
            self._settle(0.0)
            self._close_incarnation()
            self._begun, self._first_at, self._newest_at = None, line.started + line.seconds, line.started
            for newest in (self._gaps, self._saves, self._failed):
                newest.clear()
            self._totals.incarnations += 1
        self._job = line
        self._totals.observing = line.observing
        self._units = tuple(one.unit for one in line.units)
        self._nbytes = tuple(one.nbytes if one.moving else 0 for one in line.units)
        for place, one in enumerate(line.units):
            self._rows.setdefault(one.unit, len(self._rows))
            self._order[one.unit] = (one.position, place)
            if one.block:
                self._blocks.add(one.layer)
            if one.moving:
                self._moving.add(one.unit)
        self._bins.grow(len(self._rows) - len(self._bins.drift))

    def _on_resumed(self, line: traces.ResumedLine, job: traces.JobLine) -> None:
        self._gaps.clear()
        self._sick = -1, self._sick[1]
        if line.step == 0 and line.newest == 0 and self._last_step is None:
            return
        at, number = job.started + line.seconds, self._bins.count
        if self._bins.count:
            self._restarts.append(number)
        before = self._last_seen if self._last_seen is not None else at
        self._incidents.ended()
        self._incidents.add(restart_incident(line, job.epoch, at, at - before, self._last_step))

    def _on_decision(self, line: traces.DecisionLine, at: float) -> None:
        self._settle(line.copy_wait)
        self._last_seen, self._last_step = at, line.step
        self._interval = self._interval if line.interval is None else line.interval
        self._newest = LastDecision(line.step, at, line.skipped)
        if line.sick or any(value is not None for value in line.drift):
            self._sick = line.step, frozenset(self._units[index] for index in line.sick)
        self._gaps.append((line.step, at))
        number = self._bins.add(line.step)
        column, rows = number // self._bins.width, [self._rows[unit] for unit in self._units]
        if len(line.drift) == len(rows):
            known = np.array(line.drift, np.float64)  # None becomes NaN
            self._bins.drift[rows, column] = np.fmax(self._bins.drift[rows, column], known)
        np.add.at(self._bins.sick[:, column], [rows[index] for index in line.sick], 1)
        if line.saved:
            self._begun = (line.step, number)
            self._saved = frozenset(line.saved)
        stall, held = line.stall + line.copy_wait, self._bins.columns[column]
        held.stall += stall
        held.longest = max(held.longest, stall)
        self._waits = (float(sum(self._nbytes[index] for index in line.saved)), line.stall)
        self._add_incidents(line, at)

    def _add_incidents(self, line: traces.DecisionLine, at: float) -> None:
        current: list[Incident] = []
        if line.sick:
            names = [str(self._units[index]) for index in line.sick]
            current.append(nonfinite_incident("not finite", names, line.step, at))
        if line.skipped in SKIPPED:
            severity, text = SKIPPED[line.skipped]
            key = f"skipped {line.skipped}"
            current.append(Incident("skipped", severity, f"no save: {text}", line.step, at, key=key))
        self._incidents.update(current, line.step)
        if line.preempted:
            text = "the job was preempted and saved what the grace period allowed"
            self._incidents.add(Incident("preempted", "look", text, line.step, at))
        if line.changed and line.staleness and any(value is not None for value in line.staleness):
            text = f"{len(line.changed)} layer slots contain other parameters than before"
            self._incidents.add(Incident("changed", "look", text, line.step, at))

    def _on_commit(self, line: traces.CommitLine, at: float) -> None:
        self._last_seen = at
        full = sum(self._nbytes) + max(0, line.written - sum(size[0] for size in line.sizes.values()))
        self._saves.append(LastSave(at, line.written, full))
        self._failed.clear()
        if line.step > self._sick[0] and any(drift is not None for *_, drift in line.sizes.values()):
            self._sick = line.step, frozenset()  # measured when the save was staged
        if self._begun is None or self._begun[0] != line.step:
            return  # not of the save in progress, of which there is one at a time
        bins, column = self._bins, self._begun[1] // self._bins.width
        held = bins.columns[column]
        held.saves, held.written, held.full = held.saves + 1, held.written + line.written, held.full + full
        if lost := sorted(self._saved - line.sizes.keys()):
            names = [str(self._units[index]) for index in lost if index < len(self._units)]
            self._incidents.add(nonfinite_incident("withheld", names, line.step, at))
        for index, (_, encoding, error, drift) in line.sizes.items():
            row = self._rows[self._units[index]]
            bins.saved[row, column] += 1
            bins.rounded[row, column] += int(is_lossy(encoding) or error > 0)
            if drift is not None:
                bins.drift[row, column] = np.fmax(bins.drift[row, column], drift)

    def _settle(self, copy_wait: float) -> None:
        """Complete the previous decision's stall, now that its copy wait is known."""
        if self._waits is not None:
            copied, stall = self._waits
            if copied >= _ALL * sum(self._nbytes):
                self._full_waits.append(stall + copy_wait)
            self._waits = None

    def _close_incarnation(self) -> None:
        if self._first_at is not None and self._last_seen is not None:
            self._totals.seconds += max(0.0, self._last_seen - self._first_at)
        self._first_at = None
