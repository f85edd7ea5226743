"""Epoch fencing, lock, incarnation count.

Epochs: each incarnation of the job claims the next number, and whoever lost the newest one may not commit.

A claim is a file created without replacing, so of two claimants one wins each number. Nothing here looks at a
clock or asks whether anyone is alive.

How often a job was interrupted so far, and for how long it ran: told from its epochs.

An incarnation is the processes of a job from one start to their end; its first epoch's record says what was counted
before it, so that reading the newest one is enough. Counted is an incarnation that committed something: its time up to
its newest commit, and one interruption unless it was closed. What ended before its first commit trained next to
nothing (a wrong setting, a crash while starting) and counts as neither.

It does not know what an incarnation ended of, and whether anyone is alive. What cannot be read counts as not there.

Tells whether a live job on this machine owns a store, and refuses a second one.

A POSIX record lock on ``LOCK``: the kernel drops it when the process dies however it dies, and forked children
(data-loader workers) do not inherit it. It is a courtesy between jobs of one machine; what protects the data
everywhere is the epoch. Nothing else may open ``LOCK`` in a process that holds it: closing any descriptor of
the file would drop the lock.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from store.catalog import Catalog
from store.errors import DamagedError, ExistsError, FencedError, MissingError, StorageError, StoreError, StoreInUseError
from store.layout import (
    EPOCHS,
    LOCK,
    MANIFESTS,
    SEGMENTS,
    closed_path,
    epoch_path,
    parse_epoch,
    parse_save_dir,
    parse_save_file,
)
from store.schema import ClosedRecord, EpochRecord, IncarnationRecord, from_bytes, to_bytes
from store.storage.atomic import ensure_dir, write_new
from store.storage.local import Files

_LIMIT = 1 << 16


def newest_epoch(files: Files) -> int:
    """The highest epoch ever claimed, 0 where there is none."""
    return max((epoch for name in _names(files, EPOCHS) if (epoch := parse_epoch(name)) is not None), default=0)


def claim_epoch(files: Files, store_id: str, incarnation: IncarnationRecord | None = None) -> EpochRecord:
    """Own the next epoch, durably. Older owners are fenced from now on. incarnation: goes into its record.

    Higher than any number in use, also where the claim that took it was lost: saves must not collide with it.
    """
    ensure_dir(files, EPOCHS)
    for _ in range(100):
        record = EpochRecord(
            store_id=store_id,
            epoch=max(newest_epoch(files), _newest_in_use(files)) + 1,
            token=secrets.token_hex(16),
            host=socket.gethostname(),
            pid=os.getpid(),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            incarnation=incarnation,
        )
        data = to_bytes(record)
        try:
            write_new(files, epoch_path(record.epoch), lambda file, data=data: file.write(data))  # type: ignore[misc]
        except ExistsError:
            continue
        return record
    raise StoreError("100 other jobs claimed this store one after the other: find out who keeps starting them")


def _newest_in_use(files: Files) -> int:
    saves = [parse_save_file(name) for name in _names(files, MANIFESTS)]
    saves += [parse_save_dir(name) for name in _names(files, SEGMENTS)]
    return max((save.epoch for save in saves if save is not None), default=0)


def _names(files: Files, folder: str) -> list[str]:
    try:
        return files.list_dir(folder)
    except MissingError:
        return []


def read_epoch(files: Files, epoch: int) -> EpochRecord:
    """The record of an epoch. DamagedError or MissingError where there is no valid one."""
    path = epoch_path(epoch)
    record = from_bytes(EpochRecord, files.read(path, _LIMIT), path)
    if record.epoch != epoch:
        raise DamagedError(f"{path} is the record of epoch {record.epoch}: it was copied or renamed")
    return record


def require_newest(files: Files, epoch: int) -> None:
    """FencedError unless ``epoch`` is still the newest one."""
    newest = newest_epoch(files)
    if newest != epoch:
        raise FencedError(
            f"epoch {epoch} lost the store to epoch {newest}: another job took it over. "
            "This one goes on training but saves nothing more; stop it, or give it a store of its own"
        )


_LOOK_BACK = 20
"""Epochs, and commits, that are looked at: those of an import, say, belong to no incarnation."""


@dataclass(frozen=True)
class IncarnationCount:
    """What was counted. rank_seconds: world size x seconds, over all incarnations."""

    interruptions: int = 0
    rank_seconds: float = 0.0


def begin_incarnation(catalog: Catalog, world_size: int) -> IncarnationRecord:
    """The record of an incarnation that begins now, to go into the epochs that it claims. Nothing is written."""
    return new_incarnation(count_incarnations(catalog), world_size)


def new_incarnation(before: IncarnationCount, world_size: int) -> IncarnationRecord:
    """As above, where it is known what was counted before."""
    return IncarnationRecord(
        token=secrets.token_hex(16),
        world_size=world_size,
        began=datetime.now(UTC).isoformat(timespec="milliseconds"),
        interruptions=before.interruptions,
        rank_seconds=before.rank_seconds,
    )


def count_incarnations(catalog: Catalog) -> IncarnationCount:
    """Of all incarnations up to the newest one, as it was when it ended."""
    newest = _newest(catalog.files)
    if newest is None or newest.incarnation is None:
        return IncarnationCount()
    last = newest.incarnation
    closed = _closed(catalog, newest.epoch)
    seconds = closed.seconds if closed is not None else _seconds(catalog, last, newest.epoch)
    if seconds is None:
        return IncarnationCount(last.interruptions, last.rank_seconds)
    interrupted = 0 if closed is not None else 1
    return IncarnationCount(last.interruptions + interrupted, last.rank_seconds + last.world_size * seconds)


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


_held: dict[Path, int] = {}
"""Process that holds each lock: a forked child has a copy of this, but not of the lock."""


class StoreLock:
    """Held from construction until :meth:`release`."""

    def __init__(self, root: Path, wait_seconds: float) -> None:
        self._path = root.resolve() / LOCK
        if _held.get(self._path) == os.getpid():
            raise StoreInUseError(f"{root} is attached already in this process; close the first checkpointer")
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise StorageError(f"cannot open {self._path} for locking: {error.strerror}") from error
        self._acquire(root, time.monotonic() + wait_seconds)
        _held[self._path] = os.getpid()

    def release(self) -> None:
        """Let another job have the store."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            _held.pop(self._path, None)

    def _acquire(self, root: Path, deadline: float) -> None:
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(self._descriptor)
                    raise StoreInUseError(_in_use(root)) from None
                time.sleep(0.05)
            except OSError as error:
                os.close(self._descriptor)
                raise StorageError(f"cannot lock {self._path}: {error.strerror}") from error
            else:
                return


def lock_holder(root: Path) -> int | None:
    """Process id of the job on this machine that holds the store, None where there is none."""
    path = root.resolve() / LOCK
    if _held.get(path) == os.getpid():
        return os.getpid()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        return _holder(descriptor)
    finally:
        os.close(descriptor)


# struct flock of Linux on 64-bit: l_type, l_whence, (padding,) l_start, l_len, l_pid, (padding).
def _holder(descriptor: int) -> int | None:
    import struct

    layout = "hhqqi4x"
    question = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        kind, _, _, _, pid = struct.unpack(layout, fcntl.fcntl(descriptor, fcntl.F_GETLK, question))
    except OSError:
        return None
    return None if kind == fcntl.F_UNLCK else int(pid)


def _in_use(root: Path) -> str:
    holder = lock_holder(root)
    who = f"process {holder}" if holder else "another process"
    return (
        f"the store {root} is in use by {who} on this machine: "
        "wait for it, stop it, or give this job a store of its own (`store:` in the YAML)"
    )
