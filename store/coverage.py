"""Interval arithmetic: which stored pieces fill a wanted fragment, and where there are holes.

Every change of world size, of ZeRO stage or of framework is this and nothing else. Pure: no files, no bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from store.errors import DamagedError
from store.names import Fragment
from store.schema import Entry, PartRecord


@dataclass(frozen=True)
class Source:
    """A stored fragment and the part that holds it."""

    part: PartRecord
    entry: Entry


@dataclass(frozen=True)
class Copy:
    """``numel`` elements from ``source_start`` of the stored fragment go to ``target_start`` of the wanted one."""

    source: Source
    source_start: int
    target_start: int
    numel: int


class FragmentIndex:
    """Stored fragments by (fqn, slot), sorted by start."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._by_name: dict[tuple[str, str], list[Source]] = {}
        for source in sources:
            self._by_name.setdefault((source.entry.fqn, source.entry.slot), []).append(source)
        for name, found in self._by_name.items():
            # Empty fragments fill nothing and overlap nothing; one stays where it is all there is of a tensor.
            found[:] = [source for source in found if source.entry.numel] or found[:1]
            found.sort(key=lambda source: source.entry.start)
            _refuse_overlap(name, found)

    def names(self) -> Mapping[tuple[str, str], Sequence[Source]]:
        """All (fqn, slot) with their sources in order."""
        return self._by_name

    def dtype(self, fqn: str, slot: str) -> str | None:
        """dtype of a stored (fqn, slot), None where none is stored."""
        found = self._by_name.get((fqn, slot))
        return found[0].entry.dtype if found else None

    def cover(self, wanted: Fragment) -> list[Copy]:
        """Copies that fill ``wanted`` completely. DamagedError, naming the hole, where something is missing."""
        copies, position = [], wanted.start
        found = self._by_name.get((wanted.fqn, wanted.slot), [])
        first = max(0, bisect_right(found, wanted.start, key=lambda source: source.entry.start) - 1)
        for source in found[first:]:
            entry = source.entry
            if entry.start > position or position >= wanted.stop:
                break
            if entry.stop <= position:
                continue
            numel = min(entry.stop, wanted.stop) - position
            copies.append(Copy(source, position - entry.start, position - wanted.start, numel))
            position += numel
        if position < wanted.stop:
            raise DamagedError(
                f"{wanted.fqn}/{wanted.slot}: elements {position} to {wanted.stop} are in no stored fragment"
            )
        return copies


def covered_numel(entries: Iterable[Entry]) -> int:
    """Elements in a set of fragments. DamagedError where two overlap."""
    by_name: dict[tuple[str, str], list[Entry]] = {}
    total = 0
    for entry in entries:
        if entry.numel == 0:
            continue
        by_name.setdefault((entry.fqn, entry.slot), []).append(entry)
        total += entry.numel
    for name, found in by_name.items():
        found.sort(key=lambda entry: entry.start)
        for before, after in pairwise(found):
            if before.stop > after.start:
                raise DamagedError(_overlap(name, before, after))
    return total


def _refuse_overlap(name: tuple[str, str], found: Sequence[Source]) -> None:
    for before, after in pairwise(found):
        if before.entry.stop > after.entry.start:
            raise DamagedError(_overlap(name, before.entry, after.entry))


def _overlap(name: tuple[str, str], before: Entry, after: Entry) -> str:
    spans = f"[{before.start}, {before.stop}) and [{after.start}, {after.stop})"
    return f"{name[0]}/{name[1]}: stored fragments {spans} overlap"
