"""Open or create a job's store on rank 0, lock it, claim an epoch, and check that every rank sees it.

Collective; before training. Every rank must read rank 0's epoch record with its token at its own path. This detects
a disk that is local to each node, and a path that differs between ranks."""

import logging
import secrets
import socket
import time
from dataclasses import dataclass, field, replace

from monitor.distributed import Group, run_on_all_ranks, run_on_rank0
from store import session
from store.catalog import Catalog, open_catalog, open_or_create
from store.commit import mark_proven
from store.errors import DamagedError, FencedError, MissingError, NoSpaceError, NoStoreError, StorageError
from store.location import files_at, place_of
from store.names import SaveId
from store.retention import Retention, execute, plan_prune
from store.schema import EpochRecord, IncarnationRecord
from store.session import StoreLock
from store.storage.bucket import ObjectOptions
from store.storage.local import Files, LocalFiles
from store.storage.object_store import ObjectFiles

_log = logging.getLogger("driftpoint")

_EVERY_COMMIT = 1 << 31  # more commits than any store has: the rule itself drops none


@dataclass
class StoreSession:
    """A store that this job owns."""

    files: Files
    catalog: Catalog
    epoch: int
    token: str  # of the claim of ``epoch``; a job on a copy of the store may claim the same epoch with another token
    lock: StoreLock | None  # rank 0 only
    incarnation: IncarnationRecord | None = None  # stored with each claimed epoch; rank 0, if interruptions are counted
    claimed: bool = True  # False: the disk had no room for the claim; until the next one, `epoch` is the last job's
    newest: SaveId | None = None  # the newest commit when it was opened
    began: float = field(default_factory=time.monotonic)

    def require_unchanged(self) -> None:
        """Raise FencedError if another job committed since this one opened the store without a claim. Rank 0.

        The job before was not fenced, so it may have pruned the commit that this one resumed."""
        newest = max(self.catalog.saves(), default=None)
        if not self.claimed and newest != self.newest:
            raise FencedError(
                f"the disk had no room when this job began, so it could not claim the store, and another job committed "
                f"{newest} since. This job saves nothing; stop one of the two"
            )

    def renew(self, group: Group) -> None:
        """Claim the next epoch. Raises what another job's claim raises, on all ranks. Collective."""

        def claim() -> tuple[int, str]:
            self.require_unchanged()
            self.catalog.left_epochs.add(self.epoch)
            record = session.renew_epoch(self.files, self.catalog.store_id, self.epoch, self.token, self.incarnation)
            return record.epoch, record.token

        self.epoch, self.token = run_on_rank0(group, claim)
        session.own(self.files, self.epoch, self.token)
        self.claimed = True

    def mark_proven(self, save: SaveId) -> None:
        """Record that a job resumed from this commit, and took a step."""
        session.require_present(self.files, self.epoch)
        mark_proven(self.files, self.catalog.store_id, save, self.epoch)

    def mark_closed(self) -> None:
        """Record that this job ends as intended, so that its end is no interruption. Rank 0, if they are counted."""
        if self.claimed:
            session.require_present(self.files, self.epoch)
            session.mark_closed(self.files, self.catalog.store_id, self.epoch, time.monotonic() - self.began)

    def release(self) -> None:
        """Release the lock, so that another job can open the store."""
        self.catalog.left_epochs.add(self.epoch)
        if self.lock is not None:
            self.lock.release()
            self.lock = None


@dataclass(frozen=True)
class _Claim:
    """Rank 0's view of the store. ``seen``: token in the record of ``epoch``, which all ranks must see."""

    epoch: int
    token: str
    seen: str
    claimed: bool = True
    newest: SaveId | None = None


def open_store(
    path: str,
    group: Group,
    lock_seconds: float,
    counting: bool = False,
    options: ObjectOptions | None = None,
    *,
    create: bool = True,
) -> StoreSession:
    """Open or create the store at ``path``, a directory or URL, and claim an epoch. Collective.

    On a full disk an existing store still opens; the epoch is then claimed before the first save, once there is room.

    lock_seconds: Time to wait for another job's lock. An object store has none: the epoch alone tells jobs apart.
    counting: Whether interruptions of this job are counted. create: Whether to make a store if there is none.

    Raises StoreInUseError, StorageError or DamagedError, the same on all ranks; NoStoreError if there is none and none
    may be made; UnsupportedError if an object store lacks conditional puts: jobs could overwrite others' commits."""
    files = run_on_all_ranks(group, lambda: files_at(place_of(path).expanduser(), options))
    lock: StoreLock | None = None
    incarnation: IncarnationRecord | None = None

    def claim() -> _Claim:
        nonlocal lock, incarnation
        catalog = open_or_create(files) if create else _open_existing(files, path)
        if isinstance(files, LocalFiles):
            lock = StoreLock(files.root, lock_seconds)
        elif isinstance(files, ObjectFiles):
            files.require_conditional_puts()
        if counting:
            incarnation = _begin_incarnation(catalog, group.world_size)
        result = _claim(catalog, incarnation, locked=lock is not None)
        return replace(result, newest=max(catalog.saves(), default=None))

    try:
        claimed = run_on_rank0(group, claim)
        catalog = run_on_all_ranks(group, lambda: _check_epoch(files, claimed.epoch, claimed.seen))
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    session.own(files, claimed.epoch, claimed.seen)
    ours = claimed.epoch, claimed.token, lock, incarnation, claimed.claimed, claimed.newest
    return StoreSession(files, catalog, *ours)


