"""At a resume: use a newer in-memory version; broadcast missing pieces.

What a rank must read of a version in memory and has not on its own node: told by rank 0, where that has it.

Ranks of ZeRO need little but their own payload: buffers that all of them hold, which one rank keeps, and the counters,
which rank 0 keeps. That is broadcast. More than that is not: a resume from the store is what it is there for.
Collective; before anything is changed.

At a resume: is there a version in memory that is newer than every commit, and can every rank read what it needs?

Ranks of different nodes see different memory. So each tells what lies on its node, all of them pick the same version,
put it together from what the nodes tell, and use it only if every rank finds the bytes that it will need on its own
node, or can read them from another one (:mod:`monitor.memory.replication`). Else the store is resumed from, as if
there were no
memory tier. Collective; changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from monitor.adapters.base import Adapter
from monitor.distributed import Group, node_id, run_on_all_ranks, run_on_rank0
from monitor.memory.replica_client import RemotePayload
from monitor.memory.replication import Replication
from store.catalog import Catalog
from store.certificate import certify, run_saves
from store.errors import StoreError, UsageError
from store.fragments import FragmentIndex, stored_slot
from store.memory.index import (
    MemoryVersion,
    NodeIndex,
    Piece,
    RankShare,
    assemble_version,
    belonging_to,
    rank_share,
    scan_node,
    take_newer_units,
)
from store.memory.layout import Tier
from store.memory.overlay import Overlay
from store.names import Fragment, SaveId
from store.resolve import Resolution, newest_resumable, resolve
from store.schema import ManifestRecord

LIMIT = 64 << 20
"""Bytes that rank 0 tells the others at most."""


def broadcast_missing_bytes(
    catalog: Catalog, commit: SaveId, version: MemoryVersion, adapter: Adapter | None, group: Group
) -> Mapping[Piece, bytes] | None:
    """What the ranks lack of the version, on all of them; None where it is not to be had.

    catalog: the store with the version on top; commit: what is to be resumed of it. adapter: None: run states only."""
    lacks = group.all_gather(run_on_all_ranks(group, partial(_lacking, catalog, commit, version, adapter, group.rank)))
    if any(one is None for one in lacks):
        return None
    wanted = sorted(set().union(*lacks))
    if not wanted:
        return {}
    if sum(nbytes for _, _, nbytes in wanted) > LIMIT:
        return None
    told: dict[Piece, bytes] | None = group.broadcast(
        _read(catalog, version, wanted) if group.rank == 0 else None,
    )
    return told


def _read(catalog: Catalog, version: MemoryVersion, wanted: list[Piece]) -> dict[Piece, bytes] | None:
    files, found = Overlay(catalog.files, version), {}
    for rank, offset, nbytes in wanted:
        data = bytearray(nbytes)
        try:
            files.read_payload(rank, offset, memoryview(data))
        except StoreError:
            return None
        found[rank, offset, nbytes] = bytes(data)
    return found


def _lacking(
    catalog: Catalog, commit: SaveId, version: MemoryVersion, adapter: Adapter | None, rank: int
) -> set[Piece] | None:
    """Bytes of the version that this rank will read, and whose payload is on another node."""
    if len(version.payloads) == len(version.parts):
        return set()
    first = version.records[0]
    run_state = {
        (part.rank, tensor.offset, tensor.nbytes)
        for part in (first, version.records.get(rank, first))
        for tensor in part.run_tensors
    }
    try:
        entries = set() if adapter is None else _entries(resolve(catalog, commit), version.save, adapter)
    except StoreError:
        return None
    return {piece for piece in run_state | entries if piece[0] not in version.payloads and piece[2]}


def _entries(resolution: Resolution, save: SaveId, adapter: Adapter) -> set[Piece]:
    index = FragmentIndex(resolution.sources())
    slots: dict[str, dict[str, str]] = {}
    for source in resolution.sources():
        slots.setdefault(source.entry.fqn, {})[source.entry.slot] = source.entry.dtype
    try:
        places = adapter.expected(slots)
    except UsageError:
        return set()  # the resume will say it
    found = set()
    for place in places:
        slot = stored_slot(index, place.fragment)
        if slot is None:
            continue
        wanted = Fragment(place.fragment.fqn, slot, place.fragment.start, place.fragment.numel)
        for copy in index.cover(wanted):
            part, entry = copy.source.part, copy.source.entry
            if part.save == save:
                found.add((part.rank, entry.offset, entry.nbytes))
    return found


_log = logging.getLogger("driftpoint")


@dataclass(frozen=True)
class MemoryCandidate:
    """A version in memory, and the store with it on top.

    commit: what to resume from that: the version itself, or a commit some of whose layers are older than in memory.
    replicas: ranks of the version whose own memory is gone: it is what peers kept of it. instead: what is to be resumed
    where ``catalog`` turns out to hold nothing that is whole, before the store alone. older: the version before it,
    which lies below it: what is wrong of the newer one comes from there."""

    save: SaveId
    commit: SaveId
    catalog: Catalog
    replicas: frozenset[int] = frozenset()
    instead: Catalog | None = None
    older: SaveId | None = None


@dataclass(frozen=True)
class _OnDisk:
    """The newest commit that can be resumed, and the oldest version of what moves in it, by name; rank 0's."""

    newest: str
    oldest: str


