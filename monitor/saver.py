"""Saves, as the training thread sees them: begin one, and later learn what became of it.

One save at a time. Ranks learn each other's state through one small reduction at the next decision; nothing
else is exchanged. The background thread owns staged copies from :meth:`Saver.begin` until the save is finished.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from monitor.agree import on_first
from monitor.deciding import Decided
from monitor.job import Job
from monitor.ledger import CommitDraft, JobFacts
from monitor.measuring import measure_record
from monitor.opened import OpenedStore
from monitor.run_state import capture_rng, to_tree
from monitor.save import Committing, Saved, SaveJob, StagedUnit, run
from monitor.staging import Copying, StagingPool
from monitor.units import LocalUnit
from monitor.writer import Done, Writer
from store.epochs import claim_epoch, require_newest
from store.errors import DriftpointError, FencedError
from store.names import BUFFER, SaveId, Unit
from store.record import digest, seal
from store.segments import SegmentDraft

_log = logging.getLogger("driftpoint")


@dataclass(frozen=True)
class Settled:
    """How things stand over all ranks. skip: why no save may begin now. changed: some rank's pieces changed."""

    skip: str | None
    changed: bool


@dataclass(frozen=True)
class _Pending:
    number: int
    save: SaveId
    staged: tuple[StagedUnit, ...]
    committing: Committing | None


