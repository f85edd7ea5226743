"""A job's hold on its store: opened or created by rank 0, locked, an epoch claimed, seen by every rank.

Collective; before training. Every rank must read rank 0's epoch record with its token at its own path: this is
what tells a shared disk from one that every node has for itself, or a path that differs between ranks.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from monitor.distributed import Group, run_on_all_ranks, run_on_rank0
from store.catalog import Catalog, open_catalog, open_or_create
from store.errors import DamagedError, MissingError, NoStoreError, StorageError
from store.location import files_at, place_of
from store.schema import IncarnationRecord
from store.session import (
    IncarnationCount,
    StoreLock,
    begin_incarnation,
    claim_epoch,
    mark_closed,
    new_incarnation,
    read_epoch,
)
from store.storage.bucket import ObjectOptions
from store.storage.local import Files, LocalFiles
from store.storage.object_store import ObjectFiles

_log = logging.getLogger("driftpoint")


@dataclass
class StoreSession:
    """A store that this job owns. ``lock`` and ``incarnation`` are rank 0's. ``has_commits``: when it was opened.

    token: of the claim of ``epoch``; jobs on a copy of the store that claim the same number have others.

    incarnation: what goes into the epochs that are claimed, where interruptions are counted."""

    files: Files
    catalog: Catalog
    epoch: int
    token: str
    has_commits: bool
    lock: StoreLock | None
    incarnation: IncarnationRecord | None = None
    began: float = field(default_factory=time.monotonic)

    def mark_closed(self) -> None:
        """Note that this job ends as it was meant to, so that its end is no interruption. Rank 0, where they are
        counted."""
        mark_closed(self.files, self.catalog.store_id, self.epoch, time.monotonic() - self.began)

    def release(self) -> None:
        """Let the next job have it."""
        if self.lock is not None:
            self.lock.release()
            self.lock = None


def open_store(
    path: str, group: Group, lock_seconds: float, counting: bool = False, options: ObjectOptions | None = None
) -> StoreSession:
    """Own the store at ``path``. StoreInUseError, StorageError or DamagedError, on all ranks alike; UnsupportedError
    for an object store on which two jobs could commit over one another.

    counting: interruptions of this job are counted, now and by the incarnations to come. options: of an object store,
    whose jobs know of each other by the epoch alone."""
    files = run_on_all_ranks(group, lambda: files_at(place_of(path).expanduser(), options))
    held: list[StoreLock] = []
    begun: list[IncarnationRecord] = []

    def claim() -> tuple[int, str, bool]:
        catalog = open_or_create(files)
        if isinstance(files, LocalFiles):
            held.append(StoreLock(files.root, lock_seconds))
        elif isinstance(files, ObjectFiles):
            files.require_conditional_puts()
        if counting:
            begun.append(_begun(catalog, group.world_size))
        record = claim_epoch(files, catalog.store_id, begun[0] if begun else None)
        return record.epoch, record.token, bool(catalog.saves())

    try:
        epoch, token, has_commits = run_on_rank0(group, claim)
        catalog = run_on_all_ranks(group, lambda: _seen(files, epoch, token))
    except BaseException:
        for lock in held:
            lock.release()
        raise
    incarnation = begun[0] if begun else None
    return StoreSession(files, catalog, epoch, token, has_commits, held[0] if held else None, incarnation)


def _begun(catalog: Catalog, world_size: int) -> IncarnationRecord:
    try:
        return begin_incarnation(catalog, world_size)
    except (StorageError, DamagedError) as error:
        _log.warning("how often this job was interrupted cannot be read, and is counted from now on: %s", error)
        return new_incarnation(IncarnationCount(), world_size)


def open_existing_store(path: str, group: Group, options: ObjectOptions | None = None) -> Catalog | None:
    """The store at ``path`` for reading only; None where any rank sees none."""
    catalog = run_on_all_ranks(group, lambda: _existing(path, options))
    return catalog if all(group.all_gather(catalog is not None)) else None


def _existing(path: str, options: ObjectOptions | None) -> Catalog | None:
    try:
        return open_catalog(files_at(place_of(path).expanduser(), options))
    except NoStoreError:
        return None


def _seen(files: Files, epoch: int, token: str) -> Catalog:
    root = getattr(files, "root", "its place")
    advice = (
        "`store:` must be the same directory for all ranks, on a disk that all nodes share, or the same s3:// URL. "
        "Check the path (is there a time or a host name in it?) and the mount"
    )
    try:
        catalog = open_catalog(files)
        record = read_epoch(files, epoch)
    except (NoStoreError, MissingError, DamagedError) as error:
        raise StorageError(f"this rank does not see rank 0's store at {root}: {error}. {advice}") from error
    if record.token != token:
        raise StorageError(f"this rank sees another store at {root} than rank 0. {advice}")
    return catalog
