"""Record the drift trace of a job (:mod:`store.trace`): every rank measures its part, and rank 0 writes the file.

The trace needs no measurements of its own: it takes the signatures of decisions and saves, and keeps some of them, to
compare units with earlier decisions whether or not they were saved. A background thread makes and writes the lines, so
a slow disk never blocks training. Another one compares, and with several ranks begins an asynchronous sum, which is
written at the next decision. Collectives depend on rank 0's settings at attach only.

Each line is one unsynced write at the file's end; one torn by a crash is closed off first. A full file is renamed; the
next begins with the last job line, to be read alone. After an error it ends with one report, so it has no gaps."""

import errno
import fcntl
import json
import math
import os
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import torch

from monitor import events
from monitor.background import BackgroundWorker, Once
from monitor.config.load import Config
from monitor.distributed import AsyncSum, Group
from monitor.events import SaveListener
from monitor.observe.drift_meter import Signature, drift_ratio
from monitor.observe.units import LocalUnit, UnitTable, is_moving
from monitor.telemetry.drift_history import Compared, DriftHistory
from monitor.telemetry.metrics import Metrics
from monitor.types import DecisionResult, Sizes
from store import trace as traces
from store.errors import CollectiveError, StorageError
from store.names import Unit
from store.schema import as_json

_BACKLOG = 1000  # maximum number of lines that wait for the disk
_LAST_SUM = 1.0  # most seconds that a clean end waits for the other ranks' part of the last sum
_CLOSE_TIMEOUT = 10.0  # maximum seconds that closing waits for the last lines
_DIGITS = 6  # significant digits of a distance between two decisions; sketches are less precise


