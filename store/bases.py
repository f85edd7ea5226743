"""Which stored fragment another one is the difference to. One level deep: a base is never a difference itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from store.catalog import LoadedGroup
from store.coverage import Source
from store.errors import DamagedError
from store.schema import Entry, PartRecord

Key = tuple[str, str, str, int, int, str, str]
"""A save, and what is the same for the same fragment encoded in the same way."""


def with_bases(stored: Sequence[tuple[PartRecord, Entry]], groups: Iterable[LoadedGroup]) -> tuple[Source, ...]:
    """Stored fragments of one unit, each with its base from ``groups``. DamagedError where one is not to be found."""
    units = {entry.unit for _, entry in stored if entry.base is not None}
    bases = stored_whole(pair for group in groups for unit in units for pair in group.by_unit.get(unit, ()))
    return tuple(Source(part, entry, _base_of(part, entry, bases)) for part, entry in stored)


def stored_whole(stored: Iterable[tuple[PartRecord, Entry]]) -> dict[Key, Source]:
    """The fragments that may be bases, by the :func:`base_key` of those that are differences to them."""
    return {whole_key(part, entry): Source(part, entry) for part, entry in stored if entry.base is None}


def base_key(entry: Entry) -> Key | None:
    """Where :func:`stored_whole` has what the entry is the difference to. None where it is stored whole itself."""
    return None if entry.base is None else _key(entry.base, entry)


def whole_key(part: PartRecord, entry: Entry) -> Key:
    """Where :func:`stored_whole` has the entry itself."""
    return _key(part.save.name, entry)


def _base_of(part: PartRecord, entry: Entry, bases: Mapping[Key, Source]) -> Source | None:
    key = base_key(entry)
    if key is None:
        return None
    if key not in bases:
        raise DamagedError(
            f"save {part.save} holds elements {entry.start} to {entry.stop} of {entry.fqn}/{entry.slot} as the "
            f"difference to {entry.base}, where they are not to be found as {entry.encoding}"
        )
    return bases[key]


def _key(save: str, entry: Entry) -> Key:
    return save, entry.fqn, entry.slot, entry.start, entry.numel, entry.dtype, entry.encoding
