"""Which stored fragment another one is the difference to. One level deep: a base is never a difference itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from store.catalog import LoadedGroup
from store.coverage import Source
from store.errors import DamagedError
from store.schema import Entry, PartRecord

_Key = tuple[str, str, int, int, str, str]


def with_bases(stored: Sequence[tuple[PartRecord, Entry]], groups: Iterable[LoadedGroup]) -> tuple[Source, ...]:
    """Stored fragments of one unit, each with its base from ``groups``. DamagedError where one is not to be found."""
    units = {entry.unit for _, entry in stored if entry.base is not None}
    bases = {
        (group.save.name, _key(entry)): Source(part, entry)
        for group in groups
        for unit in units
        for part, entry in group.by_unit.get(unit, ())
        if entry.base is None
    }
    return tuple(Source(part, entry, _base_of(part, entry, bases)) for part, entry in stored)


def _base_of(part: PartRecord, entry: Entry, bases: dict[tuple[str, _Key], Source]) -> Source | None:
    if entry.base is None:
        return None
    found = bases.get((entry.base, _key(entry)))
    if found is None:
        raise DamagedError(
            f"save {part.save} holds elements {entry.start} to {entry.stop} of {entry.fqn}/{entry.slot} as the "
            f"difference to {entry.base}, where they are not to be found as {entry.encoding}"
        )
    return found


def _key(entry: Entry) -> _Key:
    """The same for the same fragment, encoded in the same way."""
    return entry.fqn, entry.slot, entry.start, entry.numel, entry.dtype, entry.encoding
