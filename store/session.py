"""Claim epochs, lock the store on this machine, and count incarnations.

Each incarnation of a job claims the next epoch, by creating a file without replacing; only the owner of the newest one
may commit. No clock is read, and no process is asked whether it lives.

An incarnation is the processes of a job from one start to their end. One with a commit counts its time up to its newest
commit, and one interruption unless it was closed; others do not count, nor do unreadable records.

``LOCK`` has a POSIX record lock, which ends with the process and is not inherited by forks. It helps only jobs of one
machine; the epoch protects the data. Its holder must not open ``LOCK`` again: closing any descriptor drops the lock."""

import fcntl
import hashlib
import os
import secrets
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from weakref import WeakKeyDictionary

from store import names as paths
from store.catalog import Catalog
from store.errors import DamagedError, ExistsError, FencedError, MissingError, StorageError, StoreError, StoreInUseError
from store.schema import ClosedRecord, EpochRecord, IncarnationRecord, from_bytes, to_bytes
from store.storage.atomic import ensure_dir, write_new
from store.storage.local import Files, list_or_empty

_LIMIT = 1 << 16


def newest_epoch(files: Files) -> int:
    """Return the highest epoch ever claimed, 0 if there is none."""
    return max(listed_epochs(files), default=0)


def listed_epochs(files: Files) -> list[int]:
    """Return the epochs that have a record, damaged or not."""
    return [epoch for epoch in map(paths.parse_epoch, list_or_empty(files, paths.EPOCHS)) if epoch is not None]


def claim_epoch(files: Files, store_id: str, incarnation: IncarnationRecord | None = None) -> EpochRecord:
    """Claim the next free epoch, durably, which fences all older owners. ``incarnation`` goes into its record.

    The number is higher than any in use, even if the claim of that one was lost, so names of saves never collide."""
    ensure_dir(files, paths.EPOCHS)
    for _ in range(100):
        epoch = max(newest_epoch(files), _newest_in_use(files)) + 1
        with suppress(ExistsError):
            return _write_epoch(files, store_id, epoch, secrets.token_hex(16), incarnation)
    raise StoreError("100 other jobs claimed this store at the same time: find and stop what keeps starting them")


def renew_epoch(
    files: Files, store_id: str, epoch: int, token: str, incarnation: IncarnationRecord | None = None
) -> EpochRecord:
    """Claim the epoch after ``epoch``, for its owner, who claimed it with ``token``, durably.

    An owner must not claim any other number: a job that claimed the next one is younger, and fences this one. A
    repeated call completes a claim whose outcome was unknown, for example because its fsync failed.

    Raises FencedError if another job claimed since, StorageError if this is not durable or ``epoch`` is not listed."""
    following = hashlib.blake2b(f"{token}/{epoch}".encode(), digest_size=16).hexdigest()
    newest = max(newest_epoch(files), _newest_in_use(files))
    if newest == epoch + 1 and token_of(files, newest) == following:
        files.sync_dir(paths.EPOCHS)
        return read_epoch(files, newest)
    require_newest(files, epoch)
    if newest > epoch:
        raise _fenced(epoch, newest)
    try:
        return _write_epoch(files, store_id, epoch + 1, following, incarnation)
    except ExistsError as error:
        raise _fenced(epoch, epoch + 1) from error


