"""Log the outcome of decisions, saves and resumes to the logger ``driftpoint``, and misuse of the checkpointer.

Storage problems never reach the training loop as an exception and never pass silently: they are logged here.

Each kind of misuse is logged once, and only if a correct loop cannot look the same: gradient scalers skip optimizer
steps, frameworks count micro-batches, and ranks may be late (docs/loops.md). The checks of a step cost a few integers
and no collective."""

import dis
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import xxhash

from monitor import events
from monitor.adapters.base import Adapter
from monitor.adapters.identity import version_of
from monitor.config.load import Config
from monitor.distributed import Group
from monitor.events import SaveListener, unexpected
from monitor.telemetry.trace import TraceRecorder
from monitor.types import SKIP_REASONS, StepReport, newest_text
from store import trace as traces
from store.certificate import AS_FOUND, MEMORY, PEER, Certificate
from store.errors import MissingSegmentsError
from store.names import SaveId
from store.text import counted

_log = logging.getLogger("driftpoint")


def _name(record: logging.LogRecord) -> bool:
    """Prefix our name if logging is not configured, so that Python itself prints the record. Leave others as is."""
    record.msg = record.msg if _log.hasHandlers() else f"driftpoint: {record.msg}"
    return True


_log.addFilter(_name)

_DECISIONS_WITHOUT_COMMIT = 3
_SAVES_IN_A_ROW = 8  # more saves than this in a row reset the count of late ones
_PATIENCE = 60.0  # seconds from the start in which late decisions do not count: the first save may take so long
_NAMED = 6  # maximum number of units named in a log line


def log_startup(text: str) -> None:
    """Log a start-up message at level INFO, or write it to stderr if logging is not configured; never both."""
    shown = _log.isEnabledFor(logging.INFO) and _log.hasHandlers()
    if shown or _log.level != logging.NOTSET:  # a level set on our logger is respected
        _log.info("%s", text)
        return
    sys.stderr.write(f"driftpoint: {text}\n")
    sys.stderr.flush()


def warn_of_beginning(store: str) -> None:
    """Warn that nothing was resumed, in case that the user expected commits in the store."""
    text = (
        "training begins from nothing: there is no commit in %s. If there should be one, check the path and the mount. "
        "Once the store exists, `store: {path: %s, create: false}` refuses a start without it"
    )
    _log.warning(text, store, store)


