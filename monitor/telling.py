"""What became of a save: to the log, the metrics and the ledger. Training thread only.

Storage trouble ends up here: it never reaches the training loop as an exception, and never passes silently.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from monitor.ledger import Drawn, Ledger
from monitor.metrics import Metrics
from store.errors import DriftpointError

if TYPE_CHECKING:
    from monitor.save import Saved
    from monitor.writer import Done

_log = logging.getLogger("driftpoint")


def tell_save(metrics: Metrics, ledger: Ledger, step: int, outcome: Done[Saved | None]) -> Drawn | None:
    """Rank 0: advance the ledger to a commit, or report the failure. The commit, if there is one."""
    saved = outcome.result
    if saved is None or saved.drawn is None:
        _tell_failure(metrics, step, outcome.error)
        return None
    drawn, manifest = saved.drawn, saved.drawn.manifest
    ledger.advance(manifest)
    metrics.committed(manifest.step, saved.seconds, saved.written_bytes, manifest.bytes_avoided)
    metrics.units(drawn.drift, {record.unit: record.staleness for record in manifest.units})
    if drawn.dropped:
        metrics.withheld.inc(len(drawn.dropped))
        _log.error(
            "health gate: NaN or Inf in %s at step %d; the versions before stay",
            ", ".join(str(unit) for unit in drawn.dropped[:6]),
            manifest.step,
        )
    _log.info("committed step %d: %d bytes, %.2f s", manifest.step, saved.written_bytes, saved.seconds)
    return drawn


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
    metrics.failures.labels(failure_reason(error)).inc()
    _log.warning(
        "the save of step %d failed, the commit before it is intact: %s", step, error, exc_info=_unexpected(error)
    )


def _unexpected(error: BaseException | None) -> BaseException | None:
    """What nobody raises on purpose is worth its traceback."""
    return None if isinstance(error, DriftpointError) else error