@dataclass(frozen=True)
class _Sight:
    """What one rank tells of its node: versions newer than what is on disk, and the ranks whose share is there.

    replicas: those of them that were on another node."""

    node: str
    versions: Mapping[str, tuple[int, ...]]
    replicas: Mapping[str, tuple[int, ...]]

    def lying(self, name: str) -> dict[int, bool]:
        """Ranks whose share of a version is there, and whether as a replica."""
        replicas = self.replicas.get(name, ())
        return {rank: rank in replicas for rank in self.versions.get(name, ())}


def find_newest_snapshot(
    tier: Tier, catalog: Catalog, adapter: Adapter | None, group: Group, peers: Replication | None = None
) -> MemoryCandidate | None:
    """The newest version that every rank can read, if all or some of it is newer than what the newest commit has.

    adapter: None where there is no model yet: then only run states are asked for. peers: for what lies on other nodes.
    None where the store is as good. Collective."""
    suspect = run_on_rank0(group, lambda: _newest_suspect(catalog))
    node = _look(tier, catalog, None if suspect is None else SaveId.parse(suspect))
    disk = run_on_rank0(group, lambda: _on_disk(catalog))
    sights = group.all_gather(_sight(tier, node, disk))
    for name in _candidates(sights):
        found = _put_together(SaveId.parse(name), node, group, tells=_tells(sights, group.rank))
        older = run_on_all_ranks(group, partial(_before, name, node, sights, disk))
        over = partial(_over, catalog, disk=disk, older=older)
        remembered = run_on_all_ranks(group, partial(over, found))
        if found is None or remembered is None:
            continue
        if peers is not None and peers.reachable:
            return over(_reaching(found, sights, peers), replicas=_replicas_of(name, sights))
        told = broadcast_missing_bytes(remembered.catalog, remembered.commit, found, adapter, group)
        if told is not None:
            return over(replace(found, lent=told), replicas=_replicas_of(name, sights))
        _log.warning(
            "memory holds step %d, but not every rank finds what it needs on its own node (ranks moved, or the world "
            "changed): going on from the store",
            found.save.step,
        )
    return None


def rolled_back_to(remembered: MemoryCandidate, group: Group) -> MemoryCandidate:
    """The version alone, where a composite that borrows from it would go on at the version's own step: the version is
    the state of that step, and the composite is not. Only where it was kept to the last bit. For a job that goes on at
    effective steps. Collective."""
    files = remembered.catalog.files
    if remembered.commit == remembered.save or not isinstance(files, Overlay):
        return remembered
    alone = Catalog(files.alone(), remembered.catalog.record)

    def goes_back() -> bool:
        try:
            mixture, version = resolve(remembered.catalog, remembered.commit), resolve(alone, remembered.save)
        except StoreError:
            return False  # a resume will say it
        there = next(iter(run_saves(mixture, certify(mixture).effective_step)))
        return there == remembered.save and not certify(version).lossy

    if group.all_reduce_max([not files.whole])[0] or not run_on_rank0(group, goes_back):
        return remembered
    return replace(remembered, commit=remembered.save, catalog=alone, instead=remembered.catalog)


def newest_on_disk(catalog: Catalog, group: Group) -> Resolution | None:
    """The newest commit that is whole, below what memory has: what the job's next saves build on. Collective.

    None, on all ranks, where there is none: then the next save is a first one."""

    def name() -> str | None:
        catalog.forget()
        try:
            return newest_resumable(catalog)[0].manifest.save.name
        except StoreError:
            return None

    found = run_on_rank0(group, name)
    if found is None:
        return None
    try:
        return run_on_all_ranks(group, lambda: resolve(catalog, SaveId.parse(found)))
    except StoreError as error:
        _log.warning("the newest commit cannot be read, so that the next save is a full one: %s", error)
        return None


def _newest_suspect(catalog: Catalog) -> str | None:
    found = max(catalog.suspects().saves, default=None)
    return None if found is None else found.name


def _look(tier: Tier, catalog: Catalog, suspect: SaveId | None) -> NodeIndex:
    """What this node has, but for what is no newer than a state that jobs died of: it is that one, or as bad."""
    try:
        there = scan_node(tier)
        node = belonging_to(there, catalog.files)
    except (StoreError, OSError) as error:
        _log.warning("the memory tier cannot be read: %s", error)
        return NodeIndex({})
    for problem in node.problems:
        _log.warning("memory: %s", problem)
    if node.versions.keys() != there.versions.keys():
        _log.warning(
            "memory holds %s, of jobs on a copy of this store, or on what it was before it was restored: not used",
            ", ".join(str(save) for save in sorted(there.versions.keys() - node.versions.keys())),
        )
    sound = {save: held for save, held in node.versions.items() if suspect is None or save > suspect}
    if len(sound) < len(node.versions):
        _log.warning("what memory holds is not used: jobs died that resumed from %s (`driftpoint status`)", suspect)
    return NodeIndex(sound, node.problems)


