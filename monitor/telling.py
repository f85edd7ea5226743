"""What became of a decision or a save: to the log, the metrics and the ledger. Training thread only.

Storage trouble ends up here: it never reaches the training loop as an exception, and never passes silently.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from monitor.ledger import Drawn, Ledger
from monitor.metrics import Metrics
from monitor.saying import say
from monitor.units import UnitTable, is_moving
from policies.spikes import Reading
from store.certificate import MEMORY, PEER, is_lossy
from store.errors import DriftpointError, NotFiniteError
from store.names import WEIGHTS

if TYPE_CHECKING:
    from monitor.config import Config
    from monitor.decided import Decided
    from monitor.job import Job
    from monitor.resume import Resumed
    from monitor.save import Saved
    from monitor.writer import Done
    from store.certificate import Certificate
    from store.names import Unit

_log = logging.getLogger("driftpoint")


def tell_save(metrics: Metrics, ledger: Ledger, step: int, outcome: Done[Saved | None]) -> Drawn | None:
    """Rank 0: advance the ledger to a commit, or report the failure. The commit, if there is one."""
    saved = outcome.result
    if saved is None or saved.drawn is None:
        _tell_failure(metrics, step, outcome.error)
        return None
    drawn, manifest = saved.drawn, saved.drawn.manifest
    readings = _readings(drawn.drift, {unit: ledger.staleness(unit, manifest.step) for unit in drawn.drift})
    ledger.advance(manifest)
    metrics.saves.committed(manifest.step, saved.seconds, saved.written_bytes, manifest.bytes_avoided)
    metrics.layers.show(drawn.drift, {record.unit: record.staleness for record in manifest.units})
    metrics.layers.judge(manifest.step, readings)
    fresh = {record.unit for record in manifest.units if record.version == manifest.save}
    metrics.layers.healthy(fresh, drawn.dropped)
    if drawn.dropped:
        metrics.saves.withheld.inc(len(drawn.dropped))
        _log.error(
            "health gate: NaN or Inf in %s at step %d; the versions before stay",
            ", ".join(str(unit) for unit in drawn.dropped[:6]),
            manifest.step,
        )
    _log.info("committed step %d: %d bytes, %.2f s", manifest.step, saved.written_bytes, saved.seconds)
    return drawn


def tell_skipped(metrics: Metrics, reason: str, step: int, problem: str | None, *, put_off: bool = False) -> None:
    """Rank 0: a decision began no save. problem: with ``unsupported``, what is not as it was attached.

    put_off: it is made again soon, as ``every: auto`` does while a save is under way, so that nothing is amiss."""
    metrics.saves.skipped.labels(reason).inc()
    level, text = _WHY_SKIPPED[reason]
    level = logging.INFO if put_off and reason == "busy" else level
    _log.log(level, text, *[value for value in (step, problem) if value is not None])


def begin_metrics(job: Job, epoch: int) -> None:
    """Rank 0: what is known before the first step, and the endpoint. epoch: 0 where nothing is written."""
    metrics, settings = job.metrics, job.config.metrics
    metrics.resumed.epoch.set(epoch)
    metrics.resumed.attached.set(time.time())
    # At each scrape, in its thread: copying a few numbers is no race, and steps need not pay for it.
    metrics.step_seconds.set_function(lambda: job.pace.timing.step or 0.0)
    if settings.enabled:
        metrics.serve(settings.host, settings.port, settings.security())


def show_units(job: Job, step: int, decided: Decided) -> None:
    """Rank 0: drift and staleness of every unit, as a decision saw them."""
    layers = job.metrics.layers
    staleness = {one.unit: one.staleness for one in decided.stats if one.staleness is not None}
    drift = {unit: one for unit, one in decided.drift.items() if one is not None and unit in job.ledger.versions}
    layers.know(job.table.sizes)
    job.metrics.saves.full.set(sum(size.nbytes for size in job.table.sizes.values()))
    layers.show(drift, staleness)
    layers.judge(step, _readings(drift, staleness))
    layers.healthy(decided.drift.keys(), [one.unit for one in decided.stats if not one.finite])


def _readings(drift: Mapping[Unit, float], staleness: Mapping[Unit, int | None]) -> dict[Unit, Reading]:
    """Of weights: what spikes are looked for in."""
    return {
        unit: Reading(value, age)
        for unit, value in drift.items()
        if unit.slot == WEIGHTS and (age := staleness.get(unit)) is not None
    }


def tell_preempted(job: Job, step: int, seconds: float, skipped: str | None) -> None:
    """Rank 0: what of this step is committed, so long after the end of the job was announced. skipped: why no more."""
    moving = [unit for unit in job.table.sizes if is_moving(unit)]
    ages = [job.ledger.staleness(unit, step) for unit in moving]
    fresh, oldest = ages.count(0), max((age for age in ages if age is not None), default=0)
    outcome = "full" if fresh == len(moving) else "part" if fresh else "nothing"
    job.metrics.preemptions.labels(outcome).inc()
    if outcome == "full" and _in_one(job.ledger, moving):
        _log.warning("preempted: full save of step %d committed %.1f s after the signal", step, seconds)
    elif outcome == "full":
        _log.warning(
            "preempted: all of step %d committed %.1f s after the signal, in parts or rounded: not exact", step, seconds
        )
    elif outcome == "part":
        _log.warning(
            "preempted: part of step %d committed %.1f s after the signal: %d of %d layer slots, the rest up to %d "
            "steps stale",
            *(step, seconds, fresh, len(moving), oldest),
        )
    else:
        newest = job.ledger.newest
        stands = "there is no commit yet" if newest is None else f"the commit of step {newest.step} is intact"
        why = _WHY_NOTHING.get(skipped or "", skipped)
        _log.error("preempted: nothing new is saved at step %d: %s; %s", step, why, stands)


def _in_one(ledger: Ledger, moving: Sequence[Unit]) -> bool:
    """Whether the newest commit saved all that moves itself, and no bit of it was rounded."""
    records = [ledger.versions[unit] for unit in moving]
    return all(record.version == ledger.newest and not is_lossy(record.encoding) for record in records)


def _kind(certificate: Certificate) -> str:
    if certificate.exact:
        return "exact"
    if certificate.max_staleness == 0:
        return "all of one step, not to the last bit"
    return f"a composite, up to {certificate.max_staleness} steps stale"


def tell_resumed(job: Job, step: int, found: Resumed, certificate: Certificate) -> None:
    """Rank 0: the job goes on at ``step``, by what was found."""
    config, fallbacks = job.config, found.resolution.fallbacks
    _show_resumed(job, step, found, certificate)
    where = config.store
    if found.memory is not None:
        sources = {unit.source for unit in certificate.units if unit.moving}
        where = "memory" if sources <= {MEMORY, PEER} else f"memory and {config.store}"
    if found.replicas:
        where += f", {len(found.replicas)} of its ranks from what peers had kept"
    say(f"resumed step {certificate.step} from {where} ({_kind(certificate)})")
    if step != certificate.step:
        _log.warning(
            "resume: its weights stand at step %.4g on average, so counters and schedules go on from the save of "
            "step %d: the steps since are done again; see `resume:` in the configuration",
            certificate.effective_step,
            step,
        )
    for note in found.notes:
        _log.warning("resume: %s", note)
    if fallbacks:
        _log.error("resume: %d layer slots fell back to an older version; see driftpoint show", len(fallbacks))


def _show_resumed(job: Job, step: int, found: Resumed, certificate: Certificate) -> None:
    metrics, manifest = job.metrics.resumed, found.resolution.manifest
    metrics.step.set(step)
    metrics.effective_step.set(certificate.effective_step)
    metrics.fallbacks.set(len(found.resolution.fallbacks))
    metrics.passed_over.set(found.passed_over)
    metrics.staleness.set(certificate.max_staleness)
    metrics.exact.set(certificate.exact)
    metrics.from_memory.set(found.memory is not None)
    metrics.from_peers.set(len(found.replicas))
    job.metrics.stepped(step)
    newest = job.ledger.newest
    if newest is not None:  # of what memory gave, nobody knows here when the commit below it was made
        made = 0.0 if found.memory is not None else datetime.fromisoformat(manifest.created).timestamp()
        job.metrics.saves.stands_on(newest.step, made)


def tell_unused(config: Config, table: UnitTable) -> None:
    """Rank 0: encodings for slots that there are not, which would otherwise store everything raw without a word."""
    slots = {unit.slot for unit in table.sizes}
    unused = sorted(config.encodings().keys() - slots) if isinstance(config.encoding, dict) else []
    if unused:
        _log.warning("encoding: there is no slot %s; this job has %s", ", ".join(unused), ", ".join(sorted(slots)))


def tell_segment(rank: int, step: int, error: BaseException) -> None:
    """Another rank: why there will be no commit."""
    _log.warning("rank %d could not write its segment of step %d: %s", rank, step, error, exc_info=_unexpected(error))


def tell_upkeep(metrics: Metrics, what: str, error: BaseException) -> None:
    """Something small in the background failed; it costs nothing else."""
    metrics.failures.labels("upkeep").inc()
    _log.warning("%s failed: %s", what, error, exc_info=_unexpected(error))


def failure_reason(error: BaseException | None) -> str:
    """An error's name in metrics and traces."""
    return type(error).__name__ if isinstance(error, DriftpointError) else "internal"


