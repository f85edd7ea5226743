"""The order of operations that makes a write survive: temporary name, write, fsync, final name, fsync directory.

Where storage shows files only when they are whole (:class:`store.storage.local.WholeFiles`) all of that is one request.

Knows files only through ``files.Files`` and nothing of what is in them.

Invariants: a final name never shows a file that is not complete and synced; a final name is never replaced
(except by :func:`replace_hint`, for files that nobody trusts); after an error the temporary file is abandoned,
never synced again.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress

from store.errors import MissingError, StorageError
from store.storage.local import Files, NewFile, WholeFiles

_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{12}-(.+)\Z")


def is_temporary(name: str) -> bool:
    """Whether a file name is one that an interrupted write may leave behind."""
    return final_name(name) is not None


def final_name(temporary: str) -> str | None:
    """The name that a temporary file was to get, None where the name is not a temporary one."""
    match = _TEMPORARY.match(temporary)
    return match[1] if match else None


def ensure_dir(files: Files, path: str) -> None:
    """Make ``path`` and its parents below the root, each durable in its parent.

    The parent is synced even where the directory was there: another process may have made it a moment ago
    and not have synced it yet.
    """
    names = path.split("/")
    for depth in range(len(names)):
        files.make_dir("/".join(names[: depth + 1]))
        files.sync_dir("/".join(names[:depth]))


def write_new(
    files: Files, path: str, fill: Callable[[NewFile], None], *, patched: bool = False, most: int = 0
) -> None:
    """Write a file that did not exist; returns when it is durable under its name.

    ``fill`` writes the content. ExistsError where the name is taken: what is there stays as it is. patched: ``fill``
    may call ``write_at``. most: bytes that a payload may come to; 0: a record.
    """
    if isinstance(files, WholeFiles):
        files.put_new(path, fill, patched=patched, most=most)
        return
    folder, temporary = _temporary_for(path)
    _write_temporary(files, temporary, fill)
    try:
        files.link(temporary, path)
    finally:
        _discard(files, temporary)
    files.sync_dir(folder)


def replace_hint(files: Files, path: str, data: bytes) -> None:
    """Write or replace a small file that is only ever a hint."""
    if isinstance(files, WholeFiles):
        files.replace(path, data)
        return
    folder, temporary = _temporary_for(path)
    _write_temporary(files, temporary, lambda file: file.write(data))
    try:
        files.rename(temporary, path)
    except StorageError:
        _discard(files, temporary)
        raise
    files.sync_dir(folder)


def remove_all(files: Files, paths: Sequence[str]) -> None:
    """Remove files, those of them that are there. Not durable yet; interrupted, any of them may be left."""
    if isinstance(files, WholeFiles):
        files.unlink_all(paths)
        return
    for path in paths:
        with suppress(MissingError):
            files.unlink(path)


def _temporary_for(path: str) -> tuple[str, str]:
    folder, _, name = path.rpartition("/")
    temporary = f".tmp-{secrets.token_hex(6)}-{name}"
    return folder, f"{folder}/{temporary}" if folder else temporary


def _write_temporary(files: Files, temporary: str, fill: Callable[[NewFile], None]) -> None:
    file = files.create(temporary)
    try:
        try:
            fill(file)
            file.sync()
        finally:
            file.close()
    except BaseException:
        _discard(files, temporary)
        raise


def _discard(files: Files, temporary: str) -> None:
    # A temporary file that cannot be removed now is harmless: pruning knows its name.
    with suppress(StorageError):
        files.unlink(temporary)