class SaveLog(SaveListener):
    """Logs events. Ranks other than 0 log only those that rank 0 does not know of."""

    def __init__(self, config: Config, rank: int = 0) -> None:
        self._config, self._store = config, config.store_path
        self._rank = rank
        self._encodings_checked = False
        self._commits = self._decisions = self._busy = self._saves = 0
        self._began = time.monotonic()
        self._unfinished = False  # the job was preempted while a save was being written
        self._step = self._held = 0  # newest step, and the newest that is committed, or known to be lost
        self._newest: SaveId | None = None  # commit
        self._observing = False

    def on_measured(self, event: events.MeasuredEvent) -> None:
        if self._encodings_checked:
            return
        self._encodings_checked = True
        slots, config = {unit.slot for unit in event.sizes}, self._config
        unused = sorted(config.encodings().keys() - slots) if isinstance(config.encoding, dict) else []
        if unused:
            _log.warning("encoding: there is no slot %s; this job has %s", ", ".join(unused), ", ".join(sorted(slots)))

    def on_decision(self, event: events.DecisionEvent) -> None:
        if self._rank != 0:
            return
        self._count_decision(event)
        if event.skipped is None:
            self._saves += 1
            self._busy = 0 if self._saves > _SAVES_IN_A_ROW else self._busy
            return
        level = logging.DEBUG if event.skipped == "nothing" else logging.ERROR
        why = SKIP_REASONS[event.skipped]
        if event.skipped == "busy":
            level, why = logging.INFO, "the one before is still being written"  # `auto` retries soon
            self._busy, self._saves = self._busy + 1, 0
            if self._config.every != "auto":
                level = level if self._busy & (self._busy - 1) else logging.WARNING  # at 1, 2, 4, 8, ...
                why += f" ({counted(self._busy, 'time')} so far). `every: auto` leaves the time that a save takes"
        _log.log(level, "no save at step %d: %s", event.step, f"{why}. {event.problem}" if event.problem else why)

    def _count_decision(self, event: events.DecisionEvent) -> None:
        """Log an error if several decisions have passed and nothing is committed, in this run or before it."""
        self._commits = event.commits
        if event.skipped == "busy" and time.monotonic() < self._began + _PATIENCE:
            return
        self._decisions += 1
        if not self._commits and self._decisions % (_DECISIONS_WITHOUT_COMMIT + 1) == 0:
            text = "nothing is committed after %d decisions: a failure now loses all %d steps. The lines above say why"
            _log.error(text, self._decisions, event.step)

    def on_close(self, clean: bool, timeout: float) -> None:
        if self._rank == 0 and self._decisions and not self._commits:
            _log.error("this job ends without any commit in %s", self._store)
        elif self._rank == 0 and not (clean or self._observing) and self._step > self._held:
            text, newest = "the job ends, and its step %d is not committed to %s; %s", newest_text(self._newest)
            _log.warning(text, self._step, self._store, newest)

    def on_step(self, step: int, at: float) -> None:
        self._step = step

    def on_save_begin(self, event: events.SaveBeginEvent) -> None:
        if event.dry_run is not None:
            self._observing = True
            slots = (event.step, len(event.dry_run), len(event.sizes))
            nbytes = (event.dry_run_bytes, sum(size.nbytes for size in event.sizes.values()))
            _log.info("observe: step %d would have saved %d of %d layer slots, %d of %d bytes", *slots, *nbytes)

    def on_commit(self, event: events.CommitEvent) -> None:
        self._commits += 1
        step, dropped = event.save.step, event.drawn.dropped
        self._held, self._newest = step, event.save
        if dropped:
            names = ", ".join(str(unit) for unit in dropped[:_NAMED])
            _log.error("health gate: NaN or Inf in %s at step %d; the versions before are kept", names, step)
        level, late = (logging.WARNING, "preempted: ") if self._unfinished else (logging.INFO, "")
        _log.log(level, "%scommitted step %d: %d bytes, %.2f s", late, step, event.written_bytes, event.seconds)

    def on_save_failed(self, event: events.SaveFailedEvent) -> None:
        known = "" if isinstance(event.error, MissingSegmentsError) else f" ({newest_text(event.newest)})"
        text = f"the save of step %d failed{known}: %s"
        if self._rank != 0:
            text = f"rank {self._rank} could not write its segment of step %d: %s"
        _log.warning(text, event.step, event.error, exc_info=unexpected(event.error))

    def on_resume(self, event: events.ResumeEvent) -> None:
        if self._rank != 0:
            return
        certificate = event.certificate
        self._step, self._held, self._newest = event.step, 0 if event.from_memory else event.step, event.newest
        where = self._store
        if event.from_memory:
            sources = {unit.source for unit in certificate.units if unit.moving}
            where = "memory" if sources <= {MEMORY, PEER} else f"memory and {where}"
        if event.replicas:
            where += f", {event.replicas} of its ranks from replicas on other nodes"
        if event.replayed:
            where += f" and {counted(event.replayed, 'step')} of its journal"
        log_startup(f"resumed step {certificate.step} from {where} ({_kind(certificate)})")
        if event.step != certificate.step:
            text = (
                "resume: the weights are at step %.4g on average, so counters and schedules resume from the save of "
                "step %d, and later steps are repeated; see `resume:` in the configuration"
            )
            _log.warning(text, certificate.effective_step, event.step)
        for note in event.notes:
            _log.warning("resume: %s", note)
        if event.fallbacks:
            _log.error("resume: %d layer slots fell back to an older version; see driftpoint show", event.fallbacks)

    def on_preempted(self, event: events.PreemptedEvent) -> None:
        step, seconds = event.step, event.seconds
        self._held = step  # the messages below name what is lost
        if event.outcome == "full":
            what, how = ("full save", "") if event.exact else ("all", ", in parts or rounded: not exact")
            _log.warning("preempted: %s of step %d committed %.1f s after the signal%s", what, step, seconds, how)
        elif event.outcome == "part":
            _log.warning(
                "preempted: part of step %d committed %.1f s after the signal: %d of %d layer slots, the rest up to %d "
                "steps stale",
                *(step, seconds, event.fresh, event.moving, event.oldest),
            )
        else:
            reason, intact = SKIP_REASONS.get(event.skipped, event.skipped), newest_text(event.newest)
            text = "preempted: nothing new is saved at step %d: %s; %s"
            if event.skipped == "busy":  # the process waits for it as long as it may
                self._unfinished, text = True, "preempted: step %d is not committed yet: %s; %s"
                intact += ". The save that is being written may still be committed before the process ends"
            _log.error(text, step, reason, intact)


def _kind(certificate: Certificate) -> str:
    if certificate.exact:
        return "exact: the saved state, to the last bit"
    if certificate.as_found:
        return AS_FOUND
    if certificate.max_staleness == 0:
        return "all of one step, not bitwise"
    return f"a composite, up to {certificate.max_staleness} steps stale"


