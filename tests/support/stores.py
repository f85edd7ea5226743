"""Builds small real stores with the store's own API: ranks, layers, slots, several saves, composites, restarts.

    store = StoreBuilder(tmp_path / "store", world_size=2)
    store.save(10)                                          # everything
    store.save(20, slots=("fp32",), drift=0.01)             # a composite: moments stay at step 10
    store.restart()                                         # the next epoch
    store.save(30, layers=("layers.0",))
    store.save(40, how={"fp32": How("bf16", level=1)})      # encoded and packed
    store.save(50, how={"fp32": How("bf16", level=1, base=store.newest)})

What is stored is a function of unit, step and element (:meth:`StoreBuilder.values`), so that any reader can be
checked against it: :meth:`StoreBuilder.decoded` is what it gives back. Run state is a plain dict; no framework could
resume from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from store.catalog import open_catalog, open_or_create
from store.commit import Expected, Group, commit, hint_latest, mark_proven, wait_for_group
from store.encoding import encoding_named
from store.encoding.base import Bytes
from store.encoding.stream import EncodedEntry, Packing
from store.names import BUFFER, FROZEN, RAW, WEIGHTS, SaveId, Unit, manifest_path, payload_path
from store.schema import GroupRecord, LayerRecord, ManifestRecord, TensorRecord, UnitRecord
from store.segment import Data, SegmentDraft, StagedFragment, write_segment
from store.session import claim_epoch
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.entries import iter_chunks
from tests.support.reference_encodings import encode_chunk

SLOTS = (WEIGHTS, "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class FakeLayer:
    """A layer of one parameter of ``numel`` elements; a frozen one has the slot ``frozen`` and nothing else."""

    name: str
    numel: int = 64
    block: bool = True
    frozen: bool = False
    buffer: bool = False

    @property
    def fqn(self) -> str:
        return f"{self.name}.weight"


@dataclass(frozen=True)
class How:
    """How to store a unit. level: zstd's, None where it is not packed. base: the save to take the difference to, where
    the unit must be stored with the same encoding, and by itself."""

    encoding: str = RAW
    level: int | None = None
    base: SaveId | None = None


PLAIN = How()


def transformer(blocks: int, numel: int = 64) -> tuple[FakeLayer, ...]:
    """Embeddings, so many blocks, a norm and a head."""
    return (
        FakeLayer("embed_tokens", 2 * numel, block=False),
        *(FakeLayer(f"layers.{i}", numel) for i in range(blocks)),
        FakeLayer("norm", 8, block=False),
        FakeLayer("lm_head", 2 * numel, block=False),
    )


class StoreBuilder:
    """One job after the other on one store. ``restart`` begins the next epoch."""

    def __init__(
        self,
        root: Path,
        *,
        layers: Sequence[FakeLayer] | int = 3,
        slots: Sequence[str] = SLOTS,
        world_size: int = 2,
        framework: str = "deepspeed",
        policy: str = "full",
    ) -> None:
        self.root = root
        self.files = LocalFiles(root)
        self.store_id = open_or_create(self.files).store_id
        self.layers = transformer(layers) if isinstance(layers, int) else tuple(layers)
        self.slots = tuple(slots)
        self.world_size = world_size
        self.framework = framework
        self.policy = policy
        self.created = "2025-03-01T12:00:00+00:00"
        self.commits = 0
        self.newest: SaveId | None = None
        self._how: dict[tuple[Unit, int], How] = {}
        self._written: dict[Unit, int] = {}
        self._versions: dict[Unit, UnitRecord] = {}
        self._groups: dict[str, GroupRecord] = {}
        self.restart()

    @property
    def units(self) -> tuple[Unit, ...]:
        """Every unit of the model, in layer order."""
        return tuple(Unit(layer.name, slot) for layer in self.layers for slot in self._slots_of(layer))

    def restart(self) -> int:
        """Claim the next epoch; returns it."""
        self.epoch = claim_epoch(self.files, self.store_id).epoch
        return self.epoch

    def save(
        self,
        step: int,
        *,
        layers: Iterable[str] | None = None,
        slots: Iterable[str] | None = None,
        drift: float | Mapping[Unit, float | None] | Callable[[Unit], float | None] = 0.01,
        reason: str = "its turn",
        how: Mapping[str, How] | How = PLAIN,
        differs: tuple[str, ...] = (),
    ) -> SaveId:
        """Write and commit a save of the units of ``layers`` and ``slots`` (None: all of them).

        ``drift`` is that of moving units that this save leaves out. What has no version yet is always written. how: to
        store what is written, by slot; slots that are not named are stored as they are. differs: why it is not
        exact.
        """
        save = SaveId(step, self.epoch)
        wanted = self._wanted(layers, slots)
        for unit in wanted:
            self._how[unit, step] = how if isinstance(how, How) else how.get(unit.slot, PLAIN)
        group = self.write(save, wanted)
        self._written = {}
        for part in group.parts:
            for entry in part.entries:
                self._written[entry.unit] = self._written.get(entry.unit, 0) + entry.nbytes
        records = [self._record(unit, save, unit in wanted, drift, reason) for unit in self.units]
        reached = {name for record in records for name in (record.save, *record.bases)}
        groups = {name: record for name, record in self._groups.items() if name in reached}
        manifest = self._manifest(save, records, {**groups, save.name: group.record}).replace(differs=differs)
        commit(self.files, manifest)
        hint_latest(self.files, save)
        self._versions = {record.unit: record for record in records}
        self._groups |= manifest.groups
        self.commits, self.newest = manifest.commits, save
        return save

    def write(self, save: SaveId, units: Iterable[Unit]) -> Group:
        """Write all ranks' segments and commit nothing: what a job that dies before its commit leaves."""
        plan = hashlib.md5(save.name.encode()).hexdigest()
        wanted = frozenset(units)
        for rank in range(self.world_size):
            draft = SegmentDraft(
                store_id=self.store_id,
                save=save,
                rank=rank,
                world_size=self.world_size,
                plan=plan,
                fragments=self._fragments(save.step, rank, wanted),
                run_state={"step": save.step},
                run_leaves=(),
                facts={},
            )
            write_segment(self.files, draft)
        return wait_for_group(self.files, Expected(self.store_id, save, self.world_size, plan), timeout=5)

    def prove(self, save: SaveId) -> None:
        """Mark a save as resumed from."""
        mark_proven(self.files, self.store_id, save, self.epoch)

    def values(self, unit: Unit, step: int) -> np.ndarray:
        """All float32 values of a unit as saved at ``step``. Second moments are not negative."""
        layer = next(layer for layer in self.layers if layer.name == unit.layer)
        seed = int.from_bytes(hashlib.sha256(f"{unit}@{step}".encode()).digest()[:8], "little")
        drawn = np.random.default_rng(seed).standard_normal(layer.numel, dtype=np.float32)
        return drawn * drawn if unit.slot == "exp_avg_sq" else drawn

    def how(self, unit: Unit, step: int) -> How:
        """How a unit was stored at ``step``."""
        return self._how.get((unit, step), PLAIN)

    def decoded(self, unit: Unit, step: int) -> np.ndarray:
        """What the version of ``step`` gives back: :meth:`values` after encoding and decoding, rank by rank."""
        values, encoding = self.values(unit, step), encoding_named(self.how(unit, step).encoding)
        cuts = [values.size * rank // self.world_size for rank in range(self.world_size + 1)]
        back = [
            encoding.decode(encode_chunk(encoding, chunk), chunk.size, "F32").view(np.float32)
            for start, stop in pairwise(cuts)
            for chunk in iter_chunks(values[start:stop])
        ]
        return np.concatenate(back)

    def payload(self, save: SaveId, rank: int = 0) -> Path:
        """The file of a rank's payload."""
        return self.root / payload_path(save, rank)

    def manifest(self, save: SaveId) -> Path:
        """The file of a manifest."""
        return self.root / manifest_path(save)

    def _slots_of(self, layer: FakeLayer) -> tuple[str, ...]:
        moving = () if layer.frozen else self.slots
        return (*moving, *([FROZEN] if layer.frozen else []), *([BUFFER] if layer.buffer else []))

    def _wanted(self, layers: Iterable[str] | None, slots: Iterable[str] | None) -> frozenset[Unit]:
        names = None if layers is None else frozenset(layers)
        kinds = None if slots is None else frozenset(slots)
        return frozenset(
            unit
            for unit in self.units
            if unit not in self._versions
            or (
                (names is None or unit.layer in names)
                and (kinds is None or unit.slot in kinds)
                and not (unit.slot == FROZEN and names is None and kinds is None)
            )
        )

    def _fragments(self, step: int, rank: int, wanted: frozenset[Unit]) -> list[StagedFragment]:
        found = []
        for layer in self.layers:
            start = layer.numel * rank // self.world_size
            stop = layer.numel * (rank + 1) // self.world_size
            for slot in self._slots_of(layer):
                unit = Unit(layer.name, slot)
                if unit in wanted and stop > start:
                    encoding = self.how(unit, step).encoding
                    data = self._data(unit, step, start, stop)
                    made = StagedFragment(layer.name, slot, layer.fqn, start, stop - start, "F32", encoding, data)
                    found.append(made)
        return found

    def _data(self, unit: Unit, step: int, start: int, stop: int) -> Data:
        how = self.how(unit, step)
        if how == PLAIN:
            return self.values(unit, step)[start:stop].tobytes()
        base = None if how.base is None else self._encoded(unit, how.base.step, start, stop)
        packing = None if how.level is None else Packing(how.level, base)
        return EncodedEntry(
            encoding_named(how.encoding),
            stop - start,
            "F32",
            partial(self._encoded, unit, step, start, stop),
            packing,
            () if how.base is None else (how.base.name,),
        )

    def _encoded(self, unit: Unit, step: int, start: int, stop: int) -> list[Bytes]:
        """The encoded chunks of a fragment."""
        encoding = encoding_named(self.how(unit, step).encoding)
        return [encode_chunk(encoding, chunk) for chunk in iter_chunks(self.values(unit, step)[start:stop])]

    def _error(self, unit: Unit, step: int) -> float:
        if encoding_named(self.how(unit, step).encoding).lossless:
            return 0.0
        values, decoded = self.values(unit, step), self.decoded(unit, step)
        norm = float(np.linalg.norm(decoded.astype(np.float64)))
        return float(np.linalg.norm(values.astype(np.float64) - decoded)) / norm if norm else 0.0

    def _record(
        self,
        unit: Unit,
        save: SaveId,
        written: bool,
        drift: float | Mapping[Unit, float | None] | Callable[[Unit], float | None],
        reason: str,
    ) -> UnitRecord:
        layer = next(layer for layer in self.layers if layer.name == unit.layer)
        moving = unit.slot != FROZEN
        if not written:
            before = self._versions[unit]
            age = save.step - before.version.step
            moved = _drift_of(unit, drift) if moving else 0.0
            return before.replace(drift=moved, staleness=age, reason="")
        how, error = self.how(unit, save.step), self._error(unit, save.step)
        return UnitRecord(
            layer=unit.layer,
            slot=unit.slot,
            save=save.name,
            encoding=how.encoding,
            numel=layer.numel,
            nbytes=self._written.get(unit, 0),
            drift=error,
            error=error,
            bases=() if how.base is None else (how.base.name,),
            staleness=0,
            moving=moving,
            reason=reason,
        )

    def _manifest(
        self, save: SaveId, records: Sequence[UnitRecord], groups: Mapping[str, GroupRecord]
    ) -> ManifestRecord:
        written = sum(record.nbytes for record in records if record.save == save.name)
        return ManifestRecord(
            store_id=self.store_id,
            step=save.step,
            epoch=save.epoch,
            commits=self.commits + 1,
            world_size=self.world_size,
            framework=self.framework,
            policy=self.policy,
            created=self.created,
            previous=self.newest.name if self.newest else None,
            bytes_avoided=sum(record.nbytes for record in records) - written,
            layers=tuple(LayerRecord(name=layer.name, block=layer.block) for layer in self.layers),
            tensors={layer.fqn: _tensor(layer) for layer in self.layers},
            groups=dict(groups),
            units=tuple(records),
        )


def flip_byte(path: Path, position: int = -1) -> None:
    """Change one byte of a file in place."""
    data = bytearray(path.read_bytes())
    data[position] ^= 0xFF
    path.write_bytes(data)


def _tensor(layer: FakeLayer) -> TensorRecord:
    kind = "frozen" if layer.frozen else "trainable"
    return TensorRecord(layer=layer.name, shape=(layer.numel,), dtype="F32", kind=kind)


def _drift_of(unit: Unit, drift: float | Mapping[Unit, float | None] | Callable[[Unit], float | None]) -> float | None:
    if isinstance(drift, Mapping):
        return drift[unit]
    return drift(unit) if callable(drift) else drift


def intact_steps(store: Path) -> list[int]:
    """Return the steps of all commits, which must be whole to the last byte."""
    report = verify(open_catalog(LocalFiles(store)))
    assert all(commit.state == "ok" for commit in report.commits)
    return sorted(commit.save.step for commit in report.commits)
