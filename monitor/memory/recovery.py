"""Find, at a resume, the newest snapshot in memory that every rank can read. Collective; changes nothing.

Ranks on different nodes see different memory. So each reports the versions on its node, all of them choose the same one
and assemble it, and use it only if every rank finds the bytes that it needs on its own node, or can get them: from
another node (:mod:`monitor.memory.replication`), or by a broadcast from rank 0. ZeRO ranks need little besides their
own payload: buffers, which one rank keeps, and rank 0's run state. If more is missing, the store alone is used."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from monitor.adapters.base import Adapter
from monitor.distributed import Group, node_id, run_on_all_ranks, run_on_rank0
from monitor.memory.replication import Replication
from store.catalog import Catalog
from store.certificate import certify, run_saves
from store.errors import StoreError, UsageError
from store.fragments import stored_slot
from store.memory import index
from store.memory.layout import Tier
from store.memory.overlay import Overlay
from store.names import SaveId
from store.resolve import Resolution, newest_resumable, resolve
from store.schema import ManifestRecord

_log = logging.getLogger("driftpoint")
_BROADCAST_LIMIT = 64 << 20  # maximum bytes that rank 0 broadcasts


@dataclass(frozen=True)
class MemoryCandidate:
    """A snapshot in memory, and the store with the snapshot on top."""

    save: SaveId
    commit: SaveId  # what to resume: the snapshot itself, or a commit some of whose layers are older than in memory
    catalog: Catalog
    replicas: frozenset[int] = frozenset()  # ranks whose own memory is lost, so that their replica is used
    instead: Catalog | None = None  # second choice, before the store alone, if nothing in ``catalog`` is intact
    older: SaveId | None = None  # the previous snapshot, from which damaged layers are taken


@dataclass(frozen=True)
class _NewestCommit:
    """The newest commit that can be resumed, and the oldest version of a moving layer in it."""

    newest: SaveId
    oldest: SaveId


@dataclass(frozen=True)
class _NodeReport:
    """The snapshots on a rank's node that are newer than the commit on disk."""

    node: str
    versions: Mapping[str, Mapping[int, bool]]  # snapshot -> rank whose share is there -> whether it is a replica


def find_newest_snapshot(
    tier: Tier, catalog: Catalog, adapter: Adapter | None, group: Group, replication: Replication | None = None
) -> MemoryCandidate | None:
    """Find the newest snapshot that every rank can read and that is newer, at least in part, than the newest commit.

    None, on all ranks, if the store is as good. adapter: None before the model exists; then only run states are needed.
    replication: reads from other nodes."""
    suspect = run_on_rank0(group, lambda: max(catalog.suspects().saves, default=None))
    node = _scan(tier, catalog, suspect)
    on_disk = run_on_rank0(group, lambda: _newest_commit(catalog))
    newer = {save: held for save, held in node.versions.items() if on_disk is None or save > on_disk.oldest}
    versions = {save.name: {rank: held[rank].record.replica for rank in sorted(held)} for save, held in newer.items()}
    reports = group.all_gather(_NodeReport(node_id(tier), versions))
    nodes = [report.node for report in reports]
    first_on_node = nodes.index(nodes[group.rank]) == group.rank
    for name in _candidates(reports):
        version = _assemble(SaveId.parse(name), node, group, contributes=first_on_node)
        older = run_on_all_ranks(group, partial(_previous_snapshot, name, node, reports, on_disk))
        over_store = partial(_overlaid, catalog, on_disk=on_disk, older=older)
        candidate = run_on_all_ranks(group, partial(over_store, version))
        if version is None or candidate is None:
            continue
        if replication is not None and replication.reachable:
            replication.serve({(version.save, rank): payload for rank, payload in version.payloads.items()})
            remote = replication.remote_nodes([report.versions.get(name, {}) for report in reports])
            far = {rank: partial(node.read, version.save, rank) for rank, node in remote.items()}
            return over_store(replace(version, far=far), replicas=_replicas_of(name, reports))
        lent = _broadcast_missing(candidate.catalog, candidate.commit, version, adapter, group)
        if lent is not None:
            return over_store(replace(version, lent=lent), replicas=_replicas_of(name, reports))
        _log.warning(
            "memory holds step %d, but not every rank finds the bytes that it needs on its own node (ranks moved, or "
            "the world size changed): resuming from the store",
            version.save.step,
        )
    return None


