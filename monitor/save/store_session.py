"""Opens or creates a job's store on rank 0, locks it, claims an epoch, and checks that every rank sees it.

Collective; before training. Every rank must read rank 0's epoch record with its token at its own path. This detects
a disk that is local to each node, and a path that differs between ranks.
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
    """A store that this job owns."""

    files: Files
    catalog: Catalog
    epoch: int
    token: str  # of the claim of ``epoch``; a job on a copy of the store may claim the same epoch with another token
    has_commits: bool  # when it was opened
    lock: StoreLock | None  # rank 0 only
    incarnation: IncarnationRecord | None = None  # stored with each claimed epoch; rank 0, if interruptions are counted
    began: float = field(default_factory=time.monotonic)

    def mark_closed(self) -> None:
        """Record that this job ends as intended, so that its end is no interruption. Rank 0, if they are counted."""
        mark_closed(self.files, self.catalog.store_id, self.epoch, time.monotonic() - self.began)

    def release(self) -> None:
        """Release the lock, so that another job can open the store."""
        if self.lock is not None:
            self.lock.release()
            self.lock = None


def open_store(
    path: str, group: Group, lock_seconds: float, counting: bool = False, options: ObjectOptions | None = None
) -> StoreSession:
    """Open or create the store at ``path`` and claim an epoch. Collective.

    Args:
        path: Directory or URL.
        group: All ranks.
        lock_seconds: Time to wait for another job's lock.
        counting: Whether interruptions of this job are counted.
        options: Of an object store. It has no lock; jobs detect each other by the epoch alone.

    Raises:
        StoreInUseError, StorageError, DamagedError: The same on all ranks.
        UnsupportedError: The object store has no conditional puts, so two jobs could overwrite each other's commits.
    """
    files = run_on_all_ranks(group, lambda: files_at(place_of(path).expanduser(), options))
    lock: StoreLock | None = None
    incarnation: IncarnationRecord | None = None

    def claim() -> tuple[int, str, bool]:
        nonlocal lock, incarnation
        catalog = open_or_create(files)
        if isinstance(files, LocalFiles):
            lock = StoreLock(files.root, lock_seconds)
        elif isinstance(files, ObjectFiles):
            files.require_conditional_puts()
        if counting:
            incarnation = _begin_incarnation(catalog, group.world_size)
        record = claim_epoch(files, catalog.store_id, incarnation)
        return record.epoch, record.token, bool(catalog.saves())

    try:
        epoch, token, has_commits = run_on_rank0(group, claim)
        catalog = run_on_all_ranks(group, lambda: _check_epoch(files, epoch, token))
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    return StoreSession(files, catalog, epoch, token, has_commits, lock, incarnation)


def _begin_incarnation(catalog: Catalog, world_size: int) -> IncarnationRecord:
    try:
        return begin_incarnation(catalog, world_size)
    except (StorageError, DamagedError) as error:
        _log.warning("cannot read how often this job was interrupted (%s): counting from now on", error)
        return new_incarnation(IncarnationCount(), world_size)


def open_existing_store(path: str, group: Group, options: ObjectOptions | None = None) -> Catalog | None:
    """Open the store at ``path`` for reading. Return None if any rank finds no store. Collective."""

    def catalog_or_none() -> Catalog | None:
        try:
            return open_catalog(files_at(place_of(path).expanduser(), options))
        except NoStoreError:
            return None

    catalog = run_on_all_ranks(group, catalog_or_none)
    return catalog if all(group.all_gather(catalog is not None)) else None


def _check_epoch(files: Files, epoch: int, token: str) -> Catalog:
    """Open the store that rank 0 opened; raise StorageError if this rank sees another one."""
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
