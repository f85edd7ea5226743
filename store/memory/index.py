"""Versions on this node and which belong to a store.

Which versions lie in the memory of this node: every rank's records, each checked against itself and its payload.

Reads only. Payloads are not read here, only their sizes looked at: their hashes are checked by whoever reads them.

A version in memory, all ranks' records put together: what a commit would be, but on no disk.

Made from what every rank tells of its own node, so that all ranks put together the same one, to the byte.

Which versions in memory are of the history that a store tells: memory knows a store by its identity alone.

A copy of a store has that identity, too, and so has one that was restored from a copy. Jobs on both claim epochs of
the same numbers, but each claim has a token of its own, that stands in the store and in every version kept under it.
And a version says which commit it continues: where that is gone, the store was put back to what it was before it.

What one incarnation of a job kept is believed as a whole or not at all. Reads only.

Which stores were seen on this node, and where: what is in memory says whose it is, but not where that store lies.

Kept in a file beside the memory, so that a daemon that was killed together with its trainers leaves the next one what
it needs. The file is only ever believed as far as a store of that identity stands at the path.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from store.encoding import encoding_named
from store.errors import DamagedError, MissingError, StorageError, StoreError
from store.layout import MANIFESTS, manifest_path, parse_save_file
from store.memory.layout import RECORD_LIMIT, SLOTS, Generation, Tier, VersionRecord, home, parse_record, read_whole
from store.names import RAW, SaveId
from store.schema import GroupRecord, ManifestRecord, PartRecord, UnitRecord, from_bytes, to_bytes
from store.segment import parse_part, parts_digest
from store.session import read_epoch
from store.storage.local import Files


@dataclass(frozen=True)
class HeldSnapshot:
    """One rank's share of a version, on this node."""

    record: VersionRecord
    payload: Path

    @cached_property
    def part(self) -> bytes:
        """The part as a store would hold it: the same bytes wherever they are made."""
        return to_bytes(self.record.part)


@dataclass(frozen=True)
class NodeIndex:
    """What this node holds of one store. problems: what is there and cannot be believed.

    others: of saves and ranks that are among ``versions``, too: jobs on copies of the store name theirs alike."""

    versions: Mapping[SaveId, Mapping[int, HeldSnapshot]]
    problems: tuple[str, ...] = ()
    others: tuple[HeldSnapshot, ...] = ()

    def everything(self) -> Iterator[HeldSnapshot]:
        """Whatever is there."""
        for held in self.versions.values():
            yield from held.values()
        yield from self.others

    @property
    def newest(self) -> SaveId | None:
        """Of the versions that any rank has."""
        return max(self.versions, default=None)


def scan_node(tier: Tier) -> NodeIndex:
    """What there is. StorageError where the folder is not this user's own."""
    versions: dict[SaveId, dict[int, HeldSnapshot]] = {}
    problems: list[str] = []
    others: list[HeldSnapshot] = []
    for place in tier.generations():
        for rank in place.ranks():
            for slot in SLOTS:
                try:
                    held = _held(place, rank, slot)
                except MissingError:
                    continue
                except StoreError as error:
                    problems.append(str(error))
                    continue
                if versions.setdefault(held.record.save, {}).setdefault(rank, held) is not held:
                    others.append(held)
    return NodeIndex(versions, tuple(problems), tuple(others))


def version_in(place: Generation, rank: int, slot: int) -> SaveId | None:
    """What a payload is a version of; None where it is none, or cannot be read."""
    try:
        return _held(place, rank, slot).record.save
    except StoreError:
        return None


def _held(place: Generation, rank: int, slot: int) -> HeldSnapshot:
    path, payload = place.record(rank, slot), place.payload(rank, slot)
    record = parse_record(read_whole(path, RECORD_LIMIT), str(path))
    held = HeldSnapshot(record, payload)
    parse_part(held.part, place.tier.store_id, record.save, rank)
    try:
        nbytes = payload.lstat().st_size
    except OSError as error:
        raise DamagedError(f"{payload} is not there, though {path.name} describes it") from error
    if nbytes < record.part.payload_bytes:
        raise DamagedError(f"{payload} has {nbytes} bytes instead of {record.part.payload_bytes}")
    return held


