"""Files or objects of the doctor's own beside what others have, none of which stays."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

F = TypeVar("F")


class Probe(Generic[F]):
    """files: where they are made. remove: takes those away that are there still, and does not raise."""

    def __init__(self, files: F, remove: Callable[[Sequence[str]], None]) -> None:
        self.files = files
        self._remove = remove
        self._names: list[str] = []

    def name(self) -> str:
        """A new one, which is removed at the end whatever becomes of it."""
        self._names.append(f".tmp-{secrets.token_hex(6)}-doctor")
        return self._names[-1]

    def __enter__(self) -> Probe[F]:
        return self

    def __exit__(self, *error: object) -> None:
        self._remove(self._names)
