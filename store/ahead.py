"""Telling storage what will be read next, so that it fetches ahead while what came before is hashed and copied.

A hint and nothing else: whether it is followed changes no byte that is read, and what is wrong with a file is told by
the read itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from store.coverage import Source
from store.files import Files
from store.layout import payload_path

WINDOW = 256 << 20
"""Bytes that are asked for ahead: far more than any disk has in flight, and little of a node's memory."""


@runtime_checkable
class Foresight(Protocol):
    """Files that can use a hint."""

    def expect(self, path: str, offset: int, nbytes: int) -> None:
        """These bytes will be read soon. Raises nothing."""
        ...


class Ahead:
    """sources: stored fragments in the order in which they will be read."""

    def __init__(self, files: Files, sources: Iterable[Source]) -> None:
        self._files = files if isinstance(files, Foresight) else None
        self._rest = deque(sources if self._files is not None else ())
        self._lead = -WINDOW

    def reading(self, nbytes: int) -> None:
        """The next so many stored bytes are about to be read."""
        self._lead -= nbytes
        while self._rest and self._lead < 0:
            path, offset, end = _place(self._rest.popleft())
            while self._rest and (path, end) == _place(self._rest[0])[:2]:  # neighbours in a file are one request
                end = _place(self._rest.popleft())[2]
            self._lead += end - offset
            if self._files is not None:
                self._files.expect(path, offset, end - offset)


def _place(source: Source) -> tuple[str, int, int]:
    """Path, first byte and the byte behind the last."""
    part, entry = source.part, source.entry
    first = part.header_bytes + entry.offset
    return payload_path(part.save, part.rank), first, first + entry.nbytes
