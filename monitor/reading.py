"""Reading a commit's tensors into host memory, as far as this rank needs them: checked, and nothing live touched.

Reading is interval arithmetic over stored fragments, so another world size, ZeRO stage or framework is nothing
special. What cannot be read is told to the caller, who falls back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

import torch

from monitor.adapters.base import Place
from monitor.dtypes import torch_dtype
from monitor.fit import loss
from monitor.staging import as_bytes
from store.ahead import Ahead
from store.catalog import Catalog
from store.coverage import Copy, FragmentIndex, Source
from store.errors import DamagedError, MissingError, ModelMismatchError, StorageError, UnreachableError
from store.files import Files
from store.fragments import FragmentReader
from store.names import BUFFER, FROZEN, RAW, WEIGHTS, Fragment, SaveId
from store.segments import read_entry
from store.versions import Bad, Resolution

T = TypeVar("T")


class Room:
    """Host memory to read into, by fragment. What is not there is made, and stays for whoever gave the room."""

    def __init__(self, buffers: Mapping[Fragment, torch.Tensor] = MappingProxyType({})) -> None:
        self.buffers = dict(buffers)

    def at(self, fragment: Fragment, dtype: torch.dtype) -> torch.Tensor:
        """1-d, of the fragment's size and ``dtype``; contents undefined."""
        found = self.buffers.get(fragment)
        if found is None or found.dtype != dtype or found.numel() != fragment.numel:
            found = self.buffers[fragment] = torch.empty(fragment.numel, dtype=dtype)
        return found


@dataclass(frozen=True)
class Read:
    """Every value that a rank needs, in host memory and checked.

    values: for each live fragment, 1-d, in the dtype as stored. bad: what is not as it was committed, or what storage
    keeps refusing; the rest is no use then. notes: what starts afresh. rounded: what the live dtypes cannot hold."""

    values: Mapping[Fragment, torch.Tensor]
    bad: frozenset[Bad]
    notes: tuple[str, ...]
    rounded: tuple[str, ...]


def read(catalog: Catalog, resolution: Resolution, places: Sequence[Place], room: Room) -> Read:
    """Read what ``places`` need. ModelMismatchError where the live dtypes cannot take it; UnreachableError."""
    index = FragmentIndex(resolution.sources())
    bad: set[Bad] = set()
    notes: list[str] = []
    values: dict[Fragment, torch.Tensor] = {}
    rounded: set[str] = set()
    found = [(place, _wanted(index, place.fragment, notes)) for place in places]
    covers = [(place, wanted, index.cover(wanted)) for place, wanted in found if wanted is not None]
    ahead = Ahead(catalog.files, (copy.source for _, _, copies in covers for copy in copies))
    for place, wanted, copies in covers:
        fragment = place.fragment
        host = room.at(fragment, torch_dtype(index.dtype(wanted.fqn, wanted.slot) or ""))
        ahead.reading(sum(copy.source.entry.nbytes for copy in copies))
        _fill(catalog, copies, host, bad)
        lost = loss(host, place)
        if lost is not None:
            rounded.add(lost)
        values[fragment] = host
    return Read(values, frozenset(bad), tuple(notes), tuple(sorted(rounded)))


def _wanted(index: FragmentIndex[Source], fragment: Fragment, notes: list[str]) -> Fragment | None:
    """What of the store a live fragment needs; None, and a note, where it starts afresh."""
    slot = stored_slot(index, fragment)
    if slot is None and fragment.slot in (WEIGHTS, FROZEN, BUFFER):
        raise ModelMismatchError(f"the store holds no values of {fragment.fqn}, though it names it")
    if slot is None:
        notes.append(f"{fragment.fqn}/{fragment.slot} is not in the store and starts afresh")
        return None
    return Fragment(fragment.fqn, slot, fragment.start, fragment.numel)


def stored_slot(index: FragmentIndex[Source], fragment: Fragment) -> str | None:
    """The slot that a live fragment's values are stored under; None where there are none.

    A parameter may have been frozen or unfrozen since; its values are its values."""
    options = {WEIGHTS: (WEIGHTS, FROZEN), FROZEN: (FROZEN, WEIGHTS)}.get(fragment.slot, (fragment.slot,))
    stored = [slot for slot in options if index.dtype(fragment.fqn, slot) is not None]
    return max(stored, key=lambda slot: index.names()[fragment.fqn, slot][0].part.save, default=None)


def _fill(catalog: Catalog, copies: Iterable[Copy[Source]], host: torch.Tensor, bad: set[Bad]) -> None:
    for copy in copies:
        target = host[copy.target_start : copy.target_start + copy.numel]
        fault = _Fault(copy.source.part.save)
        try:
            patiently(lambda: _fetch(catalog.files, copy, target, fault))  # noqa: B023
        except UnreachableError:
            raise
        except (DamagedError, StorageError):
            bad.add(Bad(fault.save, copy.source.entry.unit))


@dataclass
class _Fault:
    """The save whose bytes were wrong, where any are: that of the fragment, or of its base."""

    save: SaveId


def _fetch(files: Files, copy: Copy[Source], target: torch.Tensor, fault: _Fault) -> None:
    part, entry = copy.source.part, copy.source.entry
    if entry.encoding == RAW and entry.packing is None and copy.numel == entry.numel:
        read_entry(files, part, entry, as_bytes(target))
        return
    reader, position = FragmentReader(files, copy.source), -copy.source_start
    try:
        for chunk in reader.chunks():
            values = torch.from_numpy(chunk).view(target.dtype)
            first, after = max(0, -position), min(values.numel(), target.numel() - position)
            if first < after:
                target[position + first : position + after] = values[first:after]
            position += values.numel()
    except (DamagedError, StorageError):
        fault.save = reader.at_fault
        raise


def patiently(attempt: Callable[[], T]) -> T:
    """The attempt's result. What a disk refuses once it may give the next time; what a bucket does, was asked for."""
    for pause in (0.1, 1.0):
        try:
            return attempt()
        except (MissingError, UnreachableError):
            raise
        except StorageError:
            time.sleep(pause)
    return attempt()