def _tell_failure(metrics: Metrics, step: int, error: BaseException | None) -> None:
    metrics.saves.not_committed(failure_reason(error))
    if isinstance(error, NotFiniteError):
        metrics.layers.healthy((), error.units)
    _log.warning(
        "the save of step %d failed, the commit before it is intact: %s", step, error, exc_info=_unexpected(error)
    )


def _unexpected(error: BaseException | None) -> BaseException | None:
    """What nobody raises on purpose is worth its traceback."""
    return None if isinstance(error, DriftpointError) else error


_WHY_NOTHING = {
    None: "nothing moved",
    "busy": "not enough time",
    "nothing": "not enough time",
    "failed": "the save failed",
    "withheld": "layers without any version have NaN or Inf",
    "fenced": "another job has taken the store over",
    "disagree": "ranks are at different steps",
    "unsupported": "the job is not what was attached",
}

_WHY_SKIPPED = {
    "busy": (logging.WARNING, "no save at step %d: the one before is still being written"),
    "fenced": (logging.ERROR, "no save at step %d: another job has taken the store over; stop one of the two"),
    "withheld": (logging.ERROR, "no save at step %d: layers without any version have NaN or Inf"),
    "storage": (logging.ERROR, "no save at step %d: the store could not be claimed for a second save of this step"),
    "disagree": (
        logging.ERROR,
        "no save at step %d: ranks are at different steps; call ckpt.step() alike on all of them",
    ),
    "unsupported": (
        logging.ERROR,
        "no save at step %d: the job is not what was attached, and a part would pass for the whole. %s",
    ),
    "nothing": (logging.DEBUG, "no save at step %d: no layer needs it"),
}
