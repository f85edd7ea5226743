"""The memory tier, as the training thread sees it: keep the whole state, exact, every few steps.

Ranks learn through one small reduction, at the next version, whether all of them have the last one; until then the
version before is not touched on any of them, so that there is always one that all have. Nothing here ever reaches
the training loop as an exception: without room, or when memory refuses, the job goes on with the store alone, and says
so. The background thread owns a version's payload from :meth:`MemoryTier.keep` until the version is settled.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from monitor.heading import Head
from monitor.job import Job
from monitor.opened import OpenedStore
from monitor.pacing_memory import MemoryPace
from monitor.pinning import Pins
from monitor.remembered import Remembered, newest_remembered
from monitor.remembering import Laid, RunState, Version, fragments_bytes, lay_out, remember
from monitor.run_state import captured, to_tree
from monitor.saver import Saver
from monitor.staging import Copying
from monitor.units import LocalUnit
from monitor.writer import Done, Writer
from store.catalog import Catalog
from store.errors import DriftpointError, StorageError, StoreError
from store.memory.arena import Arena
from store.memory.cleaning import clear_old, renew
from store.memory.held import look
from store.memory.tier import Tier
from store.names import BUFFER, FROZEN, SaveId, Unit

_log = logging.getLogger("driftpoint")

_MARGIN = 1 << 20
"""Bytes of a payload that are reserved beyond what its first version needs: the run state may grow a little."""

_FAILURES = 3
"""Versions in a row that memory refused before no more are tried."""


def memory_tier(job: Job, opened: OpenedStore | None, saver: Saver | None) -> MemoryTier | None:
    """The memory tier of a job that writes, where its configuration wants one."""
    if opened is None or saver is None or not job.config.memory.enabled:
        return None
    return MemoryTier(job, opened, saver)


@dataclass(frozen=True)
class Agreed:
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

    def __init__(self, job: Job, opened: OpenedStore, saver: Saver) -> None:
        settings = job.config.memory
        self._job = job
        self._group = job.group
        self._opened = opened
        self._saver = saver
        self._tier = Tier(Path(settings.path), opened.catalog.store_id)
        self._versions = settings.versions
        self._pace = MemoryPace(settings.every, settings.stall_share)
        self._encodings = job.config.memory_encodings()
        self._head = Head(job)
        self._arena: Arena | None = None
        self._pins = Pins()
        self._on_device = any(one.is_cuda for one in job.adapter.module.parameters())
        self._writer: Writer[float] = Writer(f"driftpoint-memory-{job.group.rank}")
        self._pending: _Pending | None = None
        self._outcome: Done[float] | None = None
        self._whole: tuple[int, SaveId] | None = None
        self._refused: str | None = None
        self._failures = 0
        self._copying: Copying | None = None
        self._off = False
        job.adapter.before_update(self._before_update)

    @property
    def newest(self) -> SaveId | None:
        """The version that all ranks are known to have."""
        return None if self._whole is None else self._whole[1]

    def find(self, catalog: Catalog) -> Remembered | None:
        """What a resume may use. Collective."""
        self._drain()
        found = newest_remembered(self._tier, catalog, self._job.adapter, self._group)
        if found is not None:  # however old: the job stands on it until it has a version of its own
            _trying(lambda: renew(self._tier, found.save))
        return found

    def begin(self, local: Mapping[Unit, LocalUnit], kept: SaveId | None) -> None:
        """Resumed, or begun anew: take memory, that of earlier incarnations first. Collective.

        kept: the version that the job stands on, which stays until there is a newer one. Without room on any rank
        there is no memory tier on any."""
        if self._arena is not None:
            # What else there is, is of steps that the job has just gone back behind.
            slot = None if kept is None else self._arena.holding(kept)
            self._whole = None if slot is None or kept is None else (slot, kept)
            arena = self._arena
            for other in (one for one in arena.slots if one != slot):
                _trying(lambda other=other: arena.drop(other))  # type: ignore[misc]
        elif not self._off:
            self._whole = None
            problem = self._opened_arena(local, kept)
            told = self._group.gather(problem)
            if any(told):
                self._give_up("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told) if text)[:600])
            self._show_room(on=not any(told))

        self._head.begin()
        self._pace.restart()

    def decided(self, step: int, saved: Collection[Unit]) -> None:
        """A decision was made at ``step``; a save of these units began, if of any. Alike on all ranks."""
        self._head.seen(step, saved)
        if saved and not self._off and self._pace.due(step):
            self._pace.put_off(step)  # a version must not bear the name of a save that is another state

    def due(self, step: int) -> bool:
        """Whether to keep a version of this step. Alike on all ranks."""
        return self._arena is not None and not self._off and self._pace.due(step)

    def settle(self, step: int, changed: bool, trouble: bool) -> Agreed:
        """Learn what became of the version before, on all ranks. Collective."""
        self._collect()
        pending, outcome = self._pending, self._outcome
        busy = pending is not None and outcome is None
        failed = outcome is not None and outcome.error is not None
        unready = self._group.rank == 0 and not self._head.ready()
        off = self._failures >= _FAILURES
        wanted = self._pace.wanted()
        values = [step, -step, busy, failed, changed, trouble, unready, off, wanted]
        newest, oldest, *flags, interval = self._group.largest(values)
        any_busy, any_failed, any_changed, any_trouble, any_unready, any_off = (bool(flag) for flag in flags)
        self._pace.agreed(step, interval)
        if any_busy or (any_changed and self._saver.under_way):
            # What a save that is under way is of must stay known until it is settled.
            return Agreed("busy", any_changed)
        if pending is not None and pending.abandoned:
            self._pending = self._outcome = None
        elif pending is not None:
            self._finish(pending, outcome, any_failed)
        if any_off:
            self._give_up(f"memory refused {_FAILURES} versions in a row: {self._refused or 'on another rank'}")
            return Agreed("off", any_changed)
        if any_trouble or newest != -oldest:
            return Agreed("unsupported", any_changed)
        return Agreed("unready" if any_unready else None, any_changed)

    def keep(self, step: int, local: Mapping[Unit, LocalUnit], began: float) -> None:
        """Stage a version of this step. began: when training began to wait for it (``perf_counter``). Collective."""
        if self._saver.claim_name(step, kept=True) is not None:
            return  # the store is another job's now, or cannot be reached: it is told at the next decision
        self._saver.kept(step)
        save = SaveId(step, self._opened.epoch)
        kept = {unit: part for unit, part in local.items() if unit.slot != FROZEN}
        slot = next((one for one in self._slots() if self._whole is None or one != self._whole[0]), 0)
        self._outcome = None
        try:
            version = self._staged(save, kept, slot)
        except Exception as error:  # noqa: BLE001 - the edge to the user's own objects: kept as the version's failure
            if isinstance(error, StorageError):
                self._failures += 1
                self._refused = str(error)
            self._pending = _Pending(self._writer.submit(_raising(error)), save, slot)
        else:
            self._pending = _Pending(self._writer.submit(lambda: remember(version)), save, slot)
            self._copying = version.copying
        self._pace.stalled(time.perf_counter() - began)

    def close(self, *, remove: bool) -> None:
        """Let go of the memory. remove: nobody will resume from it, even where it is newer than every commit."""
        if not self._writer.join(min(30.0, self._job.config.timeouts.close)):
            _log.warning("the version in memory of this rank is not finished and is given up")
            remove = False
        self._writer.stop()
        if self._arena is not None:
            self._pending = None
            self._pins.release()
            arena, self._arena = self._arena, None
            remove = remove or self._outranked()
            if remove:  # what the job began with may be all that there is
                _trying(lambda: arena.take_rest(self._group.world_size))
            _trying(lambda: arena.close(remove=remove))

    def _opened_arena(self, local: Mapping[Unit, LocalUnit], kept: SaveId | None) -> str | None:
        _trying(lambda: clear_old(self._tier.base))  # on every node
        try:
            self._arena = Arena(self._tier, self._opened.epoch, self._group.rank, self._versions)
            self._arena.take_over(kept)
            nbytes = self._needed({unit: part for unit, part in local.items() if unit.slot != FROZEN})
            # With an older version to keep, the last payload is that one's, once it is not needed any more.
            for slot in self._arena.slots[: -1 if kept is not None else None]:
                self._room(self._arena, slot, nbytes)
        except (StorageError, OSError) as error:
            return str(error)
        return None

    def _outranked(self) -> bool:
        """Whether a commit is as new as what is in memory. What cannot be told is not."""
        try:
            newest = max(self._opened.catalog.saves(), default=None)
            return newest is not None and all(save <= newest for save in look(self._tier).versions)
        except (StoreError, OSError):
            return False

    def _slots(self) -> tuple[int, ...]:
        return () if self._arena is None else self._arena.slots

    def _room(self, arena: Arena, slot: int, nbytes: int) -> mmap.mmap:
        memory = arena.room(slot, nbytes)
        if self._on_device:
            self._pins.pin(memory)
        return memory

    def _needed(self, local: Mapping[Unit, LocalUnit]) -> int:
        return fragments_bytes(local, self._encodings) + _MARGIN

    def _staged(self, save: SaveId, local: Mapping[Unit, LocalUnit], slot: int) -> Version:
        arena = self._arena
        if arena is None:
            raise StorageError("the memory tier was not begun")
        if self._versions == 1 and self._whole is None:
            arena.take_rest(self._group.world_size)  # the one that there is gets replaced, also an earlier job's
        tree, leaves = to_tree(captured(self._job.adapter, self._job.user, self._group.rank))
        run = RunState(tree, leaves)
        room = partial(self._room, arena, slot)
        laid, end = lay_out(local, self._encodings, room, max(run.nbytes, _MARGIN))
        copying = self._begun(laid)
        first = self._group.rank == 0
        return Version(
            arena=arena,
            slot=slot,
            save=save,
            store_id=self._opened.catalog.store_id,
            claim=self._opened.token,
            rank=self._group.rank,
            world_size=self._group.world_size,
            plan=self._head.plan(save),
            laid=laid,
            fragments_end=end,
            run=run,
            facts=self._job.adapter.layout_facts() if first else {},
            head=self._head.manifest(save, self._opened.catalog.store_id) if first else None,
            copying=copying,
        )

    def _begun(self, laid: Sequence[Laid]) -> Copying:
        """The copies: buffers' at once, since a forward may change them, the others' at once or beside training."""
        copying, now = Copying(), Copying()
        for one in laid:
            if one.encoded is not None:
                copying.add_encoded([one.encoded])
            else:
                (now if one.unit.slot == BUFFER else copying).add([one.source], [one.copy])
        now.start()
        now.finish()
        copying.start()
        if not self._saver.lazy:
            copying.finish()
        return copying

    def _before_update(self) -> None:
        """An optimizer step is about to change the state: what is not copied yet must be waited for."""
        copying, self._copying = self._copying, None
        if copying is not None:
            began = time.perf_counter()
            copying.finish()
            waited = time.perf_counter() - began
            self._job.metrics.copy_wait.observe(waited)
            self._pace.stalled(waited)

    def _collect(self) -> None:
        for done in self._writer.finished():
            if self._pending is not None and done.number == self._pending.number:
                self._outcome = done

    def _finish(self, pending: _Pending, outcome: Done[float] | None, any_failed: bool) -> None:
        arena = self._arena
        if outcome is not None and outcome.error is not None:
            self._tell_failed(pending.save, outcome.error)
        elif outcome is not None and outcome.result is not None:
            self._failures = 0
            self._pace.took(outcome.result)
        if arena is not None and any_failed:
            _trying(lambda: arena.drop(pending.slot))
        elif arena is not None:
            first = self._whole is None
            self._whole = (pending.slot, pending.save)
            self._job.daemon.remembered(pending.save)
            if self._group.rank == 0:
                self._job.metrics.remembered(pending.save.step, (outcome.result if outcome else None) or 0.0)
                self._show_room(on=True)
            if first:
                _trying(lambda: arena.take_rest(self._group.world_size))
        self._pending = self._outcome = None

    def _drain(self) -> None:
        """Nothing is being written to memory any more, on any rank, when versions are looked for.

        What is not finished in time is nobody's version, but its payload is not written to before it is."""
        if self._copying is not None:
            self._copying.finish()
        joined = self._writer.join(self._job.config.timeouts.close)
        self._collect()
        self._copying = None
        if joined:
            self._pending = self._outcome = None
        elif self._pending is not None:
            self._pending = replace(self._pending, abandoned=True)

    def _tell_failed(self, save: SaveId, error: BaseException) -> None:
        expected = isinstance(error, DriftpointError)
        self._job.metrics.failures.labels("memory").inc()
        _log.warning(
            "rank %d: no version of step %d in memory: %s",
            self._group.rank,
            save.step,
            error,
            exc_info=None if expected else error,
        )

    def _show_room(self, *, on: bool) -> None:
        if self._group.rank == 0:
            self._job.metrics.memory_on.set(on)
            self._job.metrics.memory_room.look(self._tier.base)

    def _give_up(self, why: str) -> None:
        self._off = True
        self._show_room(on=False)
        if self._group.rank == 0:
            self._job.metrics.failures.labels("memory").inc()
            _log.error("the memory tier is off, saves go to the store alone: %s", why)
        arena, whole = self._arena, self._whole
        self._pins.release()
        if arena is not None and whole is None:
            self._arena = None
            _trying(lambda: arena.close(remove=True))
        elif arena is not None and whole is not None:  # still the newest state, maybe; close() gives it back
            for slot in (one for one in arena.slots if one != whole[0]):
                _trying(lambda slot=slot: arena.give_back(slot))  # type: ignore[misc]


def _trying(action: Callable[[], object]) -> None:
    """Do what need not succeed, and say if it did not."""
    try:
        action()
    except (StorageError, OSError) as error:
        _log.warning("memory: %s", error)


def _raising(error: Exception) -> Callable[[], float]:
    def fail() -> float:
        raise error

    return fail