def _open_existing(files: Files, path: str) -> Catalog:
    try:
        return open_catalog(files)
    except NoStoreError as error:
        raise NoStoreError(
            f"there is no store at {path}, and `store: {{create: false}}` forbids to begin a new one: check that its "
            "disk is mounted and the path is right. For the first start, remove `create: false`"
        ) from error


def _claim(catalog: Catalog, incarnation: IncarnationRecord | None, *, locked: bool) -> _Claim:
    """Claim an epoch, or return the newest one unclaimed if the disk is full. Raises NoSpaceError in a new store."""
    files = catalog.files
    try:
        record = session.claim_epoch(files, catalog.store_id, incarnation)
    except NoSpaceError as error:
        before = _newest_record(files)
        if before is None:
            raise
        if not _free_some(catalog, before, locked=locked):
            return _unclaimed(before, error, files)
        try:
            record = session.claim_epoch(files, catalog.store_id, incarnation)
        except NoSpaceError as again:
            return _unclaimed(_newest_record(files) or before, again, files)
    return _Claim(record.epoch, record.token, record.token)


def _unclaimed(before: EpochRecord, error: NoSpaceError, files: Files) -> _Claim:
    _log.error(
        "the store has no room for the record of this start, so nothing is saved until there is: %s. Training goes on, "
        "and every decision tries again. Make room on its disk; to give up old commits, stop this job and the one "
        "before, and run `driftpoint prune %s --minimum`",
        error,
        getattr(files, "root", "STORE"),
    )
    return _Claim(before.epoch, secrets.token_hex(16), before.token, claimed=False)


def _newest_record(files: Files) -> EpochRecord | None:
    newest = session.newest_epoch(files)
    try:
        return session.read_epoch(files, newest) if newest else None
    except (DamagedError, MissingError):
        return None


def _free_some(catalog: Catalog, before: EpochRecord, *, locked: bool) -> bool:
    """Delete files of a killed save, or the oldest commit if another one is left. Return whether anything was freed.

    Before its claim this job does not own the store, so the job before must have ended: its mark says so, or this job
    holds the lock on the machine where it ran. A rescue of its memory there gives way to the lock."""
    ended = locked and before.host == socket.gethostname()
    if not ended and not session.is_closed(catalog, before.epoch):
        return False
    try:  # on another host its memory may just be committed, with segments that no manifest names yet
        plan = plan_prune(catalog, Retention(keep_last=_EVERY_COMMIT), before.epoch, make_room=1, least=2, ended=ended)
        execute(catalog.files, plan)
    except (StorageError, DamagedError, FencedError) as error:
        _log.warning("the store is full, and pruning it stopped: %s", error)
        return False
    if plan.given_up:
        steps = ", ".join(str(save.step) for save in plan.given_up)
        _log.warning("the store is full: deleted the commits of steps %s, to record this start", steps)
    return plan.freed_bytes > 0


def _begin_incarnation(catalog: Catalog, world_size: int) -> IncarnationRecord:
    try:
        before = session.count_incarnations(catalog)
    except (StorageError, DamagedError) as error:
        _log.warning("cannot read how often this job was interrupted (%s): counting from now on", error)
        before = session.IncarnationCount()
    return session.new_incarnation(before, world_size)


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
        "`store:` must be the same directory for all ranks, on a disk that all nodes share, or the same URL. "
        "Check the path (is there a time or a host name in it?) and the mount"
    )
    try:
        catalog, record = open_catalog(files), session.read_epoch(files, epoch)
    except (NoStoreError, MissingError, DamagedError) as error:
        raise StorageError(f"this rank does not see rank 0's store at {root}: {error}. {advice}") from error
    if record.token != token:
        raise StorageError(f"this rank sees another store at {root} than rank 0. {advice}")
    return catalog