class Payload(Protocol):
    """A rank's payload that lies elsewhere."""

    def read(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset``. StorageError; MissingError where asking again would be no use."""


Piece = tuple[int, int, int]
"""Bytes of a payload: its rank, where they begin, and how many they are."""


@dataclass(frozen=True)
class RankShare:
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
        return self.manifest.save


def rank_share(held: Mapping[int, HeldSnapshot]) -> RankShare:
    """What this node has of a version."""
    first = held.get(0)
    head = None if first is None or first.record.head is None else to_bytes(first.record.head)
    return RankShare({rank: one.part for rank, one in held.items()}, head)


def assemble_version(save: SaveId, shares: Iterable[RankShare], node: NodeIndex) -> MemoryVersion:
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


def take_newer_units(commit: ManifestRecord, memory: ManifestRecord) -> ManifestRecord | None:
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


SnapshotKey = tuple[Path, int]
"""Where one rank's memory is: the folder, and the rank."""


def belonging_to(node: NodeIndex, files: Files) -> NodeIndex:
    """The same, without what is not of this store. StorageError."""
    strange = foreign_snapshots(node, files)
    versions: dict[SaveId, dict[int, HeldSnapshot]] = {}
    for held in node.everything():
        if snapshot_key(held) not in strange:
            versions.setdefault(held.record.save, {}).setdefault(held.record.part.rank, held)
    return NodeIndex(versions, node.problems)


def foreign_snapshots(node: NodeIndex, files: Files) -> set[SnapshotKey]:
    """Memory of incarnations that are not of this store: of a copy's, or of what it was before it was put back.

    An incarnation goes by the token of its claim and not by the folder: jobs on copies that begin at the same moment
    may share one, since each rank takes the first place that is free. StorageError."""
    there = list(node.everything())
    tokens = {epoch: _token(files, epoch) for epoch in {held.record.save.epoch for held in there}}
    newest = _newest(files) if there else None
    claims = {
        held.record.claim
        for held in there
        if held.record.claim != tokens[held.record.save.epoch] or _continues_nothing(held, newest, files)
    }
    return {snapshot_key(held) for held in there if held.record.claim in claims}


def snapshot_key(held: HeldSnapshot) -> SnapshotKey:
    """Where it lies."""
    return held.payload.parent, held.record.part.rank


def _continues_nothing(held: HeldSnapshot, newest: SaveId | None, files: Files) -> bool:
    """Whether it continues a commit that was there and is not any more, though nothing newer is: then it was not
    pruned."""
    head = held.record.head
    if head is None or head.previous is None or (newest is not None and newest > SaveId.parse(head.previous)):
        return False
    try:
        files.size(manifest_path(SaveId.parse(head.previous)))
    except MissingError:
        return True
    return False


def _newest(files: Files) -> SaveId | None:
    try:
        return max(_saves(files.list_dir(MANIFESTS)), default=None)
    except MissingError:
        return None


def _saves(names: Iterable[str]) -> list[SaveId]:
    return [save for name in names if (save := parse_save_file(name)) is not None]


def _token(files: Files, epoch: int) -> str | None:
    try:
        return read_epoch(files, epoch).token
    except (MissingError, DamagedError):
        return None


_NAME = "stores.json"
_LIMIT = 1 << 20
_MOST = 256
"""Stores that are remembered: those seen last."""

_COPIES = 8
"""Places of one identity that are: a store and copies of it."""


class SeenStore:
    """By store id. One process writes: the daemon."""

    def __init__(self, base: Path) -> None:
        self._path = home(base) / _NAME
        self._places = _read(self._path)

    def everything(self) -> list[tuple[str, Path]]:
        """(store id, place), seen last comes last."""
        return [(store_id, path) for store_id, paths in self._places.items() for path in paths]

    def places(self, store_id: str) -> list[Path]:
        """Where a store and its copies are, or were; seen last comes last."""
        return list(self._places.get(store_id, ()))

    def seen(self, store_id: str, path: Path) -> None:
        """A job has it open there. StorageError where that cannot be written down."""
        before = self._places.pop(store_id, [])
        self._places[store_id] = [*(one for one in before if one != path), path][-_COPIES:]
        while len(self._places) > _MOST:
            del self._places[next(iter(self._places))]
        if self._places[store_id] != before:
            self._write()

    def _write(self) -> None:
        temporary = self._path.with_suffix(".new")
        try:
            temporary.write_text(json.dumps({key: [str(one) for one in paths] for key, paths in self._places.items()}))
            temporary.replace(self._path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise StorageError(f"cannot write {self._path}: {error.strerror}") from error


def seen_stores(base: Path) -> dict[str, Path]:
    """By store id: where a daemon last saw it. What cannot be read is nothing."""
    return {store_id: paths[-1] for store_id, paths in _read(home(base) / _NAME).items()}


def _read(path: Path) -> dict[str, list[Path]]:
    try:
        found = json.loads(read_whole(path, _LIMIT))
    except (StorageError, ValueError, RecursionError):
        return {}  # of nobody; a job that says hello makes it anew
    if not isinstance(found, dict):
        return {}
    read = {key: _paths(value if isinstance(value, list) else [value]) for key, value in found.items()}
    return {key: paths for key, paths in read.items() if paths}


def _paths(values: list[Any]) -> list[Path]:
    return [Path(one) for one in values if isinstance(one, str) and os.path.isabs(one)]  # noqa: PTH117