def rolled_back_to(candidate: MemoryCandidate, group: Group) -> MemoryCandidate:
    """Return the snapshot alone, if the composite with it would resume at the snapshot's own step. Collective.

    At that step the snapshot, if lossless, is exact; the composite is not. For jobs that resume at effective steps."""
    files = candidate.catalog.files
    if candidate.commit == candidate.save or not isinstance(files, Overlay):
        return candidate
    alone = Catalog(files.alone(), candidate.catalog.record)

    def prefers_snapshot() -> bool:
        try:
            mixture, version = resolve(candidate.catalog, candidate.commit), resolve(alone, candidate.save)
        except StoreError:
            return False  # the resume reports it
        resumed = next(iter(run_saves(mixture, certify(mixture).effective_step)))
        return resumed == candidate.save and not certify(version).lossy

    if group.all_reduce_max([not files.whole])[0] or not run_on_rank0(group, prefers_snapshot):
        return candidate
    return replace(candidate, commit=candidate.save, catalog=alone, instead=candidate.catalog)


def newest_on_disk(catalog: Catalog, group: Group) -> Resolution | None:
    """Return the newest intact commit in the store, which the next saves build on. Collective.

    None, on all ranks, if there is none: then the next save is a full one."""
    commit = run_on_rank0(group, partial(_newest_commit, catalog))
    if commit is None:
        return None
    try:
        return run_on_all_ranks(group, partial(resolve, catalog, commit.newest))
    except StoreError as error:
        _log.warning("the newest commit cannot be read, so the next save is a full one: %s", error)
        return None


def _scan(tier: Tier, catalog: Catalog, suspect: SaveId | None) -> index.NodeIndex:
    """Return the snapshots on this node that are newer than ``suspect``: a save from which jobs resumed and died."""
    try:
        there = index.scan_node(tier)
        node = index.belonging_to(there, catalog.files)
    except (StoreError, OSError) as error:
        _log.warning("the memory tier cannot be read: %s", error)
        return index.NodeIndex({})
    for problem in node.problems:
        _log.warning("memory: %s", problem)
    if node.versions.keys() != there.versions.keys():
        _log.warning(
            "memory holds %s of jobs on a copy of this store, or from before the store was restored: not used",
            ", ".join(str(save) for save in sorted(there.versions.keys() - node.versions.keys())),
        )
    sound = {save: held for save, held in node.versions.items() if suspect is None or save > suspect}
    if len(sound) < len(node.versions):
        _log.warning("memory is not used: jobs that resumed from %s died; see `driftpoint status`", suspect)
    return index.NodeIndex(sound, node.problems)


def _newest_commit(catalog: Catalog) -> _NewestCommit | None:
    """Return the newest commit on disk; None if none can be resumed. Memory may be intact even then."""
    catalog.forget()
    try:
        manifest = newest_resumable(catalog)[0].manifest
    except StoreError:
        return None  # a resume from the store reports it
    return _NewestCommit(manifest.save, manifest.oldest)


def _replicas_of(name: str, reports: list[_NodeReport]) -> frozenset[int]:
    owners = [item for report in reports for item in report.versions.get(name, {}).items()]
    return frozenset({rank for rank, _ in owners} - {rank for rank, replica in owners if not replica})


def _overlaid(
    catalog: Catalog,
    version: index.MemoryVersion | None,
    *,
    on_disk: _NewestCommit | None,
    older: index.MemoryVersion | None,
    replicas: frozenset[int] = frozenset(),
) -> MemoryCandidate | None:
    """Return the store with the snapshot on top, and ``older`` in between; None if nothing in it is newer."""
    if version is None:
        return None
    newest = None if on_disk is None else on_disk.newest
    if newest is None or version.save > newest:
        files = catalog.files if older is None else Overlay(catalog.files, older, _with_previous(older, newest))
        manifest = _with_previous(version, newest if older is None else older.save)
        whole = Catalog(Overlay(files, version, manifest), catalog.record)
        return MemoryCandidate(version.save, version.save, whole, replicas, older=None if older is None else older.save)
    composite = index.take_newer_units(catalog.manifest(newest), version.manifest)
    if composite is None:
        return None
    whole = Catalog(Overlay(catalog.files, version, composite), catalog.record)
    return MemoryCandidate(version.save, newest, whole, replicas)


def _with_previous(version: index.MemoryVersion, newest: SaveId | None) -> ManifestRecord:
    """Return the snapshot's manifest with ``newest`` as ``previous``, if that is of the same epoch, so before it.

    When the snapshot was taken, that save may not have been known. Damaged layers fall back to it."""
    if newest is None or newest.epoch != version.save.epoch:
        return version.manifest
    return version.manifest.replace(previous=newest.name)


