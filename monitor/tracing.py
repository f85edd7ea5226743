"""Records the drift trace of a job (:mod:`store.trace`) while it runs: rank 0 writes, every rank measures its part.

Nothing is measured for the trace: it takes the signatures that decisions and saves need anyhow, and keeps some, to tell
how far units move whatever is saved of them. Training thread; lines are made and written by another one. What rank 0
can or cannot write changes no collective: all ranks go by what rank 0 was set to when the job was attached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from monitor.config import Config
from monitor.decided import Decided
from monitor.drift.base import Signature
from monitor.drift.ladder import Ladder
from monitor.group import Group
from monitor.metrics import Metrics
from monitor.trace_file import TraceWriter
from monitor.trace_lines import Sizes, commit_line, decision_line, moved_line, plain, traced_units
from monitor.units import LocalUnit, UnitTable, is_moving
from store.names import Unit
from store.trace import CommitLine, DecisionLine, FailedLine, JobLine, Line, ResumedLine, to_line


@dataclass(frozen=True)
class TracedJob:
    """What the job lines of one incarnation say alike. See :class:`store.trace.JobLine`."""

    framework: str
    policy: str
    observing: bool


@dataclass
class _Noted:
    """Signatures of this rank's live values at a decision, as far as they were measured until now."""

    step: int
    signatures: dict[Unit, Signature] = field(default_factory=dict)


class Tracer:
    """Told by the checkpointer what happens, on every rank alike."""

    def __init__(self, config: Config, job: TracedJob, group: Group, table: UnitTable, metrics: Metrics) -> None:
        self._config = config
        self._job = job
        self._group = group
        self._table = table
        self._metrics = metrics
        self._began, self._started = time.monotonic(), time.time()
        self._epoch = 0
        self._writer: TraceWriter | None = None
        self._ladder: Ladder | None = None
        self._units: tuple[Unit, ...] = ()
        self._moving: tuple[Unit, ...] = ()
        self._mine: tuple[Unit, ...] = ()
        self._noted: _Noted | None = None
        self._untold: frozenset[Unit] = frozenset()
        self._copy_wait = 0.0

    def begin(self, epoch: int) -> None:
        """The job is attached. Collective."""
        path, sketched = self._config.trace_path(), self._config.drift.method == "sketch"
        anchors = self._group.from_first(self._config.trace.anchors if path is not None and sketched else 0)
        if anchors:
            self._ladder = Ladder(anchors, self._config.drift.width)
        if path is not None and self._group.rank == 0:
            self._epoch = epoch
            self._writer = TraceWriter(Path(path), self._metrics)
            self._put_job()

    def agreed(self, local: Mapping[Unit, LocalUnit]) -> None:
        """The units of the table are others, or their pieces. local: this rank's."""
        if self._ladder is not None:
            self._ladder.clear()
        self._noted = None
        self._units = tuple(self._table.sizes)
        self._moving = tuple(unit for unit in self._units if is_moving(unit))
        self._mine = tuple(unit for unit in self._moving if unit in local)
        self._put_job()

    def decided(self, step: int, skipped: str | None, stall: float, decided: Decided | None, commits: int) -> None:
        """A decision was taken, or skipped. commits: so far, where nothing was decided."""
        if decided is not None and self._ladder is not None:
            found = {unit: one.signature for unit, one in decided.mine.items() if one.signature is not None}
            self._noted = _Noted(step, found)
        if self._writer is None:
            return
        if skipped == "fenced":
            self._writer.stop()  # the store is another job's now, and so may be the file
            self._writer = None
            return
        waited, self._copy_wait = self._copy_wait, 0.0
        line = DecisionLine(
            step=step,
            seconds=self._seconds(),
            commits=commits if decided is None else decided.commits,
            interval=self._interval(decided),
            skipped=skipped,
            stall=stall,
            copy_wait=waited,
        )
        if decided is None:
            self._put(lambda: line)
            return
        untold = [one.unit for one in decided.seen if one.staleness is None or one.changed_shape]
        self._untold = frozenset(untold) | self._table.lost
        self._put(lambda: decision_line(line, decided, begun=skipped is None))

    def _interval(self, decided: Decided | None) -> int | None:
        if self._config.every != "auto":
            return self._config.every
        return None if decided is None else decided.interval

    def measured(self, signatures: Mapping[Unit, Signature]) -> None:
        """What the save that is over measured of the values staged at the last decision."""
        if self._noted is not None:
            self._noted.signatures.update(signatures)

    def moved(self) -> None:
        """No save is under way any more: tell how far units had moved at the last decision. Collective."""
        noted, self._noted = self._noted, None
        if noted is None or self._ladder is None:
            return
        compared = self._ladder.add(noted.step, [noted.signatures.get(unit) for unit in self._mine])
        if not compared.steps:
            return
        places = {unit: place for place, unit in enumerate(self._moving)}
        rows = torch.zeros(len(compared.steps), len(places), 3, dtype=torch.float64)
        rows[:, [places[unit] for unit in self._mine]] = compared.rows
        total, by_unit = self._group.total(rows), [places.get(unit) for unit in self._units]
        self._put(lambda: moved_line(noted.step, compared.steps, total, by_unit))

    def committed(self, step: int, took: float, written: int, sizes: Sizes) -> None:
        """A save is committed, or, where nothing is saved, would be."""
        line = CommitLine(step=step, seconds=self._seconds(), took=took, written=written, sizes={})
        units, untold = self._units, self._untold
        self._put(lambda: commit_line(line, units, sizes, untold))

    def failed(self, step: int, reason: str) -> None:
        """A save failed."""
        line = FailedLine(step=step, seconds=self._seconds(), reason=reason)
        self._put(lambda: line)

    def waited(self, seconds: float) -> None:
        """An optimizer step waited for copies."""
        self._copy_wait += seconds

    def resumed(self, step: int, newest: int) -> None:
        """The job stands at ``step``, by the commit of step ``newest``: what it measured is of another branch."""
        self._noted = None
        if self._ladder is not None:
            self._ladder.clear()
        line = ResumedLine(step=step, newest=newest, seconds=self._seconds())
        self._put(lambda: line)

    def close(self, timeout: float) -> None:
        """Write what is left, for at most so many seconds. Not collective."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close(timeout)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the signatures kept on this rank."""
        return 0 if self._ladder is None else self._ladder.memory_bytes

    def _put_job(self) -> None:
        table, seconds = traced_units(self._table), self._seconds()
        self._put(
            lambda: JobLine(
                started=self._started,
                epoch=self._epoch,
                framework=self._job.framework,
                world_size=self._group.world_size,
                policy=self._job.policy,
                settings=plain(self._config.model_dump(exclude_unset=True)),
                units=table,
                seconds=seconds,
                observing=self._job.observing,
            )
        )

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _put(self, make: Callable[[], Line]) -> None:
        if self._writer is not None:
            self._writer.put(lambda: to_line(make()))
