"""Write files durably: temporary name, write, fsync, final name, fsync directory.

On :class:`store.storage.local.WholeFiles`, which shows files only when they are whole, all of that is one request.

Invariants: a final name never shows a file that is not complete and synced; a final name is never replaced (except by
:func:`replace_hint`, for untrusted hints); after an error the temporary file is abandoned, never synced again."""

import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress

from store.errors import MissingError, StorageError
from store.storage.local import Files, NewFile, WholeFiles

_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{12}-(.+)\Z")


def is_temporary(name: str) -> bool:
    """Return whether a file name is one that an interrupted write may leave behind."""
    return final_name(name) is not None


def final_name(temporary: str) -> str | None:
    """Return the final name of a temporary file, None for other names."""
    match = _TEMPORARY.match(temporary)
    return match[1] if match else None


def ensure_dir(files: Files, path: str) -> None:
    """Make ``path`` and its parents below the root, each durable in its parent.

    The parent is synced even if the directory exists, as another process may have made it and not synced it yet."""
    names = path.split("/")
    for depth in range(len(names)):
        files.make_dir("/".join(names[: depth + 1]))
        files.sync_dir("/".join(names[:depth]))


def write_new(
    files: Files,
    path: str,
    content: bytes | Callable[[NewFile], None],
    *,
    patched: bool = False,
    most: int = 0,
    sync_name: bool = True,
) -> None:
    """Write a file under a free name; it is durable on return. Raises ExistsError if the name is taken.

    ``content``: all bytes, or a function that writes them. ``patched``: whether it may call ``write_at``. ``most``:
    largest size of a payload in bytes; 0 for a record. ``sync_name``: whether the name is durable on return, too. If
    not, the directory must be synced before anything refers to the file."""
    fill = (lambda file: file.write(content)) if isinstance(content, bytes) else content
    if isinstance(files, WholeFiles):
        files.put_new(path, fill, patched=patched, most=most)
        return
    folder, temporary = _temporary_for(path)
    _write_temporary(files, temporary, fill)
    try:
        files.link(temporary, path)
    finally:
        _discard(files, temporary)
    if sync_name:
        files.sync_dir(folder)


def replace_hint(files: Files, path: str, data: bytes) -> None:
    """Write or replace a small file; the change is atomic, and durable on return."""
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
    """Remove the files that exist, without a sync; if interrupted, any of them may remain."""
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
