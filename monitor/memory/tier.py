"""Keep snapshots of the whole state in shared memory, every few steps, from the training thread.

At the next snapshot, one small reduction tells the ranks whether all of them have the last one. Until then no rank
overwrites the snapshot before, so there is always one that all ranks have. Problems never reach the training loop as
an exception: without enough memory, or after repeated failures, the job continues with the store alone and reports it.
The background thread owns a payload from :meth:`MemoryTier.snapshot` until the snapshot is settled.

With replication, no snapshot begins while one is being sent. So there is always one that all ranks have both in their
own memory and on another node, unless the last one could not be sent."""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from monitor.background import BackgroundWorker, TaskResult
from monitor.context import JobContext
from monitor.decide.schedule import SnapshotSchedule
from monitor.distributed import node_id
from monitor.events import BackgroundFailureEvent, MemoryEvent
from monitor.memory.buffers import SharedMemoryBuffers, log_errors
from monitor.memory.recovery import MemoryCandidate, find_newest_snapshot, rolled_back_to
from monitor.memory.replication import Replication, ReplicationStatus
from monitor.memory.snapshot import Loan, SnapshotManifest, SnapshotStager, Version, seal_snapshot
from monitor.observe.units import LocalUnit, Survey
from monitor.save.async_copy import UnfinishedCopy
from monitor.save.save_task import SaveTask
from monitor.save.saver import Saver
from monitor.save.store_session import StoreSession
from monitor.types import DecisionResult, SaveStatus
from store.catalog import Catalog
from store.errors import StorageError, StoreError
from store.memory.cleanup import describe_left, renew
from store.memory.index import belonging_to, scan_node
from store.memory.layout import Tier
from store.memory.rescue import newest_whole
from store.names import BUFFER, FROZEN, SaveId, Unit

_log = logging.getLogger("driftpoint")
_FAILURES = 3  # consecutive snapshots that may fail before the memory tier is turned off


@dataclass(frozen=True)
class _Pending:
    number: int
    save: SaveId
    slot: int
    abandoned: bool = False


@dataclass(frozen=True)
class _Lent:
    """A payload that is lent to a save for its copies, and becomes a snapshot, too."""

    save: SaveId
    slot: int
    loan: Loan | None  # None where the save becomes no snapshot, or this rank has no memory
    whole: bool = False  # whether all ranks are known to have the snapshot


