"""Index the versions in this node's memory, assemble them over all ranks, and select those of a store.

Records are checked against themselves and the sizes of their payloads; readers of payloads check the hashes. All ranks
assemble the same version, to the byte, from the shares of all nodes.

A copy or a restored backup of a store has the same store id, and jobs on both may claim the same epochs. Each claim has
a token, which the store and every version hold, and a version names the commit it continues: if that is gone, the store
was restored to an older state. The memory of one incarnation is accepted as a whole or not at all."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, TypeAdapter

from store.encoding import encoding_named
from store.errors import DamagedError, MissingError, StoreError
from store.memory import layout
from store.names import MANIFESTS, RAW, SaveId, group_by_key, manifest_path, parse_save_file
from store.schema import Entry, GroupRecord, ManifestRecord, MeasureRecord, PartRecord, UnitRecord, from_bytes, to_bytes
from store.segment import parse_part, partial_tensor, parts_digest
from store.session import token_of
from store.storage.local import Files, list_or_empty


@dataclass(frozen=True)
class HeldSnapshot:
    """One rank's share of a version, on this node."""

    record: layout.VersionRecord
    payload: Path

    @cached_property
    def part(self) -> bytes:
        """The bytes of the part as in a store, identical on all nodes."""
        return to_bytes(self.record.part)


@dataclass(frozen=True)
class NodeIndex:
    """Snapshots of one store on this node, and the problems of invalid ones."""

    versions: Mapping[SaveId, Mapping[int, HeldSnapshot]]
    problems: tuple[str, ...] = ()
    others: tuple[HeldSnapshot, ...] = ()  # of jobs on copies of the store, with a save and rank as in ``versions``

    def everything(self) -> Iterator[HeldSnapshot]:
        for held in self.versions.values():
            yield from held.values()
        yield from self.others

    @property
    def newest(self) -> SaveId | None:
        """The newest version that any rank has."""
        return max(self.versions, default=None)


def scan_node(tier: layout.Tier) -> NodeIndex:
    """Index the memory of a store on this node. Raises StorageError if other users may access it."""
    versions: dict[SaveId, dict[int, HeldSnapshot]] = {}
    problems: list[str] = []
    others: list[HeldSnapshot] = []
    for place in tier.generations():
        for rank in place.ranks():
            for slot in layout.SLOTS:
                try:
                    held = _read_snapshot(place, rank, slot)
                except MissingError:
                    continue
                except StoreError as error:
                    problems.append(str(error))
                    continue
                if versions.setdefault(held.record.save, {}).setdefault(rank, held) is not held:
                    others.append(held)
    return NodeIndex(versions, tuple(problems), tuple(others))


def unfinished_ranks(tier: layout.Tier, node: NodeIndex, held: Mapping[int, HeldSnapshot]) -> list[int]:
    """Return the ranks that kept memory on this node and never finished their share of a version.

    A job cannot resume such a version. Ranks of other nodes, and replicas of them here, do not count."""
    folders = {one.payload.parent for one in held.values()}
    replicas = {one.record.part.rank for one in node.everything() if one.record.replica}
    places = [place for place in tier.generations() if place.folder in folders]
    here = {rank for place in places for rank in place.ranks() if not place.is_replica(rank)}
    world_size = next(iter(held.values())).record.part.world_size
    return sorted(rank for rank in here - held.keys() - replicas if rank < world_size)


def version_in(place: layout.Generation, rank: int, slot: int) -> SaveId | None:
    """Return the version in a slot; None if there is none or it is invalid."""
    try:
        return _read_snapshot(place, rank, slot).record.save
    except StoreError:
        return None


def _read_snapshot(place: layout.Generation, rank: int, slot: int) -> HeldSnapshot:
    path, payload = place.record(rank, slot), place.payload(rank, slot)
    record = layout.parse_record(layout.read_whole(path, layout.RECORD_LIMIT), str(path))
    held = HeldSnapshot(record, payload)
    parse_part(held.part, place.tier.store_id, record.save, rank)
    try:
        nbytes = payload.lstat().st_size
    except OSError as error:
        raise DamagedError(f"{payload} is not there, though {path.name} describes it") from error
    if nbytes < record.part.payload_bytes:
        raise DamagedError(f"{payload} has {nbytes} bytes instead of {record.part.payload_bytes}")
    return held


Piece = tuple[int, int, int]  # range of a payload: rank, offset, and number of bytes


@dataclass(frozen=True)
class RankShare:
    """One node's share of a version as plain bytes: its ranks' parts, and the head if rank 0 is there."""

    parts: Mapping[int, bytes]
    head: bytes | None


