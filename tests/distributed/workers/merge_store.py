"""Writes commits of a live engine into a store, unit by unit, with the store's own functions and no policy."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from monitor.adapters.base import Adapter, Piece
from monitor.adapters.module_tensors import dtype_name
from store.catalog import open_or_create
from store.commit import Expected, Group, commit, wait_for_group
from store.names import FROZEN, RAW, SaveId, Unit
from store.schema import GroupRecord, LayerRecord, ManifestRecord, TensorRecord, UnitRecord
from store.segment import SegmentDraft, StagedFragment, write_segment
from store.session import claim_epoch
from store.state_tree import Leaf, encode
from store.storage.local import Files, LocalFiles

PLAN = "0" * 32
USER = {"seen": [1, 2.5], "names": ("a", "b"), "matrix": np.arange(6, dtype=np.float32).reshape(2, 3)}


def layer_of(fqn: str) -> str:
    return ".".join(fqn.split(".")[:2]) if fqn.startswith("blocks.") else fqn.split(".", maxsplit=1)[0]


class StoreWriter:
    """One store, one epoch; every rank calls the same methods."""

    def __init__(self, root: Path, adapter: Adapter) -> None:
        self.files: Files = LocalFiles(root)
        self.adapter = adapter
        if dist.get_rank() == 0:
            claim_epoch(self.files, open_or_create(self.files).store_id)
        dist.barrier()
        self.store_id = open_or_create(self.files).store_id
        self.groups: dict[str, GroupRecord] = {}
        self.units: dict[Unit, UnitRecord] = {}

    def save(self, step: int, wanted: Callable[[Unit], bool] = lambda _: True) -> None:
        """Commit the units that ``wanted`` names; the others keep their versions."""
        save, rank = SaveId(step, 1), dist.get_rank()
        write_segment(self.files, self._draft(save, rank, wanted))
        dist.barrier()
        if rank == 0:
            expected = Expected(self.store_id, save, dist.get_world_size(), PLAN)
            self._commit(save, wait_for_group(self.files, expected, 10.0))
        dist.barrier()

    def _draft(self, save: SaveId, rank: int, wanted: Callable[[Unit], bool]) -> SegmentDraft:
        state = {"framework": self.adapter.run_state(), "rng": _rng(), "user": [USER, {"rank": rank}]}
        tree, leaves = encode(state, _leaf)
        pieces = [p for p in self.adapter.owned() if wanted(Unit(layer_of(p.fragment.fqn), p.fragment.slot))]
        return SegmentDraft(
            store_id=self.store_id,
            save=save,
            rank=rank,
            world_size=dist.get_world_size(),
            plan=PLAN,
            fragments=[_staged(piece) for piece in pieces],
            run_state=tree,
            run_leaves=leaves,
            facts=self.adapter.layout_facts() if rank == 0 else {},
        )

    def _commit(self, save: SaveId, group: Group) -> None:
        self.groups[save.name] = group.record
        fresh: dict[Unit, list[tuple[int, int]]] = {}
        for part in group.parts:
            for entry in part.entries:
                fresh.setdefault(entry.unit, []).append((entry.numel, entry.nbytes))
        for unit, sizes in fresh.items():
            self.units[unit] = _unit(unit, save, sum(n for n, _ in sizes), sum(b for _, b in sizes))
        tensors = self.adapter.tensors()
        commit(
            self.files,
            ManifestRecord(
                store_id=self.store_id,
                step=save.step,
                epoch=save.epoch,
                commits=len(self.groups),
                world_size=dist.get_world_size(),
                framework=self.adapter.framework,
                policy="none",
                created="2024-01-01T00:00:00+00:00",
                previous=None,
                bytes_avoided=0,
                layers=tuple(LayerRecord(name=name, block=False) for name in dict.fromkeys(map(layer_of, tensors))),
                tensors={
                    fqn: TensorRecord(
                        layer=layer_of(fqn), shape=info.shape, dtype=info.dtype, kind=info.kind, aliases=info.aliases
                    )
                    for fqn, info in tensors.items()
                },
                groups={unit.save: self.groups[unit.save] for unit in self.units.values()} | {save.name: group.record},
                units=tuple(self._aged(unit, save.step) for unit in self.units.values()),
            ),
        )

    def _aged(self, unit: UnitRecord, step: int) -> UnitRecord:
        staleness = step - unit.version.step
        return unit.replace(staleness=staleness, drift=0.25 if staleness and unit.moving else 0.0)


def _unit(unit: Unit, save: SaveId, numel: int, nbytes: int) -> UnitRecord:
    return UnitRecord(
        layer=unit.layer,
        slot=unit.slot,
        save=save.name,
        encoding=RAW,
        numel=numel,
        nbytes=nbytes,
        drift=0.0,
        staleness=0,
        moving=unit.slot != FROZEN,
    )


def _staged(piece: Piece) -> StagedFragment:
    fragment = piece.fragment
    return StagedFragment(
        layer=layer_of(fragment.fqn),
        slot=fragment.slot,
        fqn=fragment.fqn,
        start=fragment.start,
        numel=fragment.numel,
        dtype=dtype_name(piece.tensor.dtype),
        encoding=RAW,
        data=_bytes(piece.tensor),
    )


def _leaf(value: Any) -> Leaf | None:
    if not isinstance(value, torch.Tensor):
        return None
    return Leaf(dtype_name(value.dtype), tuple(value.shape), _bytes(value))


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def _rng() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