PATIENCE = 60.0  # seconds that the first decision waits for other ranks before it says so
FORGOTTEN = 500  # optimizer steps without ``ckpt.step()``; more where a loop takes many between two calls, as in PPO
_REPEATS = 5  # optimizer steps in a row, each after the same number of calls, at which these become suspect
_Gradient = tuple[torch.Tensor, int]  # the smallest gradient, and how often it was written to
_WITHOUT_POSITION = (torch.Generator, torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)
NESTED = "ckpt.save() within another call, by a signal handler or another thread, saves nothing: set a flag there"


class MisuseNotices:
    """Compares the calls of ``ckpt.step()`` with a rank's optimizer steps, and warns if they do not match.

    ``updates``: optimizer steps since the last call. steps: counts them; None if the adapter, or nothing, does."""

    def __init__(self, adapter: Adapter, steps: Callable[[], int] | None, rank: int, world_size: int) -> None:
        self.updates = 0
        self._adapter, self._rank = adapter, rank
        self._counted = steps is not None or adapter.completed_steps() is not None
        self._framework_calls = _framework_calls(adapter, steps)
        self._said: set[str] = set()
        self._entered = threading.Lock()
        self._called, self._most = False, 0
        # If a rank never calls step(), rank 0 or 1 waits for it: only these need to watch, until all decided once.
        self._may_wait = world_size > 1 and rank <= 1
        self.restart()
        adapter.before_update(self._before_update)

    def restart(self) -> None:
        """Begin anew after a resume."""
        self.updates = self._calls = self._before = self._alike = 0
        self._first = True
        self._suspect: tuple[_Gradient | None] | None = None  # at a first call before any optimizer step
        self._repeated: tuple[_Gradient | None] | None = None  # at an optimizer step after ``_REPEATS`` equal ones
        self._calls_before = None if self._framework_calls is None else self._framework_calls()

    def stepped(self) -> None:
        """Record a call of ``ckpt.step()``."""
        if not self.updates:
            self._called_without_update()
        self._first, self._called = False, True
        self._calls += 1
        self._most, self.updates = max(self._most, self.updates), 0

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Yield False, and log why, for a call during another one: by a signal handler, or in another thread."""
        alone = self._entered.acquire(blocking=False)
        if not alone:
            self._say(NESTED)
        try:
            yield alone
        finally:
            if alone:
                self._entered.release()

    def watched(self, action: Callable[[], StepReport | None]) -> StepReport | None:
        """Run the collective part of ``ckpt.step()``. Until all ranks have decided once, warn if it waits for long."""
        if not self._may_wait:
            return action()
        watch = threading.Timer(PATIENCE, self._warn_of_waiting)
        watch.daemon = True
        watch.start()
        try:
            report = action()
        finally:
            watch.cancel()
        if report is not None and report.skipped != "unreachable":
            self._may_wait = False
        return report

    def resumed(self, caller: FrameType | None, objects: Sequence[Any]) -> None:
        """Record a call of ``resume()`` in the frame ``caller``. objects: the user's, which may hold the step."""
        if not self._counted and all(isinstance(one, _WITHOUT_POSITION) for one in objects) and is_discarded(caller):
            self._say(
                "the step that ckpt.resume() returns is not used: a job that resumes would count from 0 again and "
                "train on data that it has had. Begin the loop with `range(ckpt.resume(), total_steps)`"
            )

    def close(self) -> None:
        """Warn of a rank that trained and never called ``ckpt.step()``."""
        if not self._called and self.updates > 1 and self._rank:
            text = "rank %d took %d optimizer steps without ckpt.step(): call it on every rank"
            _log.warning(text, self._rank, self.updates)

    def _called_without_update(self) -> None:
        """Check a call before the first optimizer step, or one of several calls between two steps.

        A gradient scaler may have skipped the step. A loop may count something else, such as steps of an environment:
        then gradients do not change from call to call."""
        if self._first and self._framework_calls is not None and self._framework_calls() == self._calls_before:
            self._say_before()
        elif self._first and self._framework_calls is None and not self._counted:
            self._suspect = (_gradient(self._adapter.module),)
        if self._repeated is not None:
            (stepped,), self._repeated = self._repeated, None
            now = _gradient(self._adapter.module)
            if now is not None and not _is_same(now, stepped) and _local(now[0]).any():
                self._say(
                    f"ckpt.step() is called {self._before} times for each optimizer step: call it once, after "
                    "optimizer.step(). Otherwise it counts micro-batches, and saves between two of them lack the "
                    "gradients accumulated so far"
                )

    def _before_update(self) -> None:
        if self._suspect is not None:
            (called,), self._suspect = self._suspect, None
            same = _is_same(called, _gradient(self._adapter.module))
            # The step uses the gradient that was there at the call; or there was none, and no scaler that skips steps.
            if same or (called is None and self._calls == 1 and not _has_scaler()):
                self._say_before()
        if not self.updates:
            self._alike = self._alike + 1 if self._calls == self._before else 1
            self._before, self._calls = self._calls, 0
            if self._alike == _REPEATS and self._before > 1 and not self._counted:
                self._repeated = (_gradient(self._adapter.module),)
        self.updates += 1
        if self.updates == max(FORGOTTEN, 10 * self._most):
            since = "since the last ckpt.step()" if self._called else "and ckpt.step() was never called"
            self._say(f"{self.updates} optimizer steps {since}: nothing is saved. Call it after every optimizer.step()")

    def _say_before(self) -> None:
        self._say(
            "ckpt.step() is called before the optimizer step: a save then lacks the update that it is counted with, "
            "and a resume loses it. Call it after optimizer.step() or engine.step()"
        )

    def _say(self, text: str) -> None:
        if self._rank == 0 and text not in self._said:
            self._said.add(text)
            _log.warning("%s", text)

    def _warn_of_waiting(self) -> None:
        self._may_wait = False
        text = "rank %d waits in ckpt.step() for other ranks, for %.0f s by now: all ranks must call it after the same "
        _log.warning(f"{text}optimizer steps, not rank 0 alone", self._rank, PATIENCE)