class TraceRecorder(SaveListener):
    """Records the trace of a job. Runs on every rank; training thread.

    job_line: makes a job line; it has the fields that stay the same during an incarnation."""

    def __init__(
        self, config: Config, job_line: Callable[..., traces.JobLine], group: Group, table: UnitTable, metrics: Metrics
    ) -> None:
        self._config, self._job_line, self._group, self._table = config, job_line, group, table
        self._metrics = metrics
        self._began, self._started = time.monotonic(), time.time()
        self._epoch = 0
        self._writer: TraceWriter | None = None
        self._anchors = 0  # number of earlier decisions to compare with; 0: none
        self._history: DriftHistory | None = None
        self._comparing: BackgroundWorker[None] | None = None
        self._begun: Callable[[], None] = lambda: None  # compares the last decision, and begins the sum
        self._sum: AsyncSum | None = None  # of comparisons, over ranks
        self._summed_line: Callable[[torch.Tensor], traces.MovedLine | None] = lambda _: None
        self._units: tuple[Unit, ...] = ()
        self._moving: tuple[Unit, ...] = ()
        self._local: tuple[Unit, ...] = ()
        self._decision: tuple[int, dict[Unit, Signature]] | None = None  # signatures of this rank's live values
        self._no_reference: frozenset[Unit] = frozenset()
        self._copy_wait = 0.0
        self._dry_run: tuple[int, Sizes] | None = None
        self.saved_step: int | None = None  # until :func:`monitor.telemetry.log.check_rng` takes it; rank 0
        self.resumed_step: int | None = None  # likewise

    def on_attach(self, event: events.AttachEvent) -> None:
        path = self._config.trace_path()
        self._anchors = self._group.broadcast(self._config.trace.anchors if path is not None else 0)
        self._sum = self._group.async_sum() if self._anchors else None
        self._comparing = BackgroundWorker("driftpoint-drift") if self._anchors else None
        if path is not None and self._group.rank == 0:
            self._epoch = event.epoch
            self._writer = TraceWriter(Path(path), self._metrics, self._config.trace.max_mib << 20)
            self._put_job()

    def on_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:  # readers take the lines of the store's newest epoch for those of its job
            self._epoch = epoch
            self._put_job()

    def on_units_changed(self, local: Mapping[Unit, LocalUnit]) -> None:
        self._put_sum()
        self._decision, self._history = None, None
        self._units = tuple(self._table.sizes)
        self._moving = tuple(unit for unit in self._units if is_moving(unit))
        self._local = tuple(unit for unit in self._moving if unit in local)
        self._put_job()

    def on_decision(self, event: events.DecisionEvent) -> None:
        decided = event.decided
        if decided is not None and self._anchors:
            signatures = {unit: one.signature for unit, one in decided.mine.items() if one.signature is not None}
            self._decision = event.step, signatures
        if self._writer is None:
            return
        if event.skipped == "fenced":
            self._writer.stop()  # another job has the store, and perhaps the file
            self._writer = None
            return
        waited, self._copy_wait = self._copy_wait, 0.0
        chosen = None if decided is None else decided.interval
        line = traces.DecisionLine(
            step=event.step,
            seconds=self._seconds(),
            commits=event.commits if decided is None else decided.commits,
            interval=chosen if self._config.every == "auto" else self._config.every,
            skipped=event.skipped,
            stall=event.stall,
            copy_wait=waited,
        )
        if decided is not None:
            no_reference = [one.unit for one in decided.seen if one.staleness is None or one.changed_shape]
            self._no_reference = frozenset(no_reference) | self._table.lost
        self._put(lambda: line if decided is None else decision_line(line, decided, begun=event.skipped is None))

    def on_save_begin(self, event: events.SaveBeginEvent) -> None:
        self.saved_step = event.step
        if event.dry_run is not None:
            self._dry_run = event.step, event.dry_run

    def on_settled(self, signatures: Mapping[Unit, Signature]) -> None:
        self._put_dry_run()
        self._put_sum()
        if self._decision is not None:
            self._decision[1].update(signatures)
        self._put_moved()

    def _put_moved(self) -> None:
        """Write how far units had moved at the last decision, or begin to sum it, in the background. Collective."""
        if self._decision is None:
            return
        (step, signatures), self._decision = self._decision, None
        if self._comparing is None or (self._sum is None and self._writer is None):
            return
        history = self._history = self._history or DriftHistory(self._anchors, self._config.drift.width)
        units, moving, local = self._units, self._moving, self._local
        rows_of = cache(lambda: {unit: place for place, unit in enumerate(moving)})  # in the background

        added = Once(lambda: history.add(step, [signatures.get(unit) for unit in local]))

        def compare() -> Compared:  # called again if it failed, for instance for want of memory
            compared = added()
            rows = torch.zeros(len(compared.steps), len(moving), 3, dtype=torch.float64, device="cpu")
            rows[:, [rows_of()[unit] for unit in local]] = compared.rows
            return Compared(compared.steps, rows)

        def line(compared: Compared) -> traces.MovedLine | None:
            return moved_line(step, compared, [rows_of().get(unit) for unit in units])

        once = Once(compare)

        def begin() -> None:
            compared = once()
            if self._sum is not None and compared.steps:
                self._summed_line = lambda rows: line(Compared(compared.steps, rows))
                self._sum.start(compared.rows)

        self._begun = Once(begin)
        self._comparing.submit(self._begun)
        if self._sum is None:
            self._put(lambda: line(once()))

    def _put_sum(self) -> None:
        """Write the line whose sum over ranks began at the last decision. Collective."""
        for done in () if self._comparing is None else self._comparing.finished():
            if isinstance(done.error, CollectiveError):  # a second attempt would not tell why
                raise done.error
        self._begun()  # done by now, unless decisions are made faster
        summed = None if self._sum is None else self._sum.finish()
        if summed is not None:
            self._put(partial(self._summed_line, summed))

    def on_commit(self, event: events.CommitEvent) -> None:
        save, drawn = event.save, event.drawn

        def sizes() -> Sizes:
            return {
                record.unit: (record.nbytes, record.encoding, record.error, drawn.drift.get(record.unit))
                for record in drawn.manifest.units
                if record.save == save.name
            }

        self._put_commit(save.step, event.seconds, event.written_bytes, sizes)

    def on_save_failed(self, event: events.SaveFailedEvent) -> None:
        line = traces.FailedLine(step=event.step, seconds=self._seconds(), reason=event.reason)
        self._put(lambda: line)

    def on_copy_wait(self, seconds: float) -> None:
        self._copy_wait += seconds

    def on_resume(self, event: events.ResumeEvent) -> None:
        self._put_sum()
        self._decision, self._history = None, None  # their signatures are of another branch
        self.resumed_step = event.step
        line = traces.ResumedLine(step=event.step, newest=event.commit, seconds=self._seconds())
        self._put(lambda: line)

    def put_drawn(self, step: int, digest: str) -> None:
        line = traces.DrawnLine(step=step, seconds=self._seconds(), world_size=self._group.world_size, digest=digest)
        self._put(lambda: line)

    def on_close(self, clean: bool, timeout: float) -> None:
        self._put_dry_run()
        until = time.monotonic() + (min(timeout / 4, _LAST_SUM) if clean else 0.0)
        if self._comparing is not None:
            self._comparing.join(until - time.monotonic())
        while self._sum is not None and self._sum.under_way and not self._sum.done and time.monotonic() < until:
            time.sleep(0.01)
        if self._sum is not None and self._sum.done:
            self._put_sum()
        self.close(timeout)

    def close(self, timeout: float) -> None:
        """Write the remaining lines, for at most ``timeout`` seconds. Not collective."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close(timeout)
        if self._comparing is not None:
            self._comparing.stop()

    def _put_job(self) -> None:
        table, seconds = traced_units(self._table), self._seconds()
        self._put(
            lambda: self._job_line(
                started=self._started,
                epoch=self._epoch,
                world_size=self._group.world_size,
                settings=as_json(self._config.model_dump(exclude_unset=True)),
                units=table,
                seconds=seconds,
            ),
            job=True,
        )

    def _put_dry_run(self) -> None:
        """Write the line of a dry run's commit, after the line of its decision."""
        dry_run, self._dry_run = self._dry_run, None
        if dry_run is not None:
            step, sizes = dry_run
            self._put_commit(step, 0.0, sum(nbytes for nbytes, *_ in sizes.values()), lambda: sizes)

    def _put_commit(self, step: int, took: float, written: int, sizes: Callable[[], Sizes]) -> None:
        line = traces.CommitLine(step=step, seconds=self._seconds(), took=took, written=written, sizes={})
        units, no_reference = self._units, self._no_reference
        self._put(lambda: commit_line(line, units, sizes(), no_reference))

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _put(self, make: Callable[[], traces.Line | None], *, job: bool = False) -> None:
        if self._writer is not None:
            self._writer.put(lambda: b"" if (line := make()) is None else to_line(line), job=job)


