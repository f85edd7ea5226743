"""Writes ``store-format-1``: a store that every later release must read.

    python tests/golden/make_format_1.py NEW_DIRECTORY

Kept to show how the store beside it came about. It is not run again once format 1 has been released: what counts
is that the files written then can still be read. Values follow from :func:`value`, so the test needs no copy.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np

from store.catalog import open_or_create
from store.commit import Expected, commit, hint_latest, mark_proven, wait_for_group
from store.names import BUFFER, FROZEN, RAW, WEIGHTS, SaveId, Unit
from store.schema import GroupRecord, LayerRecord, ManifestRecord, TensorRecord, UnitRecord
from store.segment import SegmentDraft, StagedFragment, write_segment
from store.session import claim_epoch
from store.state_tree import Leaf, encode
from store.storage.local import Files, LocalFiles

WORLD = 2
PLAN = "0123456789abcdef0123456789abcdef"

TENSORS = {
    "embed.weight": TensorRecord(layer="embed", shape=(5, 2), dtype="BF16", kind="frozen", aliases=("head.weight",)),
    "block.0.weight": TensorRecord(layer="block.0", shape=(3, 3), dtype="F32", kind="trainable"),
    "block.0.bias": TensorRecord(layer="block.0", shape=(1,), dtype="F32", kind="trainable"),
    "block.0.seen": TensorRecord(layer="block.0", shape=(), dtype="I64", kind="buffer"),
}
"""fqn -> record. The bias is too small to be split: rank 1 holds it alone."""

SLOTS = {"frozen": {FROZEN: "BF16"}, "buffer": {BUFFER: "I64"}, "trainable": {WEIGHTS: "F32", "exp_avg": "F32"}}
"""kind -> slot -> dtype."""

_WIDTH = {"BF16": "<u2", "F32": "<f4", "I64": "<i8"}


def value(fqn: str, slot: str, save: SaveId) -> np.ndarray[Any, Any]:
    """The flattened tensor in the version made by ``save``; bf16 as its bits."""
    record = TENSORS[fqn]
    numel = int(np.prod(record.shape))
    start = 1000 * save.step + 100 * list(TENSORS).index(fqn) + 10 * len(slot)
    return np.arange(start, start + numel).astype(_WIDTH[SLOTS[record.kind][slot]])


def run_state(save: SaveId, rank: int) -> dict[str, Any]:
    """One of every type that a run state may hold."""
    return {
        "step": save.step, "rank": rank, "none": None, "flag": True, "big": 1 << 100, "pi": 3.141592653589793,
        "nan": float("nan"), "minus": -0.0, "text": "drift \u2713", "bytes": b"\x00\xff", "tuple": (1, [2, (3,)]),
        "set": {1, 2}, "by number": {0: "a", (1, 2): "b"}, "$": "not a tag",
        "array": np.arange(rank, rank + 4, dtype="<u4"),
        "scalar": np.float32(0.1), "z": 0, "a": 1,
    }  # fmt: skip


def pieces(fqn: str) -> list[tuple[int, int]]:
    """(start, stop) of each rank's fragment."""
    numel = int(np.prod(TENSORS[fqn].shape))
    return [(numel * rank // WORLD, numel * (rank + 1) // WORLD) for rank in range(WORLD)]


def units() -> dict[Unit, list[str]]:
    """Unit -> its tensors."""
    found: dict[Unit, list[str]] = {}
    for fqn, record in TENSORS.items():
        for slot in SLOTS[record.kind]:
            found.setdefault(Unit(record.layer, slot), []).append(fqn)
    return found


def fragments(save: SaveId, rank: int, chosen: set[Unit]) -> list[StagedFragment]:
    """What a rank writes of the chosen units."""
    found = []
    for unit, names in units().items():
        for fqn in names if unit in chosen else []:
            start, stop = pieces(fqn)[rank]
            data = value(fqn, unit.slot, save)[start:stop].tobytes()
            dtype = SLOTS[TENSORS[fqn].kind][unit.slot]
            if data:
                found.append(StagedFragment(unit.layer, unit.slot, fqn, start, stop - start, dtype, RAW, data))
    return found


def unit_record(unit: Unit, version: SaveId, save: SaveId) -> UnitRecord:
    """A unit as the manifest of ``save`` has it."""
    names = units()[unit]
    return UnitRecord(
        layer=unit.layer, slot=unit.slot, save=version.name, encoding=RAW,
        numel=sum(value(fqn, unit.slot, version).size for fqn in names),
        nbytes=sum(value(fqn, unit.slot, version).nbytes for fqn in names),
        drift=0.0 if version == save else 0.125, staleness=save.step - version.step,
        moving=unit.slot in (WEIGHTS, "exp_avg"), reason="first save" if version.step == 10 else "drift",
    )  # fmt: skip


def write(root: Path) -> None:
    """Two commits by two epochs: a full one that is proven, and a composite."""
    files: Files = LocalFiles(root)
    store_id = open_or_create(files).store_id
    versions: dict[Unit, SaveId] = {}
    groups: dict[str, GroupRecord] = {}
    previous = None
    for step in (10, 20):
        save = SaveId(step, claim_epoch(files, store_id).epoch)
        if previous is not None:
            mark_proven(files, store_id, previous, save.epoch)
        chosen = {unit for unit in units() if step == 10 or unit.slot in (WEIGHTS, BUFFER)}
        for rank in range(WORLD):
            tree, leaves = encode(run_state(save, rank), no_tensor)
            staged = fragments(save, rank, chosen)
            facts = {"zero_stage": 2} if rank == 0 else {}
            write_segment(files, SegmentDraft(store_id, save, rank, WORLD, PLAN, staged, tree, leaves, facts))
        group = wait_for_group(files, Expected(store_id, save, WORLD, PLAN), timeout=0)
        versions |= dict.fromkeys(chosen, save)
        groups[save.name] = group.record
        manifest = ManifestRecord(
            store_id=store_id, step=step, epoch=save.epoch, commits=step // 10, world_size=WORLD, framework="golden",
            policy="parity", created="2025-01-01T00:00:00+00:00", previous=previous.name if previous else None,
            bytes_avoided=0 if step == 10 else 60, tensors=TENSORS, groups=groups,
            layers=(LayerRecord(name="embed", block=False), LayerRecord(name="block.0", block=True)),
            units=tuple(unit_record(unit, version, save) for unit, version in versions.items()),
        )  # fmt: skip
        commit(files, manifest)
        hint_latest(files, save)
        previous = save


def no_tensor(found: Any) -> Leaf | None:
    """No tensors of a framework in here."""
    return None


if __name__ == "__main__":
    socket.gethostname = lambda: "golden"
    write(Path(sys.argv[1]))
