"""What a rank must read of a version in memory and has not on its own node: told by rank 0, where that has it.

Ranks of ZeRO need little but their own payload: buffers that all of them hold, which one rank keeps, and the counters,
which rank 0 keeps. That is broadcast. More than that is not: a resume from the store is what it is there for.
Collective; before anything is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from monitor.adapters.base import Adapter
from monitor.agree import everywhere
from monitor.group import Group
from monitor.reading import stored_slot
from store.catalog import Catalog
from store.coverage import FragmentIndex
from store.errors import StoreError, UsageError
from store.memory.overlay import Overlay
from store.memory.version import MemoryVersion, Piece
from store.names import Fragment, SaveId
from store.versions import Resolution, resolve

LIMIT = 64 << 20
"""Bytes that rank 0 tells the others at most."""


def lent(
    catalog: Catalog, commit: SaveId, version: MemoryVersion, adapter: Adapter | None, group: Group
) -> Mapping[Piece, bytes] | None:
    """What the ranks lack of the version, on all of them; None where it is not to be had.

    catalog: the store with the version on top; commit: what is to be resumed of it. adapter: None: run states only."""
    lacks = group.gather(everywhere(group, partial(_lacking, catalog, commit, version, adapter, group.rank)))
    if any(one is None for one in lacks):
        return None
    wanted = sorted(set().union(*lacks))
    if not wanted:
        return {}
    if sum(nbytes for _, _, nbytes in wanted) > LIMIT:
        return None
    told: dict[Piece, bytes] | None = group.from_first(
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
