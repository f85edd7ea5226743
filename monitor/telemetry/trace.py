"""Drift trace recorder and file writer.

The file of a drift trace: lines appended by a thread of its own, so that a slow disk is nobody's wait.

Whole lines, one write each, at the end of whatever is there; a torn line that a crash left is closed off first. Nothing
is synced: what a power cut takes is the end of a log, not state. A file that cannot be written is told once and given
up, so that it ends early but has no gap. It does not know what lines say.

From what a job decided, committed and measured to the lines of its trace. Pure; see :mod:`store.trace`.

Records the drift trace of a job (:mod:`store.trace`) while it runs: rank 0 writes, every rank measures its part.

Nothing is measured for the trace: it takes the signatures that decisions and saves need anyhow, and keeps some, to tell
how far units move whatever is saved of them. Training thread; lines are made and written by another one. What rank 0
can or cannot write changes no collective: all ranks go by what rank 0 was set to when the job was attached.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from monitor.background import BackgroundWorker
from monitor.config.load import Config
from monitor.distributed import Group
from monitor.events import (
    AttachEvent,
    CommitEvent,
    DecisionEvent,
    ResumeEvent,
    SaveBeginEvent,
    SaveFailedEvent,
    SaveListener,
)
from monitor.ledger import PreparedCommit
from monitor.observe.drift_meter import Signature, drift_ratio
from monitor.observe.units import LocalUnit, UnitTable, is_moving
from monitor.telemetry.drift_history import DriftHistory
from monitor.telemetry.metrics import Metrics
from monitor.types import DecisionResult, Sizes
from store.errors import StorageError
from store.names import Unit
from store.trace import CommitLine, DecisionLine, FailedLine, JobLine, Line, MovedLine, ResumedLine, TracedUnit, to_line

_BACKLOG = 1000
"""Lines that may wait for a disk that does not answer."""

_PATIENCE = 10.0
"""Seconds that closing waits for the last lines, at most."""


class TraceFile:
    """Opened at the first line. One thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1

    def append(self, line: bytes) -> None:
        """Add a line, its end included. StorageError where it is not all in the file afterwards."""
        try:
            if self._descriptor < 0:
                self._descriptor, torn = _opened(self.path)
                line = b"\n" * torn + line
            written = os.write(self._descriptor, line)
        except OSError as error:
            raise StorageError(f"cannot write {self.path}: {error.strerror or error}") from error
        if written != len(line):
            raise StorageError(
                f"only {written} of {len(line)} bytes of a line went into {self.path}: is the disk full?"
            )

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class TraceWriter:
    """Appends beside training. All methods but the thread's own are the training thread's."""

    def __init__(self, path: Path, metrics: Metrics) -> None:
        self._file = TraceFile(path)
        self._metrics = metrics
        self._thread: BackgroundWorker[None] = BackgroundWorker("driftpoint-trace")
        self._waiting = 0
        self._torn = self._over = False

    def put(self, make: Callable[[], bytes]) -> None:
        """Have a line made and appended, after those before it. Nothing once the file was given up."""
        self._look()
        if self._waiting >= _BACKLOG:
            self._give_up(StorageError(f"{self._waiting} lines wait for {self._file.path}: its disk does not answer"))
        if not self._over:
            self._waiting += 1
            self._thread.submit(lambda: self._append(make))

    def close(self, timeout: float) -> None:
        """Wait until the last lines are written and the file is let go of, at most so many seconds."""
        self._thread.submit(self._file.close)
        if not self._thread.join(min(timeout, _PATIENCE)):
            self._give_up(StorageError(f"{self._waiting} lines wait for {self._file.path}: its disk does not answer"))
        self._look()
        self._over = True
        self._thread.stop()

    def stop(self) -> None:
        """Take no more lines, and wait for none."""
        self._over = True
        self._thread.submit(self._file.close)
        self._thread.stop()

    def _append(self, make: Callable[[], bytes]) -> None:
        if self._torn:
            return  # what follows a lost line would be read as if nothing were missing
        self._torn = True
        self._file.append(make())
        self._torn = False

    def _look(self) -> None:
        for done in self._thread.finished():
            self._waiting -= 1
            if done.error is not None:
                self._give_up(done.error)

    def _give_up(self, error: BaseException) -> None:
        if not self._over:
            self._over = True
            what = "the drift trace of this run ends here, training and saves go on: writing"
            self._metrics.background_failure(what, error)