def _write_epoch(
    files: Files, store_id: str, epoch: int, token: str, incarnation: IncarnationRecord | None
) -> EpochRecord:
    record = EpochRecord(
        store_id=store_id,
        epoch=epoch,
        token=token,
        host=socket.gethostname(),
        pid=os.getpid(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        incarnation=incarnation,
    )
    write_new(files, paths.epoch_path(epoch), to_bytes(record))
    return record


def token_of(files: Files, epoch: int) -> str | None:
    """Return the token of an epoch; None if its record is damaged or gone."""
    try:
        return read_epoch(files, epoch).token
    except (DamagedError, MissingError):
        return None


def _newest_in_use(files: Files) -> int:
    saves = [paths.parse_save_file(name) for name in list_or_empty(files, paths.MANIFESTS)]
    for folder in (paths.SEGMENTS, f"{paths.JOURNAL}/{paths.SEGMENTS}"):
        saves += map(paths.parse_save_dir, list_or_empty(files, folder))
    return max((save.epoch for save in saves if save is not None), default=0)


def read_epoch(files: Files, epoch: int) -> EpochRecord:
    """Read the record of an epoch. Raises DamagedError or MissingError if there is no valid one."""
    path = paths.epoch_path(epoch)
    record = from_bytes(EpochRecord, files.read(path, _LIMIT), path)
    if record.epoch != epoch:
        raise DamagedError(f"{path} is the record of epoch {record.epoch}: it was copied or renamed")
    return record


def require_newest(files: Files, epoch: int) -> None:
    """Raise FencedError if an epoch newer than ``epoch`` was claimed.

    Raise StorageError if ``epoch`` itself is not listed: the store is unavailable, and no other job has it. Raise it
    too if the record of ``epoch`` is another job's (see :func:`own`)."""
    _require_own(files, epoch)
    if epoch not in (epochs := listed_epochs(files)):
        raise StorageError(
            f"the store at {getattr(files, 'root', 'its place')} does not list epoch {epoch} of this job: it is not "
            f"mounted now, or its {paths.EPOCHS}/ was deleted. Nothing is written until it is back; check the mount"
        )
    if max(epochs) > epoch:
        raise _fenced(epoch, max(epochs))


def require_present(files: Files, epoch: int) -> None:
    """Raise StorageError unless the record of ``epoch`` is there, so that nothing is written into an empty mount point.

    Costs one look at a file, where :func:`require_newest` lists them all."""
    _require_own(files, epoch)
    try:
        files.size(paths.epoch_path(epoch))
    except MissingError:
        require_newest(files, epoch)
        raise


def own(files: Files, epoch: int, token: str) -> None:
    """Register the token of ``epoch``; :func:`require_newest` and :func:`require_present` compare the record with it.

    If a link or a mount leads elsewhere by now, another store may have the same epoch: of another job, or of a copy."""
    _owned.setdefault(files, {})[epoch] = token


_owned: "WeakKeyDictionary[Files, dict[int, str]]" = WeakKeyDictionary()


def _require_own(files: Files, epoch: int) -> None:
    token, found = _owned.get(files, {}).get(epoch), None
    if token is not None:
        with suppress(StorageError):  # the record alone may be unreadable, and the rest of the store usable
            found = token_of(files, epoch)
    if found not in (token, None):
        raise StorageError(
            f"the store at {getattr(files, 'root', 'its place')} is not the one that this job began with: its epoch "
            f"{epoch} is another job's. Nothing is written until that one is back; check mounts and links in its path"
        )


def _fenced(epoch: int, newest: int) -> FencedError:
    return FencedError(
        f"epoch {epoch} lost the store to epoch {newest}: another job took it over. "
        "This job saves nothing more; stop it, or give it a store of its own"
    )


_LOOK_BACK = 20  # epochs and commits that are read; some, such as those of an import, belong to no incarnation


@dataclass(frozen=True)
class IncarnationCount:
    """Interruptions, and world size x seconds summed over all incarnations."""

    interruptions: int = 0
    rank_seconds: float = 0.0


def new_incarnation(before: IncarnationCount, world_size: int) -> IncarnationRecord:
    """Build the record of an incarnation that begins now, after those ``before``, for the epochs that it claims."""
    return IncarnationRecord(
        token=secrets.token_hex(16),
        world_size=world_size,
        began=datetime.now(UTC).isoformat(timespec="milliseconds"),
        interruptions=before.interruptions,
        rank_seconds=before.rank_seconds,
    )


def count_incarnations(catalog: Catalog) -> IncarnationCount:
    """Count all incarnations up to the end of the newest one."""
    newest = _newest(catalog.files)
    if newest is None or newest.incarnation is None:
        return IncarnationCount()
    last, closed = newest.incarnation, _closed(catalog, newest.epoch)
    seconds = closed.seconds if closed is not None else _seconds(catalog, last, newest.epoch)
    if seconds is None:
        return IncarnationCount(last.interruptions, last.rank_seconds)
    interrupted = 0 if closed is not None else 1
    return IncarnationCount(last.interruptions + interrupted, last.rank_seconds + last.world_size * seconds)


def mark_closed(files: Files, store_id: str, epoch: int, seconds: float) -> None:
    """Record that the owner of an epoch ended cleanly. A second mark changes nothing."""
    record = ClosedRecord(store_id=store_id, epoch=epoch, seconds=max(0.0, seconds))
    with suppress(ExistsError):
        write_new(files, paths.closed_path(epoch), to_bytes(record))


def is_closed(catalog: Catalog, epoch: int) -> bool:
    """Return whether the owner of an epoch ended cleanly; False if that cannot be read."""
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
    path = paths.closed_path(epoch)
    try:
        found = from_bytes(ClosedRecord, catalog.files.read(path, _LIMIT), path)
    except (DamagedError, MissingError):
        return None
    return found if (found.store_id, found.epoch) == (catalog.store_id, epoch) else None


def _seconds(catalog: Catalog, incarnation: IncarnationRecord, newest: int) -> float | None:
    """Return the seconds from the beginning of an incarnation to its newest commit; None if it made none."""
    began = parse_moment(incarnation.began)
    for save in [save for save in catalog.saves() if save.epoch <= newest][:_LOOK_BACK]:
        with suppress(DamagedError, MissingError):
            if read_epoch(catalog.files, save.epoch).incarnation != incarnation:
                return None  # only commits of older incarnations are left
            manifest = catalog.manifest(save)
            if manifest.uptime is not None:
                return manifest.uptime
            created = parse_moment(manifest.created)  # of an older release; a clock that was set falsifies it
            if began is not None and created is not None:
                return max(0.0, (created - began).total_seconds())
    return None


def parse_moment(text: str) -> datetime | None:
    """Parse an ISO time of a record; None if invalid."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: l_type, l_whence, (padding,) l_start, l_len, l_pid, (padding)

_held: dict[Path, int] = {}  # process id of each lock's holder: a forked child inherits this table, but not the lock


class FileLock:
    """POSIX record lock of a file, which is made if missing, held from construction until :meth:`release`.

    Raises BlockingIOError if another process still holds it after ``wait_seconds``, OSError if it cannot be locked."""

    def __init__(self, path: Path, mode: int, wait_seconds: float = 0.0) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        try:
            if os.fstat(self._descriptor).st_uid == os.geteuid():
                os.fchmod(self._descriptor, mode)  # of a file that an earlier release made, too
            self._acquire(time.monotonic() + wait_seconds)
        except OSError:
            os.close(self._descriptor)
            raise
        _held[path] = os.getpid()

    def release(self) -> None:
        """Release the lock. A second call changes nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            _held.pop(self._path, None)

    def _acquire(self, deadline: float) -> None:
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.05)
            else:
                return


