"""How often a job was interrupted so far, and for how long it ran: told from its epochs.

An incarnation is the processes of a job from one start to their end; its first epoch's record says what was counted
before it, so that reading the newest one is enough. Counted is an incarnation that committed something: its time up to
its newest commit, and one interruption unless it was closed. What ended before its first commit trained next to
nothing (a wrong setting, a crash while starting) and counts as neither.

It does not know what an incarnation ended of, and whether anyone is alive. What cannot be read counts as not there.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from store.catalog import Catalog
from store.durable import write_new
from store.epochs import newest_epoch, read_epoch
from store.errors import DamagedError, ExistsError, MissingError, StorageError
from store.files import Files
from store.layout import closed_path
from store.schema import ClosedRecord, EpochRecord, IncarnationRecord, from_bytes, to_bytes

_LIMIT = 1 << 16
_LOOK_BACK = 20
"""Epochs, and commits, that are looked at: those of an import, say, belong to no incarnation."""


@dataclass(frozen=True)
class Tally:
    """What was counted. rank_seconds: world size x seconds, over all incarnations."""

    interruptions: int = 0
    rank_seconds: float = 0.0


def begin_incarnation(catalog: Catalog, world_size: int) -> IncarnationRecord:
    """The record of an incarnation that begins now, to go into the epochs that it claims. Nothing is written."""
    return new_incarnation(tally(catalog), world_size)


def new_incarnation(before: Tally, world_size: int) -> IncarnationRecord:
    """As above, where it is known what was counted before."""
    return IncarnationRecord(
        token=secrets.token_hex(16),
        world_size=world_size,
        began=datetime.now(UTC).isoformat(timespec="milliseconds"),
        interruptions=before.interruptions,
        rank_seconds=before.rank_seconds,
    )


def tally(catalog: Catalog) -> Tally:
    """Of all incarnations up to the newest one, as it was when it ended."""
    newest = _newest(catalog.files)
    if newest is None or newest.incarnation is None:
        return Tally()
    last = newest.incarnation
    closed = _closed(catalog, newest.epoch)
    seconds = closed.seconds if closed is not None else _seconds(catalog, last, newest.epoch)
    if seconds is None:
        return Tally(last.interruptions, last.rank_seconds)
    interrupted = 0 if closed is not None else 1
    return Tally(last.interruptions + interrupted, last.rank_seconds + last.world_size * seconds)


def mark_closed(files: Files, store_id: str, epoch: int, seconds: float) -> None:
    """Record that the owner of an epoch ends as it was meant to. A second mark changes nothing."""
    data = to_bytes(ClosedRecord(store_id=store_id, epoch=epoch, seconds=max(0.0, seconds)))
    with suppress(ExistsError):
        write_new(files, closed_path(epoch), lambda file: file.write(data))


def is_closed(catalog: Catalog, epoch: int) -> bool:
    """Whether the owner of an epoch came to its end as it was meant to. What cannot be read says no."""
    try:
        return _closed(catalog, epoch) is not None
    except StorageError:
        return False


def _newest(files: Files) -> EpochRecord | None:
    newest = newest_epoch(files)
    for epoch in range(newest, max(0, newest - _LOOK_BACK), -1):
        with suppress(DamagedError, MissingError):
            record = read_epoch(files, epoch)
            if record.incarnation is not None:
                return record
    return None


def _closed(catalog: Catalog, epoch: int) -> ClosedRecord | None:
    path = closed_path(epoch)
    try:
        found = from_bytes(ClosedRecord, catalog.files.read(path, _LIMIT), path)
    except (DamagedError, MissingError):
        return None
    return found if (found.store_id, found.epoch) == (catalog.store_id, epoch) else None


def _seconds(catalog: Catalog, incarnation: IncarnationRecord, newest: int) -> float | None:
    """From the beginning of an incarnation to its newest commit; None where it made none."""
    began = _moment(incarnation.began)
    for save in [save for save in catalog.saves() if save.epoch <= newest][:_LOOK_BACK]:
        with suppress(DamagedError, MissingError):
            if read_epoch(catalog.files, save.epoch).incarnation != incarnation:
                return None  # commits of older ones are all that is left
            created = _moment(catalog.manifest(save).created)
            if began is not None and created is not None:
                return max(0.0, (created - began).total_seconds())
    return None


def _moment(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