def is_discarded(caller: FrameType | None) -> bool:
    """Return whether the call under way in a frame is a statement, so that nothing gets its result."""
    if caller is None:
        return False
    after = (one.opname for one in dis.get_instructions(caller.f_code) if one.offset > caller.f_lasti)
    return next(after, "") == "POP_TOP"


def _framework_calls(adapter: Adapter, steps: Callable[[], int] | None) -> Callable[[], int] | None:
    """Return a function that counts calls of the framework's step, those of micro-batches too; None if none does."""
    engine = getattr(adapter, "engine", None)
    return (lambda: int(engine.micro_steps)) if engine is not None else getattr(steps, "calls", None)


def _gradient(module: torch.nn.Module) -> _Gradient | None:
    smallest = min((one.grad for one in module.parameters() if one.grad is not None), key=torch.numel, default=None)
    return None if smallest is None else (smallest, version_of(_local(smallest)))


def _is_same(one: _Gradient | None, other: _Gradient | None) -> bool:
    return one is not None and other is not None and one[0] is other[0] and one[1] == other[1]


def _local(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)  # of a DTensor, which others write to


def _has_scaler() -> bool:
    """Return whether this process has an enabled gradient scaler. Looks at all objects; called once at most."""
    return any(issubclass(type(one), torch.amp.GradScaler) and one.is_enabled() for one in gc.get_objects())


_TAIL = 4 << 20  # bytes at the end of a trace in which the line of a step is looked for


def check_rng(adapter: Adapter, recorder: TraceRecorder, path: Path | None, group: Group, page: str) -> None:
    """Compare where a resumed loop draws random numbers with where the saved run drew them, and warn once.

    A resume restores the generators. A loop that has drawn more or fewer numbers than the saved run at its next
    optimizer step has state that was not saved: a batch fetched ahead, an iterator that begins anew. After each save, a
    digest of rank 0's generators at the next optimizer step goes into the drift trace. Generators of devices are not
    compared, nor python's, which libraries draw from. path: of the trace. page: of the docs."""

    def before_update() -> None:
        saved, resumed = recorder.saved_step, recorder.resumed_step
        if saved is None and resumed is None:
            return
        recorder.saved_step = recorder.resumed_step = None
        now = generators_digest()
        line = None if resumed is None or path is None else last_drawn(path, resumed)
        if saved is not None:
            recorder.put_drawn(saved, now)
        if line is not None and line.world_size == group.world_size and line.digest != now:
            _log.warning(
                "after this resume the loop has drawn more or fewer random numbers than the saved run had at the same "
                "optimizer step, so it does not go on as that run did: does it fetch a batch ahead, or begin an "
                "iterator anew? Ignore this if the data continues where it stopped and nothing later is random. See "
                f"docs/{page}"
            )

    if group.rank == 0 and path is not None:
        adapter.before_update(before_update)


def generators_digest() -> str:
    """Return a digest of the global generators of torch on the host and of numpy."""
    held = [torch.get_rng_state().numpy(), *np.random.get_state(legacy=False)["state"].values()]
    parts = (str(one).encode() if isinstance(one, int) else one.tobytes() for one in held)
    return xxhash.xxh3_64_hexdigest(b"".join(parts))


def last_drawn(path: Path, step: int) -> traces.DrawnLine | None:
    """Return the newest line of a step near the end of a trace, if there is one."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        raw = [line for line in file if line.startswith(b'{"kind":"drawn"')]
        found = [line for line in traces.iter_lines(raw) if isinstance(line, traces.DrawnLine) and line.step == step]
        return found[-1] if found else None
    return None
