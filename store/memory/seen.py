"""Which stores were seen on this node, and where: what is in memory says whose it is, but not where that store lies.

Kept in a file beside the memory, so that a daemon that was killed together with its trainers leaves the next one what
it needs. The file is only ever believed as far as a store of that identity stands at the path.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from store.errors import StorageError
from store.memory.tier import home, read_whole

_NAME = "stores.json"
_LIMIT = 1 << 20
_MOST = 256
"""Stores that are remembered: those seen last."""


class Seen:
    """By store id. One process writes: the daemon."""

    def __init__(self, base: Path) -> None:
        self._path = home(base) / _NAME
        self._paths = seen_stores(base)

    def paths(self) -> dict[str, Path]:
        """Seen last comes last."""
        return dict(self._paths)

    def path(self, store_id: str) -> Path | None:
        """Where a store is, or was."""
        return self._paths.get(store_id)

    def seen(self, store_id: str, path: Path) -> None:
        """A job has it open there. StorageError where that cannot be written down."""
        same = self._paths.get(store_id) == path
        self._paths.pop(store_id, None)
        self._paths[store_id] = path
        while len(self._paths) > _MOST:
            del self._paths[next(iter(self._paths))]
        if not same:
            self._write()

    def _write(self) -> None:
        temporary = self._path.with_suffix(".new")
        try:
            temporary.write_text(json.dumps({store_id: str(path) for store_id, path in self._paths.items()}))
            temporary.replace(self._path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise StorageError(f"cannot write {self._path}: {error.strerror}") from error


def seen_stores(base: Path) -> dict[str, Path]:
    """By store id: where a daemon last saw it. What cannot be read is nothing."""
    return _read(home(base) / _NAME)


def _read(path: Path) -> dict[str, Path]:
    try:
        found = json.loads(read_whole(path, _LIMIT))
    except (StorageError, ValueError, RecursionError):
        return {}  # of nobody; a job that says hello makes it anew
    if not isinstance(found, dict):
        return {}
    return {key: Path(value) for key, value in found.items() if isinstance(value, str) and os.path.isabs(value)}  # noqa: PTH117
