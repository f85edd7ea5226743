"""Which stores were seen on this node, and where: what is in memory says whose it is, but not where that store lies.

Kept in a file beside the memory, so that a daemon that was killed together with its trainers leaves the next one what
it needs. The file is only ever believed as far as a store of that identity stands at the path.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from store.errors import StorageError
from store.memory.tier import home, read_whole

_NAME = "stores.json"
_LIMIT = 1 << 20
_MOST = 256
"""Stores that are remembered: those seen last."""

_COPIES = 8
"""Places of one identity that are: a store and copies of it."""


class Seen:
    """By store id. One process writes: the daemon."""

    def __init__(self, base: Path) -> None:
        self._path = home(base) / _NAME
        self._places = _read(self._path)

    def everything(self) -> list[tuple[str, Path]]:
        """(store id, place), seen last comes last."""
        return [(store_id, path) for store_id, paths in self._places.items() for path in paths]

    def places(self, store_id: str) -> list[Path]:
        """Where a store and its copies are, or were; seen last comes last."""
        return list(self._places.get(store_id, ()))

    def seen(self, store_id: str, path: Path) -> None:
        """A job has it open there. StorageError where that cannot be written down."""
        before = self._places.pop(store_id, [])
        self._places[store_id] = [*(one for one in before if one != path), path][-_COPIES:]
        while len(self._places) > _MOST:
            del self._places[next(iter(self._places))]
        if self._places[store_id] != before:
            self._write()

    def _write(self) -> None:
        temporary = self._path.with_suffix(".new")
        try:
            temporary.write_text(json.dumps({key: [str(one) for one in paths] for key, paths in self._places.items()}))
            temporary.replace(self._path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise StorageError(f"cannot write {self._path}: {error.strerror}") from error


def seen_stores(base: Path) -> dict[str, Path]:
    """By store id: where a daemon last saw it. What cannot be read is nothing."""
    return {store_id: paths[-1] for store_id, paths in _read(home(base) / _NAME).items()}


def _read(path: Path) -> dict[str, list[Path]]:
    try:
        found = json.loads(read_whole(path, _LIMIT))
    except (StorageError, ValueError, RecursionError):
        return {}  # of nobody; a job that says hello makes it anew
    if not isinstance(found, dict):
        return {}
    read = {key: _paths(value if isinstance(value, list) else [value]) for key, value in found.items()}
    return {key: paths for key, paths in read.items() if paths}


def _paths(values: list[Any]) -> list[Path]:
    return [Path(one) for one in values if isinstance(one, str) and os.path.isabs(one)]  # noqa: PTH117
