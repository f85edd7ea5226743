"""Which versions lie in the memory of this node: every rank's records, each checked against itself and its payload.

Reads only. Payloads are not read here, only their sizes looked at: their hashes are checked by whoever reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from store.errors import DamagedError, MissingError, StoreError
from store.memory.record import RECORD_LIMIT, VersionRecord, parse_record
from store.memory.tier import SLOTS, Generation, Tier, read_whole
from store.names import SaveId
from store.schema import to_bytes
from store.segments import parse_part


@dataclass(frozen=True)
class Held:
    """One rank's share of a version, on this node."""

    record: VersionRecord
    payload: Path

    @cached_property
    def part(self) -> bytes:
        """The part as a store would hold it: the same bytes wherever they are made."""
        return to_bytes(self.record.part)


@dataclass(frozen=True)
class Node:
    """What this node holds of one store. problems: what is there and cannot be believed.

    others: of saves and ranks that are among ``versions``, too: jobs on copies of the store name theirs alike."""

    versions: Mapping[SaveId, Mapping[int, Held]]
    problems: tuple[str, ...] = ()
    others: tuple[Held, ...] = ()

    def everything(self) -> Iterator[Held]:
        """Whatever is there."""
        for held in self.versions.values():
            yield from held.values()
        yield from self.others

    @property
    def newest(self) -> SaveId | None:
        """Of the versions that any rank has."""
        return max(self.versions, default=None)


def look(tier: Tier) -> Node:
    """What there is. StorageError where the folder is not this user's own."""
    versions: dict[SaveId, dict[int, Held]] = {}
    problems: list[str] = []
    others: list[Held] = []
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
    return Node(versions, tuple(problems), tuple(others))


def version_in(place: Generation, rank: int, slot: int) -> SaveId | None:
    """What a payload is a version of; None where it is none, or cannot be read."""
    try:
        return _held(place, rank, slot).record.save
    except StoreError:
        return None


def _held(place: Generation, rank: int, slot: int) -> Held:
    path, payload = place.record(rank, slot), place.payload(rank, slot)
    record = parse_record(read_whole(path, RECORD_LIMIT), str(path))
    held = Held(record, payload)
    parse_part(held.part, place.tier.store_id, record.save, rank)
    try:
        nbytes = payload.lstat().st_size
    except OSError as error:
        raise DamagedError(f"{payload} is not there, though {path.name} describes it") from error
    if nbytes < record.part.payload_bytes:
        raise DamagedError(f"{payload} has {nbytes} bytes instead of {record.part.payload_bytes}")
    return held
