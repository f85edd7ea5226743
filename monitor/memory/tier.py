"""The memory tier, as the training thread sees it: keep the whole state, exact, every few steps.

Ranks learn through one small reduction, at the next version, whether all of them have the last one; until then the
version before is not touched on any of them, so that there is always one that all have. Nothing here ever reaches
the training loop as an exception: without room, or when memory refuses, the job goes on with the store alone, and says
so. The background thread owns a version's payload from :meth:`MemoryTier.keep` until the version is settled.

Where versions are replicated to other nodes, none begins while one is on its way: so there is always one that all
ranks have both in their own memory and at their peers, unless the last one could not be sent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path

from monitor.background import BackgroundWorker, TaskResult
from monitor.context import JobContext
from monitor.decide.schedule import SnapshotSchedule
from monitor.events import BackgroundFailureEvent, MemoryEvent
from monitor.memory.buffers import SharedMemoryBuffers, trying
from monitor.memory.recovery import MemoryCandidate, find_newest_snapshot, rolled_back_to
from monitor.memory.replication import Replication, ReplicationStatus
from monitor.memory.snapshot import SnapshotManifest, SnapshotStager, Version, seal_snapshot
from monitor.observe.units import LocalUnit
from monitor.save.saver import Saver
from monitor.save.staging import AsyncCopy
from monitor.save.store_session import StoreSession
from store.catalog import Catalog
from store.errors import StorageError, StoreError
from store.memory.cleanup import renew
from store.memory.index import belonging_to, scan_node
from store.memory.layout import Tier
from store.names import SaveId, Unit

_log = logging.getLogger("driftpoint")

_FAILURES = 3
"""Versions in a row that memory refused before no more are tried."""


def memory_tier(job: JobContext, opened: StoreSession | None, saver: Saver | None) -> MemoryTier | None:
    """The memory tier of a job that writes, where its configuration wants one."""
    if opened is None or saver is None or not job.config.memory.enabled:
        return None
    return MemoryTier(job, opened, saver)


@dataclass(frozen=True)
class TierAgreement:
    """How things stand over all ranks. skip: why no version may begin now. changed: some rank's pieces changed."""

    skip: str | None
    changed: bool


@dataclass(frozen=True)
class _Pending:
    number: int
    save: SaveId
    slot: int
    abandoned: bool = False


