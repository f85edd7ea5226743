"""The record of one rank's version in memory. Written last, under its name at once: it is what makes the version."""

from __future__ import annotations

from store.errors import DamagedError, NewerFormatError
from store.names import SaveId
from store.record import unseal
from store.schema import Digest, ManifestRecord, Natural, PartRecord, Record, from_bytes

RECORD_LIMIT = 1 << 28
"""Bytes; as large as a part may be."""

READER = 1
"""What a reader must know to read what is written now."""


class VersionRecord(Record):
    """One rank's share of a version.

    claim: token of the claim of its epoch: a copy of the store whose job took that number, too, has another. part: as
    in a store; offsets count from the payload's beginning. head: rank 0's: the manifest that a commit of this
    version would have, but for the group of its own segments, which only all ranks' parts tell. replica: the rank was
    on another node, and this is what a peer kept of it."""

    reader: Natural
    claim: Digest
    part: PartRecord
    head: ManifestRecord | None = None
    replica: bool = False

    @property
    def save(self) -> SaveId:
        """What the version is called: as a save would be."""
        return self.part.save


def parse_record(data: bytes, what: str) -> VersionRecord:
    """DamagedError or NewerFormatError, naming ``what``, unless it is whole and for this release."""
    body = unseal(data, what)
    reader = body.get("reader") if isinstance(body, dict) else None
    if isinstance(reader, int) and reader > READER:
        raise NewerFormatError(f"{what} was written by a newer release; run `pip install --upgrade driftpoint`")
    record = from_bytes(VersionRecord, data, what)
    part, head = record.part, record.head
    if part.header_bytes:
        raise DamagedError(f"{what}: a payload in memory has no header")
    if head is not None and (head.store_id, head.save, head.world_size) != (part.store_id, part.save, part.world_size):
        raise DamagedError(f"{what}: its head is of another save than its part")
    return record
