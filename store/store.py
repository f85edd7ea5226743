"""Opening and creating a store: the door for writers. Readers need no more than ``catalog``."""

from __future__ import annotations

import secrets
from contextlib import suppress

from store.catalog import Catalog, open_catalog
from store.durable import ensure_dir, is_temporary, write_new
from store.errors import ExistsError, NoStoreError, StorageError
from store.files import Files
from store.layout import EPOCHS, MANIFESTS, PROVEN, SEGMENTS, STORE, TOP_LEVEL
from store.schema import StoreRecord, to_bytes


def open_or_create(files: Files) -> Catalog:
    """The store at the root of ``files``; made there, durably, where there is none.

    StorageError where the directory holds something else: a store never moves in with other files.
    """
    files.make_dir("")
    try:
        return open_catalog(files)
    except NoStoreError:
        _require_empty(files)
    for folder in (EPOCHS, SEGMENTS, MANIFESTS, PROVEN):
        ensure_dir(files, folder)
    data = to_bytes(StoreRecord(store_id=secrets.token_hex(16)))
    with suppress(ExistsError):  # another process made it just now: its store is as good
        write_new(files, STORE, lambda file: file.write(data))
    return open_catalog(files)


def _require_empty(files: Files) -> None:
    strange = [name for name in files.list_dir("") if name not in TOP_LEVEL and not is_temporary(name)]
    if strange:
        raise StorageError(
            f"{getattr(files, 'root', 'the directory')} is no store and not empty (it holds {strange[0]!r}): "
            "name an empty or new directory as `store:`"
        )
