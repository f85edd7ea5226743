"""A version in memory, all ranks' records put together: what a commit would be, but on no disk.

Made from what every rank tells of its own node, so that all ranks put together the same one, to the byte.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from store.encoding import encoding_named
from store.errors import DamagedError
from store.memory.held import Held, Node
from store.names import RAW, SaveId
from store.schema import GroupRecord, ManifestRecord, PartRecord, UnitRecord, from_bytes, to_bytes
from store.segments import parse_part, parts_digest


class Payload(Protocol):
    """A rank's payload that lies elsewhere."""

    def read(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset``. StorageError; MissingError where asking again would be no use."""
        ...


Piece = tuple[int, int, int]
"""Bytes of a payload: its rank, where they begin, and how many they are."""


@dataclass(frozen=True)
class Share:
    """What one node tells the others of one version: plain bytes. parts: rank -> its part. head: rank 0's."""

    parts: Mapping[int, bytes]
    head: bytes | None


@dataclass(frozen=True)
class MemoryVersion:
    """All of a version's records. payloads: those that lie on this node. lent: bytes of others, from elsewhere.

    far: payloads on other nodes that can be read from here."""

    manifest: ManifestRecord
    parts: Mapping[int, bytes]
    records: Mapping[int, PartRecord]
    payloads: Mapping[int, Path]
    lent: Mapping[Piece, bytes] = field(default_factory=dict)
    far: Mapping[int, Payload] = field(default_factory=dict)

    @property
    def save(self) -> SaveId:
        """What it is called."""
        return self.manifest.save


def share_of(held: Mapping[int, Held]) -> Share:
    """What this node has of a version."""
    first = held.get(0)
    head = None if first is None or first.record.head is None else to_bytes(first.record.head)
    return Share({rank: one.part for rank, one in held.items()}, head)


def assembled(save: SaveId, shares: Iterable[Share], node: Node) -> MemoryVersion:
    """The version that the shares of all nodes make up. DamagedError where they do not make one."""
    parts: dict[int, bytes] = {}
    head: ManifestRecord | None = None
    for share in shares:
        for rank, data in share.parts.items():
            if parts.setdefault(rank, data) != data:
                raise DamagedError(f"memory holds two versions {save} of rank {rank}")
        if share.head is not None:
            told = from_bytes(ManifestRecord, share.head, f"the head of version {save} in memory")
            if head is not None and told != head:
                raise DamagedError(f"memory holds two heads of version {save}")
            head = told
    if head is None:
        raise DamagedError(f"version {save} in memory lacks rank 0's head")
    if sorted(parts) != list(range(head.world_size)):
        raise DamagedError(f"version {save} in memory: {len(parts)} of {head.world_size} ranks are there")
    records = {rank: parse_part(data, head.store_id, save, rank) for rank, data in sorted(parts.items())}
    _require_one_decision(save, head, records)
    group = GroupRecord(
        world_size=head.world_size,
        payload_bytes=sum(part.payload_bytes for part in records.values()),
        parts=parts_digest(parts[rank] for rank in sorted(parts)),
    )
    units = tuple(_as_held(unit, records.values()) if unit.save == save.name else unit for unit in head.units)
    manifest = head.model_copy(update={"groups": {**head.groups, save.name: group}, "units": units})
    local = {rank: held.payload for rank, held in node.versions.get(save, {}).items() if held.part == parts.get(rank)}
    return MemoryVersion(manifest, parts, records, local)


def mixed(commit: ManifestRecord, memory: ManifestRecord) -> ManifestRecord | None:
    """A commit in which the layers that memory has a newer version of are taken from there; None where it has none.

    Only within one epoch, in which steps follow each other: a later one may have gone back and another way."""
    if commit.epoch != memory.epoch:
        return None
    theirs = {unit.unit: unit for unit in memory.units if unit.save == memory.save.name}
    units = tuple(_newer(unit, theirs.get(unit.unit), commit.step) for unit in commit.units)
    if units == commit.units:
        return None
    reached = {name for unit in units for name in (unit.save, *unit.bases)} | {commit.save.name}
    groups = {**commit.groups, memory.save.name: memory.groups[memory.save.name]}
    return commit.model_copy(
        update={"units": units, "groups": {name: group for name, group in groups.items() if name in reached}}
    )


def _newer(unit: UnitRecord, other: UnitRecord | None, step: int) -> UnitRecord:
    if other is None or not unit.moving or other.members != unit.members or other.version <= unit.version:
        return unit
    if other.version.step > step:
        return unit
    return other.model_copy(update={"staleness": step - other.version.step, "drift": None})


def _as_held(unit: UnitRecord, parts: Collection[PartRecord]) -> UnitRecord:
    """A unit as the parts have it, rather than as rank 0 expected it."""
    entries = [entry for part in parts for entry in part.entries if entry.unit == unit.unit]
    losses = [found for part in parts for found in part.measures if found.unit == unit.unit]
    lost, decoded = sum(one.error_sq for one in losses), sum(one.decoded_sq for one in losses)
    error = math.sqrt(lost / decoded) if decoded else float(lost > 0)
    names = sorted({entry.encoding for entry in entries if not encoding_named(entry.encoding).lossless})
    update = {"nbytes": sum(entry.nbytes for entry in entries), "error": error, "drift": error}
    return unit.model_copy(update={**update, "encoding": names[0] if names else RAW})


def _require_one_decision(save: SaveId, head: ManifestRecord, parts: Mapping[int, PartRecord]) -> None:
    plans = {part.plan for part in parts.values()}
    if len(plans) != 1 or any(part.world_size != head.world_size for part in parts.values()):
        raise DamagedError(f"version {save} in memory: its ranks do not belong together")
