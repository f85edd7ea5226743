"""What rank 0 adds to a version in memory: the manifest that a commit of it would have.

Layers that never move are not kept in memory once they are committed: the manifest points to their version on disk.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime

from monitor.adapters.base import versions_of
from monitor.job import Job
from monitor.saver import Saver
from monitor.units import is_moving
from store.names import FROZEN, RAW, SaveId, Unit
from store.record import digest, seal
from store.schema import ManifestRecord, UnitRecord


class Head:
    """Knows the job's ledger and table; asked by the training thread. Only :meth:`plan` is for all ranks.

    saver: knows of a commit before the ledger does, which moves at decisions alone."""

    def __init__(self, job: Job, saver: Saver) -> None:
        self._job = job
        self._saver = saver
        self._frozen: int | None = None
        self._since: dict[Unit, int] = {}

    def begin(self) -> None:
        """The job stands on what was resumed, or begins: what is frozen is as committed, where it is."""
        self._frozen, self._since = self._trail(), {}

    def seen(self, step: int, saved: Collection[Unit]) -> None:
        """A decision looked at what is frozen; where it had changed it is among ``saved``, which may yet fail."""
        self._frozen = self._trail()
        self._since |= {unit: step for unit in saved if unit.slot == FROZEN}

    def ready(self) -> bool:
        """Whether what is frozen is committed, as it is now: memory does not hold it. Rank 0."""
        if not self._job.table.sizes:
            return False
        frozen = [unit for unit in self._job.table.sizes if unit.slot == FROZEN]
        return not frozen or (self._frozen == self._trail() and all(self._committed(unit) for unit in frozen))

    def plan(self, save: SaveId) -> str:
        """The same on all ranks that keep the same units of the same save."""
        units = [[unit.layer, unit.slot] for unit in self._job.table.sizes if unit.slot != FROZEN]
        return digest(seal([save.name, "memory", units]))

    def manifest(self, save: SaveId, store_id: str) -> ManifestRecord:
        """But for the group of its own segments, and what encodings lost in them: nobody has seen all parts yet."""
        job, ledger = self._job, self._job.ledger
        kept = ledger.kept(save.step, {}, job.table.sizes)
        previous = self._saver.newest
        units = [kept[unit] if unit.slot == FROZEN else self._fresh(unit, save) for unit in job.table.sizes]
        reached = {name for record in units for name in (record.save, *record.bases)}
        return ManifestRecord(
            store_id=store_id,
            step=save.step,
            epoch=save.epoch,
            commits=ledger.commits,
            world_size=job.group.world_size,
            framework=job.adapter.framework,
            policy=job.policy.name,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            previous=previous.name if previous else None,
            bytes_avoided=0,
            layers=job.table.layer_records(),
            tensors=job.table.tensor_records(),
            groups={name: record for name, record in ledger.groups.items() if name in reached},
            units=tuple(units),
        )

    def _committed(self, unit: Unit) -> bool:
        version = self._job.ledger.versions.get(unit)
        return version is not None and version.version.step >= self._since.get(unit, 0)

    def _fresh(self, unit: Unit, save: SaveId) -> UnitRecord:
        size = self._job.table.sizes[unit]
        return UnitRecord(
            layer=unit.layer,
            slot=unit.slot,
            save=save.name,
            encoding=RAW,
            numel=size.numel,
            nbytes=size.nbytes,
            drift=0.0,
            staleness=0,
            moving=is_moving(unit),
            reason="kept in memory",
            members=size.members,
        )

    def _trail(self) -> int:
        """Whatever moves no more may still be changed by the script: what autograd counts of that is seen."""
        frozen = (one for one in self._job.adapter.module.parameters() if not one.requires_grad)
        return versions_of(frozen)