class MemoryTier:
    """The in-memory snapshots of one rank."""

    def __init__(self, job: JobContext, session: StoreSession, saver: Saver) -> None:
        settings = job.config.memory
        self._job = job
        self._group = job.group
        self._session = session
        self._saver = saver
        self._tier = Tier(Path(settings.path), session.catalog.store_id)
        self._schedule = SnapshotSchedule(settings.every, settings.stall_share)
        self._manifest = SnapshotManifest(job, saver)
        self._stager = SnapshotStager(job, session, self._manifest, saver.copy_timing)
        self._buffers = SharedMemoryBuffers(settings.versions)
        self._writer: BackgroundWorker[float] = BackgroundWorker(f"driftpoint-memory-{job.group.rank}")
        self._pending: _Pending | None = None
        self._outcome: TaskResult[float] | None = None
        self._lends = job.config.shares_memory()
        self._shared = self._lends  # whether the last save could use memory of snapshots
        self._lent: _Lent | None = None
        self._newest: tuple[int, SaveId] | None = None
        self._replication = Replication(job)
        self._old_left = False  # memory of earlier incarnations is to be reused once a snapshot is replicated
        self._unclaimed: tuple[SaveId | None] | None = None  # argument of begin(), while the store has no room
        self._last_problem: str | None = None
        self._failures = 0
        self._disabled = False
        self._copies = UnfinishedCopy(job.adapter, self._waited)

    @property
    def newest(self) -> SaveId | None:
        """The newest snapshot that all ranks are known to have."""
        return None if self._newest is None else self._newest[1]

    def find(self, catalog: Catalog) -> MemoryCandidate | None:
        """Return the snapshot that a resume may use. Collective."""
        self._drain()
        self._replication.connect(self._tier)
        found = find_newest_snapshot(self._tier, catalog, self._job.adapter, self._group, self._replication)
        if found is not None and self._job.config.resume.at == "effective":
            found = rolled_back_to(found, self._group)
        if found is not None:  # whatever its age, it is needed until the job has a snapshot of its own
            log_errors(lambda: renew(self._tier, found.save))
        return found

    def begin(self, local: Mapping[Unit, LocalUnit], kept: SaveId | None) -> None:
        """Reserve memory after a resume or a fresh start, reusing that of earlier incarnations. Collective.

        If memory is short on any rank, the tier is off on all ranks. kept: snapshot that the job resumed; it stays
        until there is a newer one."""
        if self._pending is not None:
            self._drain()
        self._unclaimed = None if self._session.claimed else (kept,)
        if self._unclaimed is None:  # memory is named by the epoch, and that of the job before is not this job's
            self._reserve(local, kept)
        self._manifest.begin()
        self._schedule.restart()
        self._lent = None if self._lent is None else replace(self._lent, whole=False)

    def _reserve(self, local: Mapping[Unit, LocalUnit], kept: SaveId | None) -> None:
        if self._buffers.arena is not None:
            slot = self._buffers.keep_only_version(kept)
            self._newest = None if slot is None or kept is None else (slot, kept)
            self._begin_replication(local, kept)
        elif not self._disabled:
            self._newest = None
            nbytes = self._stager.payload_bytes(local)
            # Not of the parameters: an offloaded optimizer keeps the state in host memory.
            self._buffers.pinned = any(
                part.layout.regions.cuda for unit, part in local.items() if unit.slot not in (BUFFER, FROZEN)
            )
            problem = self._buffers.take(self._tier, self._session, self._group.rank, nbytes, kept)
            reports = self._group.all_gather((problem, node_id(self._tier), describe_left(self._tier)))
            problems = [problem for problem, _, _ in reports]
            if self._group.rank == 0:
                for left in {node: left for _, node, left in reports if left}.values():
                    _log.warning("%s", left)
            if any(problems):
                self._disable("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text)[:600])
            else:
                self._begin_replication(local, kept)
            self._job.listeners.on_memory(MemoryEvent(not any(problems), self._tier.base))

    def lend(
        self, step: int, decided: DecisionResult, local: Mapping[Unit, LocalUnit]
    ) -> Mapping[Unit, list[torch.Tensor]]:
        """Return buffers for a save of ``step`` that stores all that a snapshot would; else none. Collective.

        The copies in them become a snapshot of the step. They are not overwritten before the save is settled; until
        then, new snapshots use the other payload."""
        if self._unclaimed is not None:
            self.begin(local, *self._unclaimed)
        self._shared = self._lends and not self._disabled and self._manifest.covered(decided.saved)
        if not self._shared:
            return {}
        slot = None if self._settle(step, False, False).skip is not None else self._free_slot()
        arena = self._buffers.arena
        if slot is None or arena is None:
            self._schedule.put_off(step)
            return {}
        save, self._outcome = SaveId(step, self._session.epoch), None
        exists = self._newest is not None and self._newest[1] == save  # only one snapshot may have a name
        self._lent, buffers = _Lent(save, slot, None), dict[Unit, list[torch.Tensor]]()
        try:
            loan = self._stager.lend(local, arena, slot, partial(self._buffers.at, slot))
            buffers = loan.buffers()
            self._lent = replace(self._lent, loan=None if exists else loan)
        except Exception as error:  # noqa: BLE001 - raised on one rank, it would leave the others waiting
            if not exists:
                self._pending = _Pending(self._writer.submit(partial(_fail, error)), save, slot)
        return buffers

    def _adopt(self, lent: _Lent, task: SaveTask) -> None:
        """Begin the snapshot that a save staged in lent memory makes."""
        if lent.loan is not None:
            try:
                if task.failure is not None:
                    raise task.failure
                work = partial(self._seal, self._stager.adopt(lent.loan, task), None)
            except Exception as error:  # noqa: BLE001 - likewise
                work = partial(_fail, error)
            self._pending = _Pending(self._writer.submit(work), lent.save, lent.slot)
        self._saver.note_snapshot(lent.save.step)

    def _lent_now(self) -> _Lent | None:
        """Return what is lent to the save under way. The same on all ranks."""
        task = self._saver.task
        return self._lent if self._lent and task and task.segment.save == self._lent.save else None

    def _free_slot(self) -> int | None:
        """Return the payload for the next snapshot, if there is one. The same on all ranks.

        It is neither the newest snapshot nor lent to a save. If the lent one is a snapshot, the newest may go, too."""
        lent = self._lent_now()
        newest = None if self._newest is None or self._buffers.single else self._newest[0]
        free = [one for one in self._buffers.slots if lent is None or one != lent.slot]
        unused = [one for one in free if one != newest]
        if not unused and lent is not None and lent.whole:
            self._newest, unused = (lent.slot, lent.save), free
        return unused[0] if unused else None

    def on_decision(self, step: int, saved: Collection[Unit]) -> None:
        """Note that a save of these units, if any, began at ``step``. The same on all ranks."""
        lent, task = self._lent_now(), self._saver.task
        if saved and lent is not None and task is not None:
            self._adopt(lent, task)
        self._manifest.on_decision(step, saved)
        if saved and not self._disabled and self._schedule.due(step):
            self._schedule.put_off(step)  # a snapshot must not have the name of a save with another state

    def due(self, step: int) -> bool:
        """Return whether to take a snapshot of this step. The same on all ranks."""
        if self._buffers.arena is None or self._disabled or not self._schedule.due(step):
            return False
        soon = range(step + 1, step + 1 + (self._schedule.spare if self._shared else 0))
        return not any(map(self._job.pace.due, soon))  # else there would be no free payload to lend to that save

    def snapshot(self, step: int, survey: Callable[[], Survey]) -> None:
        """Take a snapshot of this step, unless one is pending. survey: reads the job's tensors. Collective."""
        began, found = time.perf_counter(), survey()
        trouble = found.trouble is not None
        agreed = self._settle(step, not trouble and self._job.table.changed(found.local), trouble)
        if agreed.skip in (None, "unready") and agreed.changed:
            self._job.agree(found.local)
        if agreed.skip is None:
            self._take(step, found.local, began)

    def _settle(self, step: int, changed: bool, trouble: bool) -> SaveStatus:
        """Finish the pending snapshot on all ranks, and agree whether the next may begin. Collective.

        changed: whether the pieces of this rank changed. trouble: whether its part of the job cannot be saved now."""
        self._collect()
        pending, outcome = self._pending, self._outcome
        busy = pending is not None and outcome is None
        failed = outcome is not None and outcome.error is not None
        unready = self._group.rank == 0 and not self._manifest.ready()
        off = self._failures >= _FAILURES
        latest = self.newest if pending is None else pending.save
        sending, durations = self._replication.sending(latest)
        for seconds in durations:
            self._schedule.sent(seconds)
        lent = self._lent_now()
        writing = lent is not None and not self._saver.wait(0.0)
        values = [step, -step, busy, failed, changed, trouble, unready, off, writing, *astuple(sending)]
        values.append(self._schedule.wanted())
        newest, oldest, *flags, interval = self._group.all_reduce_max(values)
        any_busy, any_failed, any_changed, any_trouble, any_unready, any_off, any_writing, *sent = map(bool, flags)
        self._schedule.agreed(step, interval)
        if any_busy or (any_changed and self._saver.in_progress):
            # The table of a pending save must not change until it is settled.
            self._replication.agreed(ReplicationStatus(*sent), None)
            return SaveStatus("busy", any_changed)
        if pending is not None and pending.abandoned:
            self._pending = self._outcome = None
        elif pending is not None:
            self._finish(pending, outcome, any_failed)
        if lent is not None and not any_writing:
            self._saver.settle(step, False)  # nothing reads the lent memory any more
        self._replication.agreed(ReplicationStatus(*sent), latest if latest == self.newest else None)
        if sent[0]:
            return SaveStatus("busy", any_changed)
        if self._old_left:  # no rank resumes from earlier incarnations now, and nothing is being sent
            self._buffers.take_rest(self._group.world_size)
            self._old_left = not self._replication.take_rest()
        if any_off:
            self._disable(f"{_FAILURES} versions in a row failed: {self._last_problem or 'on another rank'}")
            return SaveStatus("off", any_changed)
        if any_trouble or newest != -oldest:
            return SaveStatus("unsupported", any_changed)
        return SaveStatus("unready" if any_unready else None, any_changed)

    def _take(self, step: int, local: Mapping[Unit, LocalUnit], began: float) -> None:
        """Stage a snapshot of this step. ``began``: ``perf_counter()`` when training began to wait. Collective."""
        if self._saver.claim_name(step, snapshot=True) is not None:
            return  # fenced, or the store is unreachable: reported at the next decision
        slot = self._free_slot()
        if slot is None:
            return  # a save is written from it
        self._saver.note_snapshot(step)
        self._job.rank_buffers.compare()
        save = SaveId(step, self._session.epoch)
        keep = self._replication.keep_at_peers(self.newest if self._newest and self._newest[0] != slot else None)
        self._outcome = None
        try:
            version = self._stage(save, local, slot)
        except Exception as error:  # noqa: BLE001 - the edge to the user's own objects: kept as the version's failure
            self._pending = _Pending(self._writer.submit(partial(_fail, error)), save, slot)
        else:
            self._pending = _Pending(self._writer.submit(lambda: self._seal(version, keep)), save, slot)
            self._copies.set(version.copying)
        self._schedule.stalled(time.perf_counter() - began)

    def finish_copies(self) -> None:
        self._copies.finish()

    def wait(self, timeout: float) -> bool:
        """Wait until the pending snapshot of this rank is finished. Return False after ``timeout`` seconds."""
        return self._writer.join(timeout)

    def close(self) -> bool:
        """Close the memory, and remove it if a commit is as new in all layers. Return whether it holds newer state."""
        finished = self.wait(min(30.0, self._job.config.timeouts.close))
        if not finished:
            _log.warning("rank %d: the snapshot in memory is not finished and is given up", self._group.rank)
        self._writer.stop()
        superseded = self._superseded()
        remove = superseded and self._buffers.arena is not None
        self._replication.close(remove=remove)
        if self._buffers.arena is not None:
            self._pending = None
            if remove:  # memory of earlier incarnations may not be reused yet
                self._buffers.take_rest(self._group.world_size)
            self._buffers.close(remove=remove, copying=not finished or self._saver.in_progress)
        return not superseded

    def _begin_replication(self, local: Mapping[Unit, LocalUnit], kept: SaveId | None) -> None:
        if not self._disabled:
            self._replication.begin(self._tier, self._session, self._stager.payload_bytes(local), kept)

    def _superseded(self) -> bool:
        """Return whether every layer of a commit is at least as new as all memory holds; False if that is unknown."""
        try:
            newest = newest_whole(Catalog(self._session.files, self._session.catalog.record))
            kept = belonging_to(scan_node(self._tier), self._session.files).versions
            return all(newest is not None and save <= newest.oldest for save in kept)
        except (StoreError, OSError):
            return False

    def _stage(self, save: SaveId, local: Mapping[Unit, LocalUnit], slot: int) -> Version:
        arena = self._buffers.arena
        if arena is None:
            raise StorageError("the memory tier was not begun")
        if self._buffers.single and self._newest is None:
            arena.take_rest(self._group.world_size)  # the only snapshot is replaced, even an earlier job's
        return self._stager.stage(save, local, arena, slot, partial(self._buffers.at, slot))

    def _seal(self, version: Version, keep: SaveId | None) -> float:
        seconds = seal_snapshot(version)
        self._replication.offer(version.loan.arena, version.loan.slot, version.segment.save, keep)
        return seconds

    def _waited(self, seconds: float) -> None:
        self._job.listeners.on_snapshot_copy_wait(seconds)
        self._schedule.stalled(seconds)

    def _collect(self) -> None:
        for done in self._writer.finished():
            if self._pending is not None and done.number == self._pending.number:
                self._outcome = done
                if isinstance(done.error, StorageError):
                    self._failures += 1
                    self._last_problem = str(done.error)

    def _finish(self, pending: _Pending, outcome: TaskResult[float] | None, any_failed: bool) -> None:
        arena = self._buffers.arena
        if outcome is not None and outcome.error is not None:
            message = f"rank {self._group.rank}: no version of step {pending.save.step} in memory: {outcome.error}"
            self._job.listeners.on_background_failure(BackgroundFailureEvent("memory", message, outcome.error))
        elif outcome is not None and outcome.result is not None:
            self._failures = 0
            self._schedule.took(outcome.result)
        if arena is not None and any_failed:
            log_errors(lambda: arena.drop(pending.slot))
        elif arena is not None:
            first = self._newest is None
            self._newest = (pending.slot, pending.save)
            if self._lent is not None and self._lent.save == pending.save:
                self._lent = replace(self._lent, loan=None, whole=True)
            seconds = (outcome.result if outcome else None) or 0.0
            self._job.listeners.on_memory(MemoryEvent(True, self._tier.base, pending.save, seconds))
            if first and self._replication.on:
                self._old_left = True  # until this snapshot is replicated, too
            elif first:
                self._buffers.take_rest(self._group.world_size)
        self._pending = self._outcome = None

    def _drain(self) -> None:
        """Stop writing to memory before a resume looks for snapshots.

        A snapshot that is not finished in time is abandoned; its payload is not reused before it is finished."""
        self._copies.finish()
        joined = self._writer.join(self._job.config.timeouts.close)
        self._replication.break_off()
        self._collect()
        self._copies.set(None)
        if joined:
            self._pending = self._outcome = None
        elif self._pending is not None:
            self._pending = replace(self._pending, abandoned=True)

    def _disable(self, why: str) -> None:
        self._disabled = True
        self._saver.keep_buffers()
        self._job.listeners.on_memory(MemoryEvent(False, self._tier.base))
        if self._group.rank == 0:
            message = f"the memory tier is off, and saves go to the store only: {why}"
            self._job.listeners.on_background_failure(BackgroundFailureEvent("memory", message, severe=True))
        self._replication.stop()
        if self._newest is None:
            self._replication.close(remove=True)
            self._buffers.close(remove=True, copying=self._saver.in_progress)  # a save may be written from it
        else:  # freed by close()
            self._buffers.keep_only(self._newest[0])


def _fail(error: Exception) -> float:
    raise error
