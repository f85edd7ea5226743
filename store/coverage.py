"""Interval arithmetic: which stored pieces fill a wanted fragment, and where there are holes.

Every change of world size, of ZeRO stage or of framework is this and nothing else. Pure: no files, no bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, Protocol, TypeVar

from store.errors import DamagedError
from store.names import Fragment
from store.schema import Entry, PartRecord


class Span(Protocol):
    """Elements [start, stop) of a flattened (fqn, slot), wherever they are kept."""

    @property
    def fqn(self) -> str:
        """Full name of the parameter or buffer."""
        ...

    @property
    def slot(self) -> str:
        """The slot."""
        ...

    @property
    def start(self) -> int:
        """First element."""
        ...

    @property
    def stop(self) -> int:
        """One past the last element."""
        ...

    @property
    def dtype(self) -> str:
        """As safetensors names it."""
        ...


S = TypeVar("S", bound=Span)


@dataclass(frozen=True)
class Source:
    """A stored fragment and the part that holds it. A :class:`Span`. base: what it is stored as the difference to."""

    part: PartRecord
    entry: Entry
    base: Source | None = None

    @property
    def fqn(self) -> str:
        """Full name of the parameter or buffer."""
        return self.entry.fqn

    @property
    def slot(self) -> str:
        """The slot."""
        return self.entry.slot

    @property
    def start(self) -> int:
        """First element."""
        return self.entry.start

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.entry.stop

    @property
    def dtype(self) -> str:
        """Of the values, before encoding."""
        return self.entry.dtype


@dataclass(frozen=True)
class Copy(Generic[S]):
    """``numel`` elements from ``source_start`` of the stored fragment go to ``target_start`` of the wanted one."""

    source: S
    source_start: int
    target_start: int
    numel: int


class FragmentIndex(Generic[S]):
    """Stored fragments by (fqn, slot), sorted by start."""

    def __init__(self, sources: Iterable[S]) -> None:
        self._by_name: dict[tuple[str, str], list[S]] = {}
        for source in sources:
            self._by_name.setdefault((source.fqn, source.slot), []).append(source)
        for name, found in self._by_name.items():
            # Empty fragments fill nothing and overlap nothing; one stays where it is all there is of a tensor.
            found[:] = [source for source in found if source.stop > source.start] or found[:1]
            found.sort(key=lambda source: source.start)
            _refuse_overlap(name, found)

    def names(self) -> Mapping[tuple[str, str], Sequence[S]]:
        """All (fqn, slot) with their sources in order."""
        return self._by_name

    def dtype(self, fqn: str, slot: str) -> str | None:
        """dtype of a stored (fqn, slot), None where none is stored."""
        found = self._by_name.get((fqn, slot))
        return found[0].dtype if found else None

    def cover(self, wanted: Fragment) -> list[Copy[S]]:
        """Copies that fill ``wanted`` completely. DamagedError, naming the hole, where something is missing."""
        copies, position = [], wanted.start
        found = self._by_name.get((wanted.fqn, wanted.slot), [])
        first = max(0, bisect_right(found, wanted.start, key=lambda source: source.start) - 1)
        for source in found[first:]:
            if source.start > position or position >= wanted.stop:
                break
            if source.stop <= position:
                continue
            numel = min(source.stop, wanted.stop) - position
            copies.append(Copy(source, position - source.start, position - wanted.start, numel))
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
        _refuse_overlap(name, found)
    return total


def _refuse_overlap(name: tuple[str, str], found: Sequence[Span]) -> None:
    for before, after in pairwise(found):
        if before.stop > after.start:
            spans = f"[{before.start}, {before.stop}) and [{after.start}, {after.stop})"
            raise DamagedError(f"{name[0]}/{name[1]}: stored fragments {spans} overlap")
