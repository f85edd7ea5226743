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
from typing_extensions import override

from monitor.config import Config
from monitor.decided import Decided, Sizes
from monitor.drift.base import Signature
from monitor.drift.ladder import Ladder
from monitor.events import (
    AttachEvent,
    CommitEvent,
    DecisionEvent,
    ResumeEvent,
    SaveBeginEvent,
    SaveFailedEvent,
    SaveListener,
)
from monitor.group import Group
from monitor.metrics import Metrics
from monitor.trace_file import TraceWriter
from monitor.trace_lines import commit_line, committed_sizes, decision_line, moved_line, plain, traced_units
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


class Tracer(SaveListener):
    """Follows a job on every rank alike."""

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
        self._dry_run: tuple[int, Sizes] | None = None

    @override
    def on_attach(self, event: AttachEvent) -> None:
        path, sketched = self._config.trace_path(), self._config.drift.method == "sketch"
        anchors = self._group.from_first(self._config.trace.anchors if path is not None and sketched else 0)
        if anchors:
            self._ladder = Ladder(anchors, self._config.drift.width)
        if path is not None and self._group.rank == 0:
            self._epoch = event.epoch
            self._writer = TraceWriter(Path(path), self._metrics)
            self._put_job()

    @override
    def on_units_changed(self, local: Mapping[Unit, LocalUnit]) -> None:
        if self._ladder is not None:
            self._ladder.clear()
        self._noted = None
        self._units = tuple(self._table.sizes)
        self._moving = tuple(unit for unit in self._units if is_moving(unit))
        self._mine = tuple(unit for unit in self._moving if unit in local)
        self._put_job()

    @override
    def on_decision(self, event: DecisionEvent) -> None:
        decided = event.decided
        if decided is not None and self._ladder is not None:
            found = {unit: one.signature for unit, one in decided.mine.items() if one.signature is not None}
            self._noted = _Noted(event.step, found)
        if self._writer is None:
            return
        if event.skipped == "fenced":
            self._writer.stop()  # the store is another job's now, and so may be the file
            self._writer = None
            return
        waited, self._copy_wait = self._copy_wait, 0.0
        line = DecisionLine(
            step=event.step,
            seconds=self._seconds(),
            commits=event.commits if decided is None else decided.commits,
            interval=self._interval(decided),
            skipped=event.skipped,
            stall=event.stall,
            copy_wait=waited,
        )
        if decided is None:
            self._put(lambda: line)
            return
        untold = [one.unit for one in decided.seen if one.staleness is None or one.changed_shape]
        self._untold = frozenset(untold) | self._table.lost
        self._put(lambda: decision_line(line, decided, begun=event.skipped is None))

    def _interval(self, decided: Decided | None) -> int | None:
        if self._config.every != "auto":
            return self._config.every
        return None if decided is None else decided.interval

    @override
    def on_save_begin(self, event: SaveBeginEvent) -> None:
        if event.dry_run is not None:
            self._dry_run = event.step, event.dry_run

    @override
    def on_settled(self, signatures: Mapping[Unit, Signature]) -> None:
        self._put_dry_run()
        if self._noted is not None:
            self._noted.signatures.update(signatures)
        self._put_moved()

    def _put_moved(self) -> None:
        """Write how far units had moved at the last decision. Collective."""
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

    @override
    def on_commit(self, event: CommitEvent) -> None:
        self._put_commit(event.save.step, event.seconds, event.written_bytes, committed_sizes(event.drawn))

    @override
    def on_save_failed(self, event: SaveFailedEvent) -> None:
        line = FailedLine(step=event.step, seconds=self._seconds(), reason=event.reason)
        self._put(lambda: line)

    @override
    def on_copy_wait(self, seconds: float) -> None:
        self._copy_wait += seconds

    @override
    def on_resume(self, event: ResumeEvent) -> None:
        self._noted = None  # the signatures are of another branch
        if self._ladder is not None:
            self._ladder.clear()
        line = ResumedLine(step=event.step, newest=event.commit, seconds=self._seconds())
        self._put(lambda: line)

    @override
    def on_close(self, clean: bool, timeout: float) -> None:
        self._put_dry_run()
        self.close(timeout)

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

    def _put_dry_run(self) -> None:
        """Write the commit that would be there by now. Its line follows that of its decision."""
        dry_run, self._dry_run = self._dry_run, None
        if dry_run is not None:
            step, sizes = dry_run
            self._put_commit(step, 0.0, sum(nbytes for nbytes, *_ in sizes.values()), sizes)

    def _put_commit(self, step: int, took: float, written: int, sizes: Sizes) -> None:
        line = CommitLine(step=step, seconds=self._seconds(), took=took, written=written, sizes={})
        units, untold = self._units, self._untold
        self._put(lambda: commit_line(line, units, sizes, untold))

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _put(self, make: Callable[[], Line]) -> None:
        if self._writer is not None:
            self._writer.put(lambda: to_line(make()))