def _opened(path: Path) -> tuple[int, bool]:
    """A descriptor that appends, and whether the last line in the file has no end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise StorageError(f"{path} is no regular file: set `trace: {{path: ...}}` to another one")
        _lock(descriptor, path)
        torn = found.st_size > 0 and os.pread(descriptor, 1, found.st_size - 1) != b"\n"
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, torn


def _lock(descriptor: int, path: Path) -> None:
    """Until the file is closed, or the process ends however it does. Lines of two jobs would pass for those of one."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise StorageError(f"another job writes {path}: set `trace: {{path: ...}}` to a file of its own") from error
        # Where a filesystem has no locks, nothing is known of other jobs: then it is written.


_DIGITS = 6
"""Of a distance between two decisions: more than a sketch knows."""


def traced_units(table: UnitTable) -> tuple[TracedUnit, ...]:
    """The units of a job over all ranks, in the order of all that is shown of them."""
    return tuple(
        TracedUnit(
            layer=unit.layer,
            slot=unit.slot,
            position=table.layer(unit).position,
            block=table.layer(unit).block,
            nbytes=size.nbytes,
            numel=size.numel,
            moving=is_moving(unit),
        )
        for unit, size in table.sizes.items()
    )


def decision_line(line: DecisionLine, decided: DecisionResult, begun: bool) -> DecisionLine:
    """``line`` with what was decided, bit for bit as the policy saw it. begun: the save was."""
    index = {one.unit: at for at, one in enumerate(decided.stats)}
    return line.model_copy(
        update={
            "offered": _number(decided.offered),
            "drift": tuple(_number(one.drift) for one in decided.stats),
            "staleness": tuple(one.staleness for one in decided.stats),
            "error": tuple(_largest(one.error) for one in decided.stats),
            "encoding": tuple(one.encoding for one in decided.stats),
            "stored_bytes": tuple(one.stored_bytes for one in decided.stats),
            "sick": tuple(index[one.unit] for one in decided.seen if not one.finite),
            "changed": tuple(index[one.unit] for one in decided.seen if one.changed_shape),
            "saved": {index[unit]: choice.encoding for unit, choice in decided.saved.items()} if begun else {},
            "forced": decided.forced,
            "preempted": decided.preempted,
        }
    )


def commit_line(line: CommitLine, units: Sequence[Unit], sizes: Sizes, untold: frozenset[Unit]) -> CommitLine:
    """``line`` with what was saved. untold: units whose drift is none, for lack of what to tell it from."""
    index = {unit: at for at, unit in enumerate(units)}
    found = {
        index[unit]: (nbytes, encoding, _largest(error), None if unit in untold else _number(drift))
        for unit, (nbytes, encoding, error, drift) in sizes.items()
        if unit in index
    }
    return line.model_copy(update={"sizes": found})


def moved_line(step: int, steps: Sequence[int], rows: torch.Tensor, places: Sequence[int | None]) -> MovedLine:
    """rows: as :class:`monitor.telemetry.drift_history.Compared` has them, summed over ranks. places: the row of each
    unit, None
    for those that have none."""
    since = {}
    for then, found in zip(steps, rows.tolist(), strict=True):
        ratios = [_ratio(*row) for row in found]
        since[then] = tuple(None if place is None else ratios[place] for place in places)
    return MovedLine(step=step, since=since)


def committed_sizes(drawn: PreparedCommit) -> Sizes:
    """The units that a commit holds anew."""
    manifest = drawn.manifest
    return {
        record.unit: (record.nbytes, record.encoding, record.error, drawn.drift.get(record.unit))
        for record in manifest.units
        if record.save == manifest.save.name
    }


def plain(value: Any) -> Any:
    """Settings as JSON has them; what it has not as text: they may hold anything that a policy of the user's takes."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, bool | int | str) else repr(value)


def _ratio(moved: float, reference: float, unknown: float) -> float | None:
    if unknown or not (math.isfinite(moved) and math.isfinite(reference)):
        return None
    found = _number(drift_ratio(moved, reference))
    return None if found is None else float(f"{found:.{_DIGITS}g}")


def _number(value: float | None) -> float | None:
    """JSON has neither infinities nor NaN."""
    return value if value is not None and math.isfinite(value) else None


def _largest(value: float) -> float:
    return value if math.isfinite(value) else sys.float_info.max


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


class TraceRecorder(SaveListener):
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
        self._ladder: DriftHistory | None = None
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
        anchors = self._group.broadcast(self._config.trace.anchors if path is not None and sketched else 0)
        if anchors:
            self._ladder = DriftHistory(anchors, self._config.drift.width)
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

    def _interval(self, decided: DecisionResult | None) -> int | None:
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
        total, by_unit = self._group.all_reduce_sum(rows), [places.get(unit) for unit in self._units]
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