def _on_disk(catalog: Catalog) -> _OnDisk | None:
    """None where nothing there can be resumed: what is damaged on disk may be whole in memory."""
    catalog.forget()
    try:
        manifest = newest_resumable(catalog)[0].manifest
    except StoreError:
        return None  # a resume from the store will say it
    oldest = min((unit.version for unit in manifest.units if unit.moving), default=manifest.save)
    return _OnDisk(manifest.save.name, oldest.name)


def _reaching(found: MemoryVersion, sights: list[_Sight], peers: Replication) -> MemoryVersion:
    """The version with what lies on other nodes; and they can read what lies on this one."""
    name = found.save.name
    peers.show({(found.save, rank): payload for rank, payload in found.payloads.items()})
    far = peers.far([sight.lying(name) for sight in sights])
    return replace(found, far={rank: RemotePayload(node, found.save, rank) for rank, node in far.items()})


def _replicas_of(name: str, sights: list[_Sight]) -> frozenset[int]:
    """Ranks of a version whose share is nowhere but as a replica."""
    lying = [item for sight in sights for item in sight.lying(name).items()]
    return frozenset({rank for rank, _ in lying} - {rank for rank, replica in lying if not replica})


def _over(
    catalog: Catalog,
    found: MemoryVersion | None,
    *,
    disk: _OnDisk | None,
    older: MemoryVersion | None,
    replicas: frozenset[int] = frozenset(),
) -> MemoryCandidate | None:
    """The store with the version on top; None where nothing in it is newer. older: between the two, if it is whole."""
    if found is None:
        return None
    newest = None if disk is None else SaveId.parse(disk.newest)
    if newest is None or found.save > newest:
        files = catalog.files if older is None else Overlay(catalog.files, older, _continued(older, newest))
        manifest = _continued(found, newest if older is None else older.save)
        whole = Catalog(Overlay(files, found, manifest), catalog.record)
        return MemoryCandidate(found.save, found.save, whole, replicas, older=None if older is None else older.save)
    composite = take_newer_units(catalog.manifest(newest), found.manifest)
    if composite is None:
        return None
    return MemoryCandidate(
        found.save, newest, Catalog(Overlay(catalog.files, found, composite), catalog.record), replicas
    )


def _continued(found: MemoryVersion, newest: SaveId | None) -> ManifestRecord:
    """The version's manifest, as what follows the newest commit of its own epoch, in which a job only goes forward.

    When it was kept that was not known to be committed; and what is wrong of the version falls back to it."""
    if newest is None or newest.epoch != found.save.epoch:
        return found.manifest
    return found.manifest.model_copy(update={"previous": newest.name})


def _before(name: str, node: NodeIndex, sights: list[_Sight], disk: _OnDisk | None) -> MemoryVersion | None:
    """The version before that one, of the same epoch and newer than every commit; on a single node, where all ranks can
    read all of it without being told."""
    save, newest = SaveId.parse(name), None if disk is None else SaveId.parse(disk.newest)
    if len({sight.node for sight in sights}) > 1:
        return None
    for other in sorted(node.versions, reverse=True):
        if other.epoch == save.epoch and other < save and (newest is None or other > newest):
            try:
                return assemble_version(other, [rank_share(node.versions[other])], node)
            except StoreError:  # not of all ranks
                continue
    return None


def _sight(tier: Tier, node: NodeIndex, disk: _OnDisk | None) -> _Sight:
    newer = {save: held for save, held in node.versions.items() if disk is None or save > SaveId.parse(disk.oldest)}
    return _Sight(
        node_id(tier),
        {save.name: tuple(sorted(held)) for save, held in newer.items()},
        {save.name: tuple(rank for rank in sorted(held) if held[rank].record.replica) for save, held in newer.items()},
    )


def _candidates(sights: list[_Sight]) -> list[str]:
    """Versions, newest first, of which some rank 0 is somewhere. The same list on all ranks."""
    ranks: dict[str, set[int]] = {}
    for sight in sights:
        for name, there in sight.versions.items():
            ranks.setdefault(name, set()).update(there)
    whole = [name for name, there in ranks.items() if there == set(range(len(there)))]
    return sorted(whole, key=SaveId.parse, reverse=True)


def _tells(sights: list[_Sight], rank: int) -> bool:
    """Whether this rank is the one that tells for its node."""
    return next(index for index, sight in enumerate(sights) if sight.node == sights[rank].node) == rank


def _put_together(save: SaveId, node: NodeIndex, group: Group, *, tells: bool) -> MemoryVersion | None:
    mine = rank_share(node.versions.get(save, {})) if tells else RankShare({}, None)
    shares = [RankShare(*told) for told in group.all_gather((dict(mine.parts), mine.head))]
    try:
        return assemble_version(save, shares, node)
    except StoreError as error:  # alike on all ranks: it is made of what all of them were told
        _log.warning("memory: %s", error)
        return None
