"""A tiny training job that saves and prunes through the store's public functions only.

Two ranks, six units (:mod:`models`), saved in turn, so most commits are composites. Every value follows from
(name, slot, save), so whoever reads the store can say what must be there. Whatever the job is told (a commit
that returned, a prune about to start) goes to a journal outside the store. Ranks write one after the other.

Of the varied model each incarnation stores a unit whole twice, then as differences to the second of them, twice, and
so on: what is lost with a base has an older version that does not rest on it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from store.catalog import Catalog, open_catalog, open_or_create
from store.commit import Expected, Group, commit, hint_latest, mark_proven, wait_for_group
from store.encoding import ENCODINGS
from store.encoding.base import Bytes
from store.encoding.stream import EncodedEntry, Packing
from store.errors import NothingToResumeError
from store.names import SaveId, Unit
from store.resolve import Resolution, newest_resumable
from store.retention import Retention, execute, plan_prune
from store.schema import GroupRecord, LayerRecord, ManifestRecord, TensorRecord, UnitRecord
from store.segment import SegmentDraft, StagedFragment, write_segment
from store.session import claim_epoch
from store.state_tree import encode
from store.storage.local import Files
from tests.crash.models import PLAIN, RANKS, Model, content, encoding_of, piece, values
from tests.support.reference_encodings import encode_chunk

STEPS = 10
PLAN = "0" * 32
RETENTION = Retention(keep_last=2, log_spaced=False)


class Journal(Protocol):
    """Where the job writes down what it was told."""

    def note(self, event: str, **facts: Any) -> None: ...


class Memory:
    """A journal in memory. ``position`` stamps each event, with the length of an operation log for example."""

    def __init__(self, position: Callable[[], int] = lambda: 0) -> None:
        self.events: list[dict[str, Any]] = []
        self._position = position

    def note(self, event: str, **facts: Any) -> None:
        self.events.append({"event": event, "at": self._position(), **facts})


class Paper:
    """A journal in a file outside the store: one line an event, in the page cache when :meth:`note` returns."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, event: str, **facts: Any) -> None:
        # writev: faults that a test injects into write() must not hit the journal.
        os.writev(self._descriptor, [(json.dumps({"event": event, **facts}) + "\n").encode()])

    @staticmethod
    def read(path: Path) -> list[dict[str, Any]]:
        """All whole lines."""
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]


def run_state(save: SaveId, rank: int) -> dict[str, Any]:
    """What rank keeps besides the tensors."""
    words = np.frombuffer(hashlib.shake_128(f"{rank}/{save}".encode()).digest(12), dtype="<u4")
    return {"step": save.step, "rng": (rank, words), "loss": float("inf")}


@dataclass(frozen=True)
class Save:
    """One save in the making."""

    id: SaveId
    units: tuple[Unit, ...]