class Saver:
    """Begins saves and settles them."""

    def __init__(self, job: Job, opened: OpenedStore) -> None:
        self._job = job
        self._group = job.group
        self._meter = job.meter
        self._metrics = job.metrics
        self._opened = opened
        self._facts = JobFacts(
            store_id=opened.catalog.store_id,
            framework=job.adapter.framework,
            policy=job.policy.name,
            layers=job.table.layer_records(),
            tensors=job.table.tensor_records(),
        )
        self._pool = StagingPool()
        self._writer: Writer[Saved | None] = Writer(f"driftpoint-writer-{job.group.rank}")
        self._pending: _Pending | None = None
        self._outcome: Done[Saved | None] | None = None
        self._copying: Copying | None = None
        self._fenced = False
        job.adapter.before_update(self._before_update)
        self._last_step: int | None = None

    def reserve(self, local: Mapping[Unit, LocalUnit]) -> None:
        """Make room for a full save now, so that the first one does not pay for it in the training loop."""
        for unit, part in local.items():
            self._pool.reserve(unit, part.tensors)

    def settle(self, changed: bool) -> Settled:
        """Learn how the save under way stands, on all ranks, and move the references if it is committed. Collective."""
        self._collect()
        pending, outcome = self._pending, self._outcome
        busy = pending is not None and outcome is None
        failed = outcome is not None and outcome.error is not None
        flags = self._group.largest([busy, failed, changed, self._fenced])
        any_busy, any_failed, any_changed, fenced = (bool(flag) for flag in flags)
        if any_busy:
            if any_failed and pending is not None and pending.committing is not None:
                pending.committing.give_up.set()  # a rank cannot deliver: rank 0 need not wait for it
            return Settled("busy", any_changed)
        if pending is not None:
            self._finish(pending, outcome)
        return Settled("fenced" if fenced else None, any_changed)

    def begin(self, step: int, decided: Decided, local: Mapping[Unit, LocalUnit]) -> int:
        """Copy what was decided and hand it to the background thread. Returns the bytes copied on this rank."""
        if step == self._last_step:
            self._renew_epoch()  # names are never used twice, and this step's may be taken
        self._last_step = step
        save = SaveId(step, self._opened.epoch)
        copying = Copying()
        staged = tuple(
            self._staged(local[unit], choice.encoding or "", decided, copying)
            for unit, choice in decided.saved.items()
            if unit in local
        )
        copying.start()
        if self._job.config.staging == "eager":
            copying.finish()
        for unit in staged:
            if unit.measure is not None:
                self._meter.stage(unit.unit, unit.copies)
        committing = self._committing(save, decided) if self._group.rank == 0 else None
        job = SaveJob(self._opened.files, self._segment(save, decided), staged, copying, self._meter, committing)
        self._outcome = None
        self._copying = copying
        self._pending = _Pending(self._writer.submit(lambda: run(job)), save, staged, committing)
        return sum(copy.numel() * copy.element_size() for unit in staged for copy in unit.copies)

    def upkeep(self, job: Callable[[], None], what: str) -> None:
        """Do something small in the background; failing, it is reported and costs nothing else."""

        def told() -> None:
            try:
                job()
            except DriftpointError as error:
                _log.warning("%s failed: %s", what, error)

        self._writer.submit(told)

    def flush(self, timeout: float) -> None:
        """Wait for the save under way on this rank; not collective. Rank 0 waits for the commit."""
        if not self._writer.join(timeout):
            _log.error(
                "the save of step %s is not finished after %.0f s and is given up; the commit before it is intact",
                self._pending.save.step if self._pending else "?",
                timeout,
            )
            self._metrics.failures.labels("close_timeout").inc()
        self._collect()

    def close(self, timeout: float) -> None:
        """Wait for the save under way, tell what became of it, and let go of the store."""
        self.flush(timeout)
        if self._pending is not None and self._outcome is not None and self._group.rank == 0:
            self._told(self._pending, self._outcome)
            self._pending = None
        self._writer.stop()
        self._opened.release()

    def _renew_epoch(self) -> None:
        store_id, files = self._opened.catalog.store_id, self._opened.files

        def claim() -> int:
            require_newest(files, self._opened.epoch)
            return claim_epoch(files, store_id).epoch

        self._opened.epoch = on_first(self._group, claim)

    def _before_update(self) -> None:
        """An optimizer step is about to change the state: what is not copied yet must be waited for."""
        copying, self._copying = self._copying, None
        if copying is not None:
            began = time.perf_counter()
            copying.finish()
            self._metrics.copy_wait.observe(time.perf_counter() - began)

    def _collect(self) -> None:
        for done in self._writer.finished():
            if self._pending is not None and done.number == self._pending.number:
                self._outcome = done
                self._fenced = self._fenced or isinstance(done.error, FencedError)

    def _finish(self, pending: _Pending, outcome: Done[Saved | None] | None) -> None:
        news: tuple[bool, tuple[Unit, ...]] = (False, ())
        if self._group.rank == 0 and outcome is not None:
            drawn = self._told(pending, outcome)
            news = (drawn is not None, drawn.dropped if drawn else ())
        elif outcome is not None and outcome.error is not None:
            _log.warning(
                "rank %d could not write its segment of step %d: %s", self._group.rank, pending.save.step, outcome.error
            )
        committed, dropped = self._group.from_first(news)
        for unit in pending.staged:
            freed = self._meter.settle(unit.unit, committed and unit.unit not in dropped)
            self._pool.give(unit.unit, freed)
        self._pending = self._outcome = None

    def _told(self, pending: _Pending, outcome: Done[Saved | None]) -> Any:
        saved = outcome.result
        if saved is None or saved.drawn is None:
            error = outcome.error
            self._metrics.failures.labels(_reason(error)).inc()
            _log.warning(
                "the save of step %d failed, the commit before it is intact: %s",
                pending.save.step,
                error,
                exc_info=error if not isinstance(error, DriftpointError) else None,
            )
            return None
        drawn, manifest = saved.drawn, saved.drawn.manifest
        self._job.ledger.advance(manifest)
        self._metrics.committed(manifest.step, saved.seconds, saved.written_bytes, manifest.bytes_avoided)
        self._metrics.units(drawn.drift, {record.unit: record.staleness for record in manifest.units})
        for note in saved.notes:
            self._metrics.failures.labels("upkeep").inc()
            _log.warning("step %d is committed, but %s", manifest.step, note)
        if drawn.dropped:
            self._metrics.withheld.inc(len(drawn.dropped))
            _log.error(
                "health gate: NaN or Inf in %s at step %d; the versions before stay",
                ", ".join(str(unit) for unit in drawn.dropped[:6]),
                manifest.step,
            )
        _log.info("committed step %d: %d bytes, %.2f s", manifest.step, saved.written_bytes, saved.seconds)
        return drawn

    def _staged(self, part: LocalUnit, encoding: str, decided: Decided, copying: Copying) -> StagedUnit:
        copies = self._pool.take(part.unit, part.tensors)
        if part.unit.slot == BUFFER:  # a forward may change buffers
            now = Copying()
            now.add(part.tensors, copies)
            now.start()
            now.finish()
        else:
            copying.add(part.tensors, copies)
        mine = decided.mine.get(part.unit)
        return StagedUnit(
            unit=part.unit,
            encoding=encoding,
            fragments=tuple(piece.fragment for piece in part.pieces),
            copies=tuple(copies),
            measure=None if mine is None else measure_record(part.unit, mine),
        )

    def _segment(self, save: SaveId, decided: Decided) -> SegmentDraft:
        state = {"framework": self._job.adapter.run_state(), "rng": capture_rng(), "user": self._job.user.capture()}
        tree, leaves = to_tree(state)
        plan = [save.name, [[unit.layer, unit.slot, choice.encoding] for unit, choice in decided.saved.items()]]
        return SegmentDraft(
            store_id=self._opened.catalog.store_id,
            save=save,
            rank=self._group.rank,
            world_size=self._group.world_size,
            plan=digest(seal(plan)),
            fragments=(),
            run_state=tree,
            run_leaves=leaves,
            facts=self._job.adapter.layout_facts() if self._group.rank == 0 else {},
        )

    def _committing(self, save: SaveId, decided: Decided) -> Committing:
        draft = CommitDraft(
            facts=self._facts,
            save=save,
            world_size=self._group.world_size,
            commits=self._job.ledger.commits + 1,
            previous=self._job.ledger.newest,
            kept=self._job.ledger.kept(save.step, decided.drift, self._job.table.sizes),
            saved=decided.saved,
            sizes=self._job.table.sizes,
            groups=dict(self._job.ledger.groups),
        )
        return Committing(
            draft, self._job.config.timeouts.commit, self._opened.catalog, self._job.config.retention_rule()
        )


def _reason(error: BaseException | None) -> str:
    return type(error).__name__ if isinstance(error, DriftpointError) else "internal"