def to_line(line: traces.Line) -> bytes:
    """Return a line with its newline; numbers are read back exactly."""
    return json.dumps(line.model_dump(mode="json"), separators=(",", ":"), allow_nan=False).encode() + b"\n"


class TraceFile:
    """A file that lines are appended to. It is opened at the first line. One thread.

    most: bytes above which it is renamed to :func:`store.trace.rotated_path`, and a new one begun."""

    def __init__(self, path: Path, most: int = sys.maxsize) -> None:
        self.path, self._most = path, most
        self._descriptor = -1
        self._job = b""  # last job line, which every file begins with

    def append(self, line: bytes, *, job: bool = False) -> None:
        """Append a line, its newline included. Raises StorageError unless all of it is written."""
        if job:
            self._job = line
        try:
            if self._descriptor < 0:
                self._descriptor, torn = _open_file(self.path)
                line = b"\n" * torn + line
            size = os.fstat(self._descriptor).st_size
            if size > 2 * len(self._job) and size + len(line) > self._most:
                self.path.replace(traces.rotated_path(self.path))
                self.close()
                self._descriptor, _ = _open_file(self.path)
                line = self._job if job else self._job + line
            wrote = os.write(self._descriptor, line)
        except OSError as error:
            raise StorageError(f"cannot write {self.path}: {error.strerror or error}") from error
        if wrote != len(line):
            raise StorageError(f"only {wrote} of {len(line)} bytes of a line went into {self.path}: is the disk full?")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class TraceWriter:
    """Makes and appends lines in a background thread. Its methods are for the training thread."""

    def __init__(self, path: Path, metrics: Metrics, most: int = sys.maxsize) -> None:
        self._file = TraceFile(path, most)
        self._metrics = metrics
        self._thread: BackgroundWorker[None] = BackgroundWorker("driftpoint-trace")
        self._waiting = 0
        self._failed = self._closed = False

    def put(self, make: Callable[[], bytes], *, job: bool = False) -> None:
        """Make and append a line after the earlier ones. Does nothing after an error. job: it is a job line."""
        self._collect()
        if self._waiting >= _BACKLOG:
            self._abandon_waiting()
        if not self._closed:
            self._waiting += 1
            self._thread.submit(lambda: self._append(make, job))

    def close(self, timeout: float) -> None:
        """Write the remaining lines and close the file, for at most ``timeout`` seconds."""
        self._thread.submit(self._file.close)
        if not self._thread.join(min(timeout, _CLOSE_TIMEOUT)):
            self._abandon_waiting()
        self._collect()
        self._closed = True
        self._thread.stop()

    def stop(self) -> None:
        """Accept no more lines, without waiting for the earlier ones."""
        self._closed = True
        self.close(0.0)

    def _append(self, make: Callable[[], bytes], job: bool) -> None:
        if self._failed:
            return  # after a lost line, later ones would hide the gap
        self._failed = True
        if line := make():
            self._file.append(line, job=job)
        self._failed = False

    def _collect(self) -> None:
        for done in self._thread.finished():
            self._waiting -= 1
            if done.error is not None:
                self._abandon(done.error)

    def _abandon_waiting(self) -> None:
        self._abandon(StorageError(f"{self._waiting} lines wait for {self._file.path}: its disk does not answer"))

    def _abandon(self, error: BaseException) -> None:
        if not self._closed:
            self._closed = True
            text = f"the drift trace of this run ends here, training and saves go on: writing failed: {error}"
            self._metrics.on_background_failure(events.BackgroundFailureEvent("upkeep", text, error))