class StoreLock(FileLock):
    """Lock of a store on this machine. Raises StoreInUseError or StorageError."""

    def __init__(self, root: Path, wait_seconds: float) -> None:
        path = root.resolve() / paths.LOCK
        if is_held_here(path):
            raise StoreInUseError(f"{root} is attached already in this process; close the first checkpointer")
        try:
            super().__init__(path, 0o600, wait_seconds)
        except BlockingIOError:
            holder = lock_holder(root)
            who = f"process {holder}" if holder else "another process"
            raise StoreInUseError(
                f"the store {root} is in use by {who} on this machine: "
                "wait for it, stop it, or give this job a store of its own (`store:` in the YAML)"
            ) from None
        except OSError as error:
            raise StorageError(f"cannot open and lock {path}: {error.strerror}") from error


def is_held_here(path: Path) -> bool:
    """Return whether this process holds a :class:`FileLock` on the file."""
    return _held.get(path) == os.getpid()


def lock_holder(root: Path) -> int | None:
    """Return the process id of the job on this machine that holds the store, None if there is none."""
    with suppress(OSError):
        return locking_process(root.resolve() / paths.LOCK)
    return None


def locking_process(path: Path) -> int | None:
    """Return the process id that holds the lock of a file, None if there is none. Raises OSError."""
    if is_held_here(path):
        return os.getpid()
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        request = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, request))
    finally:
        os.close(descriptor)
    return None if kind == fcntl.F_UNLCK else int(pid)
