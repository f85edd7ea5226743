"""Versions in memory made by hand: the bytes of rank ``r`` at step ``s`` follow from both, so anyone can tell them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from store.errors import StoreError
from store.memory.arena import Arena
from store.memory.index import MemoryVersion, assemble_version, rank_share, scan_node
from store.memory.layout import Tier, VersionRecord
from store.memory.overlay import Overlay
from store.names import RAW, SaveId
from store.schema import (
    READER,
    Entry,
    LayerRecord,
    ManifestRecord,
    PartRecord,
    TensorRecord,
    UnitRecord,
    digest,
    members_digest,
    members_of,
)
from tests.support.entries import read_entry

STORE = "ab" * 16
CLAIM = "ef" * 16
NUMEL = 64
"""Elements of the one parameter ``w`` on each rank."""

NBYTES = 4 * NUMEL


def tier_at(base: Path, store_id: str = STORE) -> Tier:
    base.mkdir(exist_ok=True)
    return Tier(base, store_id)


def content(save: SaveId, rank: int) -> bytes:
    """What rank holds in a version."""
    return hashlib.shake_128(f"{save}/{rank}".encode()).digest(NBYTES)


def part_of(save: SaveId, rank: int, world: int, *, store_id: str = STORE, **more: Any) -> PartRecord:
    entry = Entry(
        layer="w", slot="fp32", fqn="w", start=rank * NUMEL, numel=NUMEL, dtype="F32", encoding=RAW,
        offset=0, nbytes=NBYTES, xxh3_128=digest(content(save, rank)),
    )  # fmt: skip
    return PartRecord(
        **{
            "store_id": store_id, "step": save.step, "epoch": save.epoch, "rank": rank, "world_size": world,
            "plan": digest(save.name.encode()), "payload_bytes": NBYTES, "header_bytes": 0,
            "header_xxh3_128": digest(b""), "entries": (entry,), "run_state": None, "run_tensors": (), **more,
        }
    )  # fmt: skip


def head_of(
    save: SaveId, world: int, *, store_id: str = STORE, parts: list[PartRecord] | None = None
) -> ManifestRecord:
    entries = [entry for part in parts or [part_of(save, r, world) for r in range(world)] for entry in part.entries]
    unit = UnitRecord(
        layer="w", slot="fp32", save=save.name, encoding=RAW, numel=world * NUMEL, nbytes=world * NBYTES,
        drift=0.0, staleness=0, moving=True, members=members_digest(members_of(entries)),
    )  # fmt: skip
    return ManifestRecord(
        store_id=store_id, step=save.step, epoch=save.epoch, commits=0, world_size=world, framework="none",
        policy="none", created="", previous=None, bytes_avoided=0, layers=(LayerRecord(name="w", block=False),),
        tensors={"w": TensorRecord(layer="w", shape=(world * NUMEL,), dtype="F32", kind="trainable")},
        groups={}, units=(unit,),
    )  # fmt: skip


def record_of(save: SaveId, rank: int, world: int) -> VersionRecord:
    return VersionRecord(
        reader=READER, claim=CLAIM, part=part_of(save, rank, world), head=head_of(save, world) if rank == 0 else None
    )


def keep(arena: Arena, slot: int, save: SaveId, rank: int = 0, world: int = 1) -> None:
    """One rank's share of a version, whole."""
    arena.room(slot, NBYTES)
    arena.write_at(slot, 0, content(save, rank))
    arena.seal(slot, record_of(save, rank, world))


def abandon(arena: Arena) -> None:
    """As a dead process leaves it."""
    arena.close(remove=False)


def together(tier: Tier, save: SaveId) -> MemoryVersion:
    """The version, where all of it lies on this node. DamagedError where it is not whole."""
    node = scan_node(tier)
    return assemble_version(save, [rank_share(node.versions.get(save, {}))], node)


def values(tier: Tier, save: SaveId, below: Any = None) -> bytes:
    """The parameter of a version, every byte checked against its hash. DamagedError or StorageError."""
    version = together(tier, save)
    files, found = Overlay(below, version), b""
    for _, part in sorted(version.records.items()):
        target = bytearray(NBYTES)
        read_entry(files, part, part.entries[0], memoryview(target))
        found += bytes(target)
    return found


def whole(tier: Tier) -> dict[SaveId, bytes]:
    """Every version that can be put together, and what it reads as; nothing where a byte is wrong."""
    found = {}
    for save in scan_node(tier).versions:
        try:
            found[save] = values(tier, save)
        except StoreError:
            continue
    return found


def wanted(save: SaveId, world: int = 1) -> bytes:
    return b"".join(content(save, rank) for rank in range(world))