def _previous_snapshot(
    name: str, node: index.NodeIndex, reports: list[_NodeReport], on_disk: _NewestCommit | None
) -> index.MemoryVersion | None:
    """Return the newest snapshot before ``name`` that is of the same epoch and newer than every commit.

    Only on a single node, where all ranks can read all of it."""
    save, newest = SaveId.parse(name), None if on_disk is None else on_disk.newest
    if len({report.node for report in reports}) > 1:
        return None
    for other in sorted(node.versions, reverse=True):
        if other.epoch == save.epoch and other < save and (newest is None or other > newest):
            try:
                return index.assemble_version(other, [index.rank_share(node.versions[other])], node)
            except StoreError:  # not of all ranks
                continue
    return None


def _candidates(reports: list[_NodeReport]) -> list[str]:
    """Return the snapshots of which the shares of ranks 0 to n exist, newest first. The same on all ranks."""
    ranks: dict[str, set[int]] = {}
    for report in reports:
        for name, there in report.versions.items():
            ranks.setdefault(name, set()).update(there)
    whole = [name for name, there in ranks.items() if there == set(range(len(there)))]
    return sorted(whole, key=SaveId.parse, reverse=True)


def _assemble(save: SaveId, node: index.NodeIndex, group: Group, *, contributes: bool) -> index.MemoryVersion | None:
    local = index.rank_share(node.versions.get(save, {})) if contributes else index.RankShare({}, None)
    shares = [index.RankShare(*share) for share in group.all_gather((dict(local.parts), local.head))]
    try:
        return index.assemble_version(save, shares, node)
    except StoreError as error:  # the same on all ranks: they have the same shares
        _log.warning("memory: %s", error)
        return None


def _broadcast_missing(
    catalog: Catalog, commit: SaveId, version: index.MemoryVersion, adapter: Adapter | None, group: Group
) -> Mapping[index.Piece, bytes] | None:
    """Return the bytes of the snapshot that ranks lack, on all of them; None if rank 0 cannot provide them.

    catalog: the store with the snapshot on top. adapter: None if only run states are needed."""
    missing = run_on_all_ranks(group, partial(_missing_pieces, catalog, commit, version, adapter, group.rank))
    by_rank = group.all_gather(missing)
    if any(one is None for one in by_rank):
        return None
    wanted = sorted(set().union(*by_rank))
    if not wanted:
        return {}
    if sum(nbytes for _, _, nbytes in wanted) > _BROADCAST_LIMIT:
        return None
    pieces = _read_pieces(catalog, version, wanted) if group.rank == 0 else None
    received: dict[index.Piece, bytes] | None = group.broadcast(pieces)
    return received


def _read_pieces(
    catalog: Catalog, version: index.MemoryVersion, wanted: list[index.Piece]
) -> dict[index.Piece, bytes] | None:
    files, pieces = Overlay(catalog.files, version), {}
    for rank, offset, nbytes in wanted:
        data = bytearray(nbytes)
        try:
            files.read_payload(rank, offset, memoryview(data))
        except StoreError:
            return None
        pieces[rank, offset, nbytes] = bytes(data)
    return pieces


def _missing_pieces(
    catalog: Catalog, commit: SaveId, version: index.MemoryVersion, adapter: Adapter | None, rank: int
) -> set[index.Piece] | None:
    """Return the pieces of the snapshot that this rank reads and whose payload is on another node; None if unknown."""
    if len(version.payloads) == len(version.parts):
        return set()
    first = version.records[0]
    parts = (first, version.records.get(rank, first))
    run_state = {(part.rank, tensor.offset, tensor.nbytes) for part in parts for tensor in part.run_tensors}
    try:
        entries = set() if adapter is None else _needed_entries(resolve(catalog, commit), version.save, adapter)
    except StoreError:
        return None
    return {piece for piece in run_state | entries if piece[0] not in version.payloads and piece[2]}


def _needed_entries(resolution: Resolution, save: SaveId, adapter: Adapter) -> set[index.Piece]:
    stored = resolution.index
    try:
        places = adapter.expected(resolution.slots())
    except UsageError:
        return set()  # the resume reports it
    pieces = set()
    for place in places:
        slot = stored_slot(stored, place.fragment)
        if slot is None:
            continue
        for copy in stored.cover(place.fragment._replace(slot=slot)):
            part, entry = copy.source.part, copy.source.entry
            if part.save == save:
                pieces.add((part.rank, entry.offset, entry.nbytes))
    return pieces