def _open_file(path: Path) -> tuple[int, bool]:
    """Open the file for appending. Return its descriptor, and whether its last line has no newline."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise StorageError(f"{path} is no regular file: set `trace: {{path: ...}}` to another one")
        try:  # locked until the file is closed or the process ends: lines of two jobs must not mix
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # on a filesystem without locks: write anyway
            if error.errno in (errno.EACCES, errno.EAGAIN):
                text = f"another job writes {path}: set `trace: {{path: ...}}` to a file of its own"
                raise StorageError(text) from error
        torn = status.st_size > 0 and os.pread(descriptor, 1, status.st_size - 1) != b"\n"
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, torn


def traced_units(table: UnitTable) -> tuple[traces.TracedUnit, ...]:
    """Return the units of a job over all ranks, in the order that other lines refer to."""
    return tuple(
        traces.TracedUnit(
            **unit._asdict(),
            position=table.layer(unit).position,
            block=table.layer(unit).block,
            nbytes=size.nbytes,
            numel=size.numel,
            moving=is_moving(unit),
        )
        for unit, size in table.sizes.items()
    )


def decision_line(line: traces.DecisionLine, decided: DecisionResult, begun: bool) -> traces.DecisionLine:
    """Return ``line`` with the decision, bit for bit as the policy saw it. ``begun``: whether the save began."""
    index = {one.unit: at for at, one in enumerate(decided.stats)}
    return line.model_copy(
        update={
            "offered": _number(decided.offered.bytes),
            "per_step": _number(decided.offered.per_step),
            "most": _number(decided.offered.most),
            "resumed_for": decided.offered.resumed_for,
            "drift": tuple(_number(one.drift) for one in decided.stats),
            "staleness": tuple(one.staleness for one in decided.stats),
            "error": tuple(_finite(one.error) for one in decided.stats),
            "encoding": tuple(one.encoding for one in decided.stats),
            "stored_bytes": tuple(one.stored_bytes for one in decided.stats),
            "sick": tuple(index[one.unit] for one in decided.seen if not one.finite),
            "changed": tuple(index[one.unit] for one in decided.seen if one.changed_shape),
            "saved": {index[unit]: choice.encoding for unit, choice in decided.saved.items()} if begun else {},
            "forced": decided.forced,
            "preempted": decided.preempted,
        }
    )


def commit_line(
    line: traces.CommitLine, units: Sequence[Unit], sizes: Sizes, no_reference: frozenset[Unit]
) -> traces.CommitLine:
    """Return ``line`` with the saved units. Those in ``no_reference`` have nothing to measure drift against."""
    index = {unit: at for at, unit in enumerate(units)}
    saved = {
        index[unit]: (nbytes, encoding, _finite(error), None if unit in no_reference else _number(drift))
        for unit, (nbytes, encoding, error, drift) in sizes.items()
        if unit in index
    }
    return line.model_copy(update={"sizes": saved})


def moved_line(step: int, compared: Compared, rows_of: Sequence[int | None]) -> traces.MovedLine | None:
    """Return the distances to earlier decisions, summed over ranks; None if there are none.

    ``rows_of``: the row of each unit of the job, None for one that was not compared."""
    since = {}
    for then, rows in zip(compared.steps, compared.rows.tolist(), strict=True):
        ratios = [_ratio(*row) for row in rows]
        since[then] = tuple(None if row is None else ratios[row] for row in rows_of)
    return traces.MovedLine(step=step, since=since) if since else None


def _ratio(moved: float, reference: float, unknown: float) -> float | None:
    if unknown or not (math.isfinite(moved) and math.isfinite(reference)):
        return None
    ratio = _number(drift_ratio(moved, reference))
    return None if ratio is None else float(f"{ratio:.{_DIGITS}g}")


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _finite(value: float) -> float:
    return value if math.isfinite(value) else sys.float_info.max
