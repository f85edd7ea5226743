"""Epochs: each incarnation of the job claims the next number, and whoever lost the newest one may not commit.

A claim is a file created without replacing, so of two claimants one wins each number. Nothing here looks at a
clock or asks whether anyone is alive.
"""

from __future__ import annotations

import os
import secrets
import socket
from datetime import UTC, datetime

from store.durable import ensure_dir, write_new
from store.errors import DamagedError, ExistsError, FencedError, MissingError, StoreError
from store.files import Files
from store.layout import EPOCHS, MANIFESTS, SEGMENTS, epoch_path, parse_epoch, parse_save_dir, parse_save_file
from store.schema import EpochRecord, IncarnationRecord, from_bytes, to_bytes

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