class MemoryTier:
    """Of one rank. saver: knows which names are taken."""

    def __init__(self, job: JobContext, opened: StoreSession, saver: Saver) -> None:
        settings = job.config.memory
        self._job = job
        self._group = job.group
        self._opened = opened
        self._saver = saver
        self._tier = Tier(Path(settings.path), opened.catalog.store_id)
        self._pace = SnapshotSchedule(settings.every, settings.stall_share)
        self._head = SnapshotManifest(job, saver)
        self._keeper = SnapshotStager(job, opened, self._head, lazy=saver.lazy)
        on_device = any(one.is_cuda for one in job.adapter.module.parameters())
        self._room = SharedMemoryBuffers(settings.versions, pinned=on_device)
        self._writer: BackgroundWorker[float] = BackgroundWorker(f"driftpoint-memory-{job.group.rank}")
        self._pending: _Pending | None = None
        self._outcome: TaskResult[float] | None = None
        self._whole: tuple[int, SaveId] | None = None
        self._peers = Replication(job)
        self._rest = False
        self._refused: str | None = None
        self._failures = 0
        self._copying: AsyncCopy | None = None
        self._off = False
        job.adapter.before_update(self._before_update)

    @property
    def newest(self) -> SaveId | None:
        """The version that all ranks are known to have."""
        return None if self._whole is None else self._whole[1]

    def find(self, catalog: Catalog) -> MemoryCandidate | None:
        """What a resume may use. Collective."""
        self._drain()
        self._peers.meet(self._tier)
        found = find_newest_snapshot(self._tier, catalog, self._job.adapter, self._group, self._peers)
        if found is not None and self._job.config.resume.at == "effective":
            found = rolled_back_to(found, self._group)
        if found is not None:  # however old: the job stands on it until it has a version of its own
            trying(lambda: renew(self._tier, found.save))
        return found

    def begin(self, local: Mapping[Unit, LocalUnit], kept: SaveId | None) -> None:
        """Resumed, or begun anew: take memory, that of earlier incarnations first. Collective.

        kept: the version that the job stands on, which stays until there is a newer one. Without room on any rank
        there is no memory tier on any."""
        if self._room.arena is not None:
            slot = self._room.stand_on(kept)
            self._whole = None if slot is None or kept is None else (slot, kept)
            self._begin_peers(local, kept)
        elif not self._off:
            self._whole = None
            nbytes = self._keeper.needed(local)
            problem = self._room.take(self._tier, self._opened, self._group.rank, nbytes, kept)
            told = self._group.all_gather(problem)
            if any(told):
                self._give_up("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told) if text)[:600])
            else:
                self._begin_peers(local, kept)
            self._job.listeners.on_memory(MemoryEvent(not any(told), self._tier.base))
        self._head.begin()
        self._pace.restart()

    def decided(self, step: int, saved: Collection[Unit]) -> None:
        """A decision was made at ``step``; a save of these units began, if of any. Alike on all ranks."""
        self._head.seen(step, saved)
        if saved and not self._off and self._pace.due(step):
            self._pace.put_off(step)  # a version must not bear the name of a save that is another state

    def due(self, step: int) -> bool:
        """Whether to keep a version of this step. Alike on all ranks."""
        return self._room.arena is not None and not self._off and self._pace.due(step)

    def settle(self, step: int, changed: bool, trouble: bool) -> TierAgreement:
        """Learn what became of the version before, on all ranks. Collective."""
        self._collect()
        pending, outcome = self._pending, self._outcome
        busy = pending is not None and outcome is None
        failed = outcome is not None and outcome.error is not None
        unready = self._group.rank == 0 and not self._head.ready()
        off = self._failures >= _FAILURES
        latest = self.newest if pending is None else pending.save
        sending = self._sending(latest)
        values = [step, -step, busy, failed, changed, trouble, unready, off, *astuple(sending), self._pace.wanted()]
        newest, oldest, *flags, interval = self._group.all_reduce_max(values)
        any_busy, any_failed, any_changed, any_trouble, any_unready, any_off, *sent = (bool(flag) for flag in flags)
        self._pace.agreed(step, interval)
        if any_busy or (any_changed and self._saver.under_way):
            # What a save that is under way is of must stay known until it is settled.
            self._peers.agreed(ReplicationStatus(*sent), None)
            return TierAgreement("busy", any_changed)
        if pending is not None and pending.abandoned:
            self._pending = self._outcome = None
        elif pending is not None:
            self._finish(pending, outcome, any_failed)
        self._peers.agreed(ReplicationStatus(*sent), latest if latest == self.newest else None)
        if sent[0]:
            return TierAgreement("busy", any_changed)
        if self._rest:
            self._take_rest()
        if any_off:
            self._give_up(f"memory refused {_FAILURES} versions in a row: {self._refused or 'on another rank'}")
            return TierAgreement("off", any_changed)
        if any_trouble or newest != -oldest:
            return TierAgreement("unsupported", any_changed)
        return TierAgreement("unready" if any_unready else None, any_changed)

    def keep(self, step: int, local: Mapping[Unit, LocalUnit], began: float) -> None:
        """Stage a version of this step. began: when training began to wait for it (``perf_counter``). Collective."""
        if self._saver.claim_name(step, kept=True) is not None:
            return  # the store is another job's now, or cannot be reached: it is told at the next decision
        self._saver.kept(step)
        save = SaveId(step, self._opened.epoch)
        slot = next((one for one in self._room.slots if self._whole is None or one != self._whole[0]), 0)
        keep = self._peers.standing_on(self.newest if self._whole and self._whole[0] != slot else None)
        self._outcome = None
        try:
            version = self._staged(save, local, slot)
        except Exception as error:  # noqa: BLE001 - the edge to the user's own objects: kept as the version's failure
            self._pending = _Pending(self._writer.submit(_raising(error)), save, slot)
        else:
            self._pending = _Pending(self._writer.submit(lambda: self._remembered(version, keep)), save, slot)
            self._copying = version.copying
        self._pace.stalled(time.perf_counter() - began)

    def close(self, *, remove: bool) -> None:
        """Let go of the memory. remove: nobody will resume from it, even where it is newer than every commit."""
        if not self._writer.join(min(30.0, self._job.config.timeouts.close)):
            _log.warning("the version in memory of this rank is not finished and is given up")
            remove = False
        self._writer.stop()
        remove = remove or (self._room.arena is not None and self._outranked())
        self._peers.close(remove=remove)
        if self._room.arena is not None:
            self._pending = None
            if remove:  # what the job began with may be all that there is
                self._room.take_rest(self._group.world_size)
            self._room.close(remove=remove)

    def _begin_peers(self, local: Mapping[Unit, LocalUnit], kept: SaveId | None) -> None:
        if not self._off:
            self._peers.begin(self._tier, self._opened, self._keeper.needed(local), kept)

    def _outranked(self) -> bool:
        """Whether a commit is as new as what is in memory. What cannot be told is not."""
        try:
            newest = max(self._opened.catalog.saves(), default=None)
            kept = belonging_to(scan_node(self._tier), self._opened.files).versions
            return newest is not None and all(save <= newest for save in kept)
        except (StoreError, OSError):
            return False

    def _staged(self, save: SaveId, local: Mapping[Unit, LocalUnit], slot: int) -> Version:
        arena = self._room.arena
        if arena is None:
            raise StorageError("the memory tier was not begun")
        if self._room.single and self._whole is None:
            arena.take_rest(self._group.world_size)  # the one that there is gets replaced, also an earlier job's
        return self._keeper.staged(save, local, arena, slot, partial(self._room.at, slot))

    def _remembered(self, version: Version, keep: SaveId | None) -> float:
        """The background thread's work on a version."""
        seconds = seal_snapshot(version)
        self._peers.offer(version.arena, version.slot, version.save, keep)
        return seconds

    def _sending(self, latest: SaveId | None) -> ReplicationStatus:
        sending, took = self._peers.sending(latest)
        for seconds in took:
            self._pace.sent(seconds)
        return sending

    def _take_rest(self) -> None:
        """Nobody goes back to what earlier incarnations left, and nothing is on its way to a peer."""
        self._room.take_rest(self._group.world_size)
        self._rest = not self._peers.take_rest()

    def copied(self) -> None:
        """Have the copies of the version under way made, whoever makes them."""
        if self._copying is not None:
            self._copying.finish()

    def _before_update(self) -> None:
        """An optimizer step is about to change the state: what is not copied yet must be waited for."""
        copying, self._copying = self._copying, None
        if copying is not None:
            began = time.perf_counter()
            copying.finish()
            waited = time.perf_counter() - began
            self._job.listeners.on_snapshot_copy_wait(waited)
            self._pace.stalled(waited)

    def _collect(self) -> None:
        for done in self._writer.finished():
            if self._pending is not None and done.number == self._pending.number:
                self._outcome = done
                if isinstance(done.error, StorageError):
                    self._failures += 1
                    self._refused = str(done.error)

    def _finish(self, pending: _Pending, outcome: TaskResult[float] | None, any_failed: bool) -> None:
        arena = self._room.arena
        if outcome is not None and outcome.error is not None:
            message = f"rank {self._group.rank}: no version of step {pending.save.step} in memory: {outcome.error}"
            self._job.listeners.on_background_failure(BackgroundFailureEvent("memory", message, outcome.error))
        elif outcome is not None and outcome.result is not None:
            self._failures = 0
            self._pace.took(outcome.result)
        if arena is not None and any_failed:
            trying(lambda: arena.drop(pending.slot))
        elif arena is not None:
            first = self._whole is None
            self._whole = (pending.slot, pending.save)
            seconds = (outcome.result if outcome else None) or 0.0
            self._job.listeners.on_memory(MemoryEvent(True, self._tier.base, pending.save, seconds))
            if first and self._peers.on:
                self._rest = True  # once this one is at its peers, too
            elif first:
                self._room.take_rest(self._group.world_size)
        self._pending = self._outcome = None

    def _drain(self) -> None:
        """Nothing is being written to memory any more, on any rank, when versions are looked for.

        What is not finished in time is nobody's version, but its payload is not written to before it is."""
        if self._copying is not None:
            self._copying.finish()
        joined = self._writer.join(self._job.config.timeouts.close)
        self._peers.break_off()
        self._collect()
        self._copying = None
        if joined:
            self._pending = self._outcome = None
        elif self._pending is not None:
            self._pending = replace(self._pending, abandoned=True)

    def _give_up(self, why: str) -> None:
        self._off = True
        self._job.listeners.on_memory(MemoryEvent(False, self._tier.base))
        if self._group.rank == 0:
            message = f"the memory tier is off, saves go to the store alone: {why}"
            self._job.listeners.on_background_failure(BackgroundFailureEvent("memory", message, severe=True))
        self._peers.stop()
        if self._whole is None:
            self._peers.close(remove=True)
            self._room.close(remove=True)
        else:  # close() gives it back
            self._room.keep_only(self._whole[0])


def _raising(error: Exception) -> Callable[[], float]:
    def fail() -> float:
        raise error

    return fail