@dataclass(frozen=True)
class MemoryVersion:
    """A complete version: the records of all ranks, like a commit."""

    manifest: ManifestRecord
    parts: Mapping[int, bytes]
    records: Mapping[int, PartRecord]
    payloads: Mapping[int, Path]  # payloads on this node
    lent: Mapping[Piece, bytes] = field(default_factory=dict)  # ranges of other payloads that were sent to this node
    far: Mapping[int, Callable[[int, memoryview], None]] = field(default_factory=dict)
    """Payloads on other nodes: fills memory from an offset. Raises StorageError; MissingError if a retry is useless."""

    @property
    def save(self) -> SaveId:
        return self.manifest.save


def rank_share(held: Mapping[int, HeldSnapshot]) -> RankShare:
    """Return this node's share of a version."""
    first = held.get(0)
    head = None if first is None or first.record.head is None else to_bytes(first.record.head)
    return RankShare({rank: one.part for rank, one in held.items()}, head)


def assemble_version(save: SaveId, shares: Iterable[RankShare], node: NodeIndex) -> MemoryVersion:
    """Assemble a version from the shares of all nodes. Raises DamagedError if they do not make a complete one."""
    parts: dict[int, bytes] = {}
    head: ManifestRecord | None = None
    for share in shares:
        for rank, data in share.parts.items():
            if parts.setdefault(rank, data) != data:
                raise DamagedError(f"memory holds two versions {save} of rank {rank}")
        if share.head is not None:
            parsed = from_bytes(ManifestRecord, share.head, f"the head of version {save} in memory")
            if head is not None and parsed != head:
                raise DamagedError(f"memory holds two heads of version {save}")
            head = parsed
    if head is None:
        raise DamagedError(f"version {save} in memory lacks rank 0's head")
    if sorted(parts) != list(range(head.world_size)):
        raise DamagedError(f"version {save} in memory has {len(parts)} of {head.world_size} ranks")
    records = {rank: parse_part(data, head.store_id, save, rank) for rank, data in sorted(parts.items())}
    if any((part.plan, part.world_size) != (records[0].plan, head.world_size) for part in records.values()):
        raise DamagedError(f"version {save} in memory: its ranks do not belong together")
    if found := partial_tensor(records.values(), head.tensors):
        raise DamagedError(f"version {save} in memory holds {found}")
    group = GroupRecord(
        world_size=head.world_size,
        payload_bytes=sum(part.payload_bytes for part in records.values()),
        parts=parts_digest(parts[rank] for rank in sorted(parts)),
    )
    entries = group_by_key((entry.unit, entry) for part in records.values() for entry in part.entries)
    losses = group_by_key((found.unit, found) for part in records.values() for found in part.measures)
    units = tuple(
        _as_stored(unit, entries.get(unit.unit, ()), losses.get(unit.unit, ())) if unit.save == save.name else unit
        for unit in head.units
    )
    differs = dict.fromkeys((*head.differs, *(text for part in records.values() for text in part.differs)))
    manifest = head.replace(groups={**head.groups, save.name: group}, units=units, differs=tuple(differs))
    local = {rank: held.payload for rank, held in node.versions.get(save, {}).items() if held.part == parts.get(rank)}
    return MemoryVersion(manifest, parts, records, local)


def take_newer_units(commit: ManifestRecord, memory: ManifestRecord) -> ManifestRecord | None:
    """Return the commit with the layers that are newer in memory; None if there are none.

    Only within one epoch, where steps are monotonic: a later epoch may have rolled back."""
    if commit.epoch != memory.epoch:
        return None
    theirs = {unit.unit: unit for unit in memory.units if unit.save == memory.save.name}
    units = tuple(_newer(unit, theirs.get(unit.unit), commit.step) for unit in commit.units)
    if units == commit.units:
        return None
    reached = {name for unit in units for name in (unit.save, *unit.bases)} | {commit.save.name}
    groups = {**commit.groups, memory.save.name: memory.groups[memory.save.name]}
    return commit.replace(units=units, groups={name: group for name, group in groups.items() if name in reached})


def _newer(unit: UnitRecord, other: UnitRecord | None, step: int) -> UnitRecord:
    if other is None or not unit.moving or other.members != unit.members or other.version <= unit.version:
        return unit
    return unit if other.version.step > step else other.replace(staleness=step - other.version.step, drift=None)


