"""Logs the outcome of decisions, saves and resumes to the logger ``driftpoint``.

Storage problems never reach the training loop as an exception and never pass silently: they are logged here."""

import logging
import sys

from typing_extensions import override

from monitor import events
from monitor.config.load import Config
from monitor.events import SaveListener, unexpected
from monitor.types import SKIP_REASONS, newest_text
from store.certificate import AS_FOUND, MEMORY, PEER, Certificate
from store.names import SaveId

_log = logging.getLogger("driftpoint")

_DECISIONS_WITHOUT_COMMIT = 3
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
    """Warn that nothing was resumed, for the case that the store should have had commits."""
    _log.warning(
        "training begins from nothing: there is no commit in %s. If there should be one, check the path and the mount. "
        "Once the store exists, `store: {path: %s, create: false}` refuses a start without it",
        store,
        store,
    )


class SaveLog(SaveListener):
    """Logs events; on ranks other than 0 only those that rank 0 does not know of."""

    def __init__(self, config: Config, rank: int = 0) -> None:
        self._config, self._store = config, config.store_path
        self._rank = rank
        self._encodings_checked = False
        self._commits = self._decisions = 0
        self._unfinished = False  # the job was preempted while a save was being written
        self._step = self._held = 0  # newest step, and the newest that is committed, or known to be lost
        self._newest: SaveId | None = None  # commit
        self._observing = False

    @override
    def on_measured(self, event: events.MeasuredEvent) -> None:
        if self._encodings_checked:
            return
        self._encodings_checked = True
        slots = {unit.slot for unit in event.sizes}
        config = self._config
        unused = sorted(config.encodings().keys() - slots) if isinstance(config.encoding, dict) else []
        if unused:
            _log.warning("encoding: there is no slot %s; this job has %s", ", ".join(unused), ", ".join(sorted(slots)))

    @override
    def on_decision(self, event: events.DecisionEvent) -> None:
        if self._rank != 0:
            return
        self._count_decision(event)
        if event.skipped is None:
            return
        level, text = _WHY_SKIPPED[event.skipped]
        if event.skipped == "busy" and self._config.every == "auto":  # it is retried soon
            level = logging.INFO
        _log.log(level, text, *[value for value in (event.step, event.problem) if value is not None])

    def _count_decision(self, event: events.DecisionEvent) -> None:
        """Say so if several decisions have passed and nothing is committed, in this run or before it."""
        self._commits, self._decisions = event.commits, self._decisions + 1
        if not self._commits and self._decisions % (_DECISIONS_WITHOUT_COMMIT + 1) == 0:
            _log.error(
                "nothing is committed after %d decisions: a failure now loses all %d steps. The lines before say why",
                self._decisions,
                event.step,
            )

    @override
    def on_close(self, clean: bool, timeout: float) -> None:
        if self._rank == 0 and self._decisions and not self._commits:
            _log.error("this job ends without any commit in %s", self._store)
        elif self._rank == 0 and not (clean or self._observing) and self._step > self._held:
            text, newest = "the job ends, and its step %d is not committed to %s; %s", newest_text(self._newest)
            _log.warning(text, self._step, self._store, newest)

    @override
    def on_step(self, step: int, at: float) -> None:
        self._step = step

    @override
    def on_save_begin(self, event: events.SaveBeginEvent) -> None:
        if event.dry_run is not None:
            self._observing = True
            _log.info(
                "observe: step %d would have saved %d of %d layer slots, %d of %d bytes",
                event.step,
                len(event.dry_run),
                len(event.sizes),
                event.dry_run_bytes,
                sum(size.nbytes for size in event.sizes.values()),
            )

    @override
    def on_commit(self, event: events.CommitEvent) -> None:
        self._commits += 1
        step, dropped = event.save.step, event.drawn.dropped
        self._held, self._newest = step, event.save
        if dropped:
            _log.error(
                "health gate: NaN or Inf in %s at step %d; the versions before are kept",
                ", ".join(str(unit) for unit in dropped[:_NAMED]),
                step,
            )
        level, late = (logging.WARNING, "preempted: ") if self._unfinished else (logging.INFO, "")
        _log.log(level, "%scommitted step %d: %d bytes, %.2f s", late, step, event.written_bytes, event.seconds)

    @override
    def on_save_failed(self, event: events.SaveFailedEvent) -> None:
        text = f"the save of step %d failed ({newest_text(event.newest)}): %s"
        if self._rank != 0:
            text = f"rank {self._rank} could not write its segment of step %d: %s"
        _log.warning(text, event.step, event.error, exc_info=unexpected(event.error))

    @override
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
        log_startup(f"resumed step {certificate.step} from {where} ({_kind(certificate)})")
        if event.step != certificate.step:
            _log.warning(
                "resume: the weights are at step %.4g on average, so counters and schedules resume from the save of "
                "step %d, and later steps are repeated; see `resume:` in the configuration",
                certificate.effective_step,
                event.step,
            )
        for note in event.notes:
            _log.warning("resume: %s", note)
        if event.fallbacks:
            _log.error("resume: %d layer slots fell back to an older version; see driftpoint show", event.fallbacks)

    @override
    def on_preempted(self, event: events.PreemptedEvent) -> None:
        step, seconds = event.step, event.seconds
        self._held = step  # the messages below name what is lost
        if event.exact:
            _log.warning("preempted: full save of step %d committed %.1f s after the signal", step, seconds)
        elif event.outcome == "full":
            _log.warning(
                "preempted: all of step %d committed %.1f s after the signal, in parts or rounded: not exact",
                step,
                seconds,
            )
        elif event.outcome == "part":
            _log.warning(
                "preempted: part of step %d committed %.1f s after the signal: %d of %d layer slots, the rest up to %d "
                "steps stale",
                *(step, seconds, event.fresh, event.moving, event.oldest),
            )
        else:
            reason, intact = SKIP_REASONS.get(event.skipped, event.skipped), newest_text(event.newest)
            if event.skipped == "busy":  # the process waits for it as long as it may
                self._unfinished = True
                intact += ". The save that is being written may still be committed before the process ends"
                _log.error("preempted: step %d is not committed yet: %s; %s", step, reason, intact)
            else:
                _log.error("preempted: nothing new is saved at step %d: %s; %s", step, reason, intact)


def _kind(certificate: Certificate) -> str:
    if certificate.exact:
        return "exact: the saved state, to the last bit"
    if certificate.as_found:
        return AS_FOUND
    if certificate.max_staleness == 0:
        return "all of one step, not bitwise"
    return f"a composite, up to {certificate.max_staleness} steps stale"


_WHY_SKIPPED = {
    "busy": (logging.WARNING, "no save at step %d: the one before is still being written"),
    "fenced": (logging.ERROR, "no save at step %d: another job has taken over the store; stop one of the two"),
    "withheld": (logging.ERROR, "no save at step %d: layers without any version have NaN or Inf"),
    "storage": (logging.ERROR, "no save at step %d: the store could not be claimed; the line before says why"),
    "disagree": (
        logging.ERROR,
        "no save at step %d: ranks are at different steps; call ckpt.step() equally often on all of them",
    ),
    "unreachable": (
        logging.ERROR,
        "no save at step %d: another rank was later than the job's timeout, or is gone; restart the job",
    ),
    "unsupported": (logging.ERROR, "no save at step %d: the model or the optimizer cannot be saved as it is now. %s"),
    "nothing": (logging.DEBUG, "no save at step %d: no layer needs it"),
}
