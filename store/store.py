"""Opening and creating a store: the door for writers. Readers need no more than ``catalog``."""

from __future__ import annotations

import secrets
from contextlib import suppress

from store.catalog import Catalog, open_catalog
from store.durable import ensure_dir, is_temporary, write_new
from store.errors import DamagedError, ExistsError, NoStoreError, StorageError
from store.files import Files
from store.layout import EPOCHS, FOREIGN, MANIFESTS, PROVEN, SEGMENTS, STORE, TOP_LEVEL
from store.schema import FORMAT, StoreRecord, to_bytes


def open_or_create(files: Files) -> Catalog:
    """The store at the root of ``files``; made there, durably, where there is none.

    StorageError where the directory holds something else: a store never moves in with other files.
    DamagedError where it holds commits without ``STORE.json``: they are never built over.
    """
    try:
        return open_catalog(files)
    except NoStoreError:
        files.make_dir("")
    _require_nothing_else(files)
    if _holds_records(files):
        return _reopened(files)
    for folder in (EPOCHS, SEGMENTS, MANIFESTS, PROVEN):
        ensure_dir(files, folder)
    data = to_bytes(StoreRecord(format=FORMAT, reader=FORMAT, store_id=secrets.token_hex(16)))
    with suppress(ExistsError):  # another process made it just now: its store is as good
        write_new(files, STORE, lambda file: file.write(data))
    return open_catalog(files)


def _holds_records(files: Files) -> bool:
    folders = [name for name in files.list_dir("") if name in (EPOCHS, SEGMENTS, MANIFESTS, PROVEN)]
    return any(not is_temporary(name) for folder in folders for name in files.list_dir(folder))


def _reopened(files: Files) -> Catalog:
    # Records are written after STORE.json: either another process made the store just now, or the file was lost.
    try:
        return open_catalog(files)
    except NoStoreError as error:
        raise DamagedError(
            f"{getattr(files, 'root', 'the directory')} holds commits but its {STORE} is missing: restore that file "
            "from a copy, or name an empty directory as `store:` to begin anew"
        ) from error


def _require_nothing_else(files: Files) -> None:
    known = TOP_LEVEL | FOREIGN
    strange = [name for name in files.list_dir("") if name not in known and not is_temporary(name)]
    if strange:
        raise StorageError(
            f"{getattr(files, 'root', 'the directory')} is no store and not empty (it holds {strange[0]!r}): "
            "name an empty or new directory as `store:`"
        )