def _as_stored(unit: UnitRecord, entries: Collection[Entry], losses: Collection[MeasureRecord]) -> UnitRecord:
    """Return a unit with sizes and errors from the parts of all ranks instead of rank 0's expectation."""
    lost, decoded = sum(one.error_sq for one in losses), sum(one.decoded_sq for one in losses)
    error = math.sqrt(lost / decoded) if decoded else float(lost > 0)
    names = sorted({entry.encoding for entry in entries if not encoding_named(entry.encoding).lossless})
    update = {"nbytes": sum(entry.nbytes for entry in entries), "error": error, "drift": error}
    update["boxes"] = any(entry.box is not None for entry in entries)
    return unit.replace(**update, encoding=names[0] if names else RAW)


SnapshotKey = tuple[Path, int]  # identifies one rank's memory by its folder and rank


def belonging_to(node: NodeIndex, files: Files) -> NodeIndex:
    """Return the index without memory that is not of this store. Raises StorageError."""
    foreign = foreign_snapshots(node, files)
    versions: dict[SaveId, dict[int, HeldSnapshot]] = {}
    for held in node.everything():
        if snapshot_key(held) not in foreign:
            versions.setdefault(held.record.save, {}).setdefault(held.record.part.rank, held)
    return NodeIndex(versions, node.problems)


def foreign_snapshots(node: NodeIndex, files: Files) -> set[SnapshotKey]:
    """Return the memory of incarnations of a copy of the store, or of its state before it was restored.

    An incarnation is identified by the token of its claim and not by its folder, because jobs on copies that start at
    the same moment may share a folder: each rank takes the first free one. Raises StorageError."""
    snapshots = list(node.everything())
    tokens = {epoch: token_of(files, epoch) for epoch in {held.record.save.epoch for held in snapshots}}
    saves = [parse_save_file(name) for name in list_or_empty(files, MANIFESTS)] if snapshots else []
    newest = max((save for save in saves if save is not None), default=None)
    claims = {
        held.record.claim
        for held in snapshots
        if held.record.claim != tokens[held.record.save.epoch] or _lost_previous(held, newest, files)
    }
    return {snapshot_key(held) for held in snapshots if held.record.claim in claims}


def snapshot_key(held: HeldSnapshot) -> SnapshotKey:
    """Return the folder and rank of a snapshot."""
    return held.payload.parent, held.record.part.rank


def _lost_previous(held: HeldSnapshot, newest: SaveId | None, files: Files) -> bool:
    """Return whether the commit that it continues is gone, but not pruned, since no newer commit exists."""
    head = held.record.head
    if head is None or head.previous is None or (newest is not None and newest > SaveId.parse(head.previous)):
        return False
    try:
        files.size(manifest_path(SaveId.parse(head.previous)))
    except MissingError:
        return True
    return False


_NAME = "stores.json"
_LIMIT = 1 << 20
_MOST = 256  # stores that are remembered, the last seen ones
_COPIES = 8  # locations remembered for one store id: a store and its copies
_Places = Annotated[
    list[Path], BeforeValidator(lambda one: one if isinstance(one, list) else [one]), Field(min_length=1)
]
_FILE = TypeAdapter(dict[str, _Places])


class SeenStore:
    """Locations of the stores seen on this node by store id, in a file that only the daemon writes.

    It tells a restarted daemon where the stores of the memory are; readers check the store id at the location."""

    def __init__(self, base: Path) -> None:
        self._path = layout.home(base) / _NAME
        self._places = _read(self._path)

    def places(self, store_id: str) -> list[Path]:
        """Return the known locations of a store and its copies, the last seen one last."""
        return list(self._places.get(store_id, ()))

    def seen(self, store_id: str, path: Path) -> None:
        """Record that a job has the store open at ``path``. Raises StorageError if that cannot be written."""
        before = self._places.pop(store_id, [])
        self._places[store_id] = [*(one for one in before if one != path), path][-_COPIES:]
        while len(self._places) > _MOST:
            del self._places[next(iter(self._places))]
        if self._places[store_id] != before:
            layout.write_private(self._path, self._path.with_suffix(".new"), _FILE.dump_json(self._places))


def seen_stores(base: Path) -> dict[str, Path]:
    """Return the last seen location of each store; empty if the file is unreadable."""
    return {store_id: paths[-1] for store_id, paths in _read(layout.home(base) / _NAME).items()}


def _read(path: Path) -> dict[str, list[Path]]:
    try:
        return _FILE.validate_json(layout.read_whole(path, _LIMIT))
    except (StoreError, ValueError):
        return {}  # the next job that registers writes it again