class Job:
    """One incarnation of the job, resumed from whatever the store gives."""

    def __init__(self, files: Files, journal: Journal, model: Model = PLAIN) -> None:
        self.files = files
        self.journal = journal
        self.model = model
        self.chains: dict[Unit, tuple[SaveId, ...]] = {}
        """The newest save of a unit, and those that it needs."""
        self.count = dict.fromkeys(model.units, 0)
        """How often this incarnation committed a unit."""
        self.catalog: Catalog = open_or_create(files)
        self.epoch = claim_epoch(files, self.catalog.store_id).epoch
        journal.note("claimed", epoch=self.epoch)
        self.resumed: Resolution | None = _resume(self.catalog)
        self.last: ManifestRecord | None = self.resumed.manifest if self.resumed else None
        self.groups = dict(self.last.groups) if self.last else {}
        self.again = {v.record.unit for v in self.resumed.fallbacks} if self.resumed else set()

    def save(self, everything: bool = False) -> SaveId:
        """Segments of all ranks, commit, hint."""
        draft = self.plan(everything)
        for rank in range(RANKS):
            self.write(draft, rank)
        self.commit(draft)
        hint_latest(self.files, draft.id)
        return draft.id

    def plan(self, everything: bool = False) -> Save:
        """The next save: everything at first, then units in turn; a unit that fell back is saved again at once."""
        if self.last is None:
            return Save(SaveId(STEPS, self.epoch), self.model.units)
        turn = self.last.commits % 2
        chosen = {unit for i, unit in enumerate(self.model.units) if everything or i % 2 == turn or unit in self.again}
        units = tuple(unit for unit in self.model.units if unit in chosen)
        return Save(SaveId(self.last.step + STEPS, self.epoch), units)

    def write(self, save: Save, rank: int) -> None:
        """One rank's segment."""
        tree, leaves = encode(run_state(save.id, rank), lambda _: None)
        draft = SegmentDraft(
            self.catalog.store_id, save.id, rank, RANKS, PLAN, self._fragments(save, rank), tree, leaves, {}
        )
        write_segment(self.files, draft)

    def commit(self, save: Save) -> None:
        """Wait for the segments and commit; the journal learns of it when the call returned."""
        expected = Expected(self.catalog.store_id, save.id, RANKS, PLAN)
        manifest = self._manifest(save, wait_for_group(self.files, expected, timeout=0))
        commit(self.files, manifest)
        self.journal.note("acknowledged", save=save.id.name, units={str(u.unit): u.save for u in manifest.units})
        self.last, self.again = manifest, set()
        self.groups |= manifest.groups
        for unit in save.units:
            self.chains[unit] = (save.id, *(self.chains[unit] if self.base_of(unit) is not None else ()))
            self.count[unit] += 1

    def base_of(self, unit: Unit) -> SaveId | None:
        """What the next version of a unit is the difference to."""
        return self.chains[unit][0] if self.model.varied and self.count[unit] % 4 >= 2 else None

    def bases_of(self, unit: Unit) -> tuple[str, ...]:
        """What the next version of a unit needs. Only a mutant leaves some out."""
        return tuple(save.name for save in self.chains[unit]) if self.base_of(unit) is not None else ()

    def base_named(self, unit: Unit) -> SaveId | None:
        """What the store is told of it. Only a mutant tells a lie."""
        return self.base_of(unit)

    def prune(self) -> None:
        """Drop what retention does not keep."""
        plan = plan_prune(open_catalog(self.files), RETENTION)
        assert plan.blocked is None, plan.blocked
        assert plan.unrecognised == (), plan.unrecognised
        self.journal.note("dropping", saves=[save.name for save in plan.manifests])
        execute(self.files, plan)

    def prove(self) -> None:
        """Mark the newest commit as one that a job resumed from."""
        assert self.last is not None
        mark_proven(self.files, self.catalog.store_id, self.last.save, self.epoch)
        self.journal.note("proven", save=self.last.save.name)

    def _manifest(self, save: Save, group: Group) -> ManifestRecord:
        units = tuple(self._unit(save, unit, group) for unit in self.model.units)
        known: Mapping[str, GroupRecord] = {**self.groups, save.id.name: group.record}
        return ManifestRecord(
            store_id=self.catalog.store_id,
            step=save.id.step,
            epoch=save.id.epoch,
            commits=self.last.commits + 1 if self.last else 1,
            world_size=RANKS,
            framework="none",
            policy="parity",
            created="2000-01-01T00:00:00+00:00",
            previous=self.last.save.name if self.last else None,
            bytes_avoided=0,
            layers=tuple(LayerRecord(name=name, block="." in name) for name in dict.fromkeys(u.layer for u in units)),
            tensors={
                fqn: TensorRecord(layer=layer, shape=(numel,), dtype="F32", kind="trainable")
                for fqn, (layer, numel) in self.model.tensors.items()
            },
            groups={name: known[name] for unit in units for name in (unit.save, *unit.bases)}
            | {save.id.name: group.record},
            units=units,
        )

    def _unit(self, save: Save, unit: Unit, group: Group) -> UnitRecord:
        if unit not in save.units:
            assert self.last is not None
            old = next(u for u in self.last.units if u.unit == unit)
            return old.replace(staleness=save.id.step - old.version.step)
        stored = [entry for part in group.parts for entry in part.entries if entry.unit == unit]
        return UnitRecord(
            layer=unit.layer, slot=unit.slot, save=save.id.name, encoding=encoding_of(unit),
            numel=sum(entry.numel for entry in stored), nbytes=sum(entry.nbytes for entry in stored),
            drift=0.0, staleness=0, moving=True, bases=self.bases_of(unit),
        )  # fmt: skip

    def _fragments(self, save: Save, rank: int) -> list[StagedFragment]:
        found = []
        for unit in save.units:
            for fqn, (layer, _) in self.model.tensors.items():
                start, numel = piece(fqn, rank)
                if layer == unit.layer and numel:
                    data = self._data(save, rank, unit, fqn)
                    encoding = encoding_of(unit)
                    found.append(StagedFragment(layer, unit.slot, fqn, start, numel, "F32", encoding, data))
        return found

    def _data(self, save: Save, rank: int, unit: Unit, fqn: str) -> bytes | EncodedEntry:
        start, numel = piece(fqn, rank)
        if not self.model.varied:
            return content(fqn, unit.slot, save.id)[4 * start : 4 * (start + numel)]
        encoding, base, named = ENCODINGS[encoding_of(unit)], self.base_of(unit), self.base_named(unit)

        def chunks(of: SaveId = save.id) -> list[Bytes]:
            return [encode_chunk(encoding, values(fqn, unit.slot, of, rank))]

        packing = None
        if base is not None:
            packing = Packing(1, chunks(base))
        elif (self.model.units.index(unit) + self.count[unit]) % 2:
            packing = Packing(1)
        return EncodedEntry(encoding, numel, "F32", chunks, packing, () if named is None else (named.name,))


def run(files: Files, journal: Journal, saves: int = 5, model: Model = PLAIN) -> None:
    """Several saves with a prune after each from the third on; the first commit is proven; then a second job."""
    first = Job(files, journal, model)
    for number in range(saves):
        first.save()
        if number == 0:
            first.prove()
        if number >= 2:
            first.prune()
    second = Job(files, journal, model)
    second.prove()
    second.save()
    second.prune()


def _resume(catalog: Catalog) -> Resolution | None:
    try:
        return newest_resumable(catalog)[0]
    except NothingToResumeError:
        assert catalog.saves() == []
        return None
