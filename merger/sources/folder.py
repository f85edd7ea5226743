"""Names that stand in files of others: a hint where to look, never a way out of the directory."""

from __future__ import annotations

from pathlib import Path

from store.errors import DamagedError, MergeError, MissingError
from store.files import LocalFiles

_LIMIT = 1 << 10


def read_name(folder: Path, file: str) -> str | None:
    """The name of a directory entry that a small file holds, such as ``latest``; None where there is no such file.

    MergeError for anything that is no plain name; DamagedError for a link or a file that is no text.
    """
    try:
        data = LocalFiles(folder).read(file, _LIMIT)
    except MissingError:
        return None
    try:
        text = data.decode().strip()
    except UnicodeDecodeError as error:
        raise DamagedError(f"{folder / file} is no text") from error
    return plain_name(text, str(folder / file))


def plain_name(text: str, where: str) -> str:
    """``text`` if it names an entry of a directory and nothing else. MergeError, naming ``where``."""
    if not text or text in (".", "..") or "/" in text or "\\" in text or not text.isprintable():
        raise MergeError(f"{where} names {text!r}, which is no name inside the directory; name the checkpoint yourself")
    return text
