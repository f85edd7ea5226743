"""A version in memory, all ranks' records put together: what a commit would be, but on no disk.

Made from what every rank tells of its own node, so that all ranks put together the same one, to the byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from store.errors import DamagedError
from store.memory.held import Held, Node
from store.names import SaveId
from store.schema import GroupRecord, ManifestRecord, PartRecord, from_bytes, to_bytes
from store.segments import parse_part, parts_digest

Piece = tuple[int, int, int]
"""Bytes of a payload: its rank, where they begin, and how many they are."""


@dataclass(frozen=True)
class Share:
    """What one node tells the others of one version: plain bytes. parts: rank -> its part. head: rank 0's."""

    parts: Mapping[int, bytes]
    head: bytes | None


@dataclass(frozen=True)
class MemoryVersion:
    """All of a version's records. payloads: those that lie on this node. lent: bytes of others, from elsewhere."""

    manifest: ManifestRecord
    parts: Mapping[int, bytes]
    records: Mapping[int, PartRecord]
    payloads: Mapping[int, Path]
    lent: Mapping[Piece, bytes] = field(default_factory=dict)

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
    manifest = head.model_copy(update={"groups": {**head.groups, save.name: group}})
    local = {rank: held.payload for rank, held in node.versions.get(save, {}).items() if held.part == parts.get(rank)}
    return MemoryVersion(manifest, parts, records, local)


def continued(version: MemoryVersion, previous: str | None) -> MemoryVersion:
    """The version as the one that follows the commit ``previous``, where there is a newer one than it knew of."""
    return (
        version
        if previous is None
        else replace(version, manifest=version.manifest.model_copy(update={"previous": previous}))
    )


def _require_one_decision(save: SaveId, head: ManifestRecord, parts: Mapping[int, PartRecord]) -> None:
    plans = {part.plan for part in parts.values()}
    if len(plans) != 1 or any(part.world_size != head.world_size for part in parts.values()):
        raise DamagedError(f"version {save} in memory: its ranks do not belong together")
