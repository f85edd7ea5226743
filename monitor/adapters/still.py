"""What is looked up once while a job stands still, and forgotten when it moves on.

One decision asks a dozen times for the names of a model's parameters, and each answer is a walk over its module tree,
which takes longer than everything else in a decision. Between two decisions a script may change anything, so nothing is
kept for longer. Training thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class Still:
    """Answers by key, kept during :meth:`period` only. They are shared: nobody changes them."""

    def __init__(self) -> None:
        self._found: dict[str, Any] | None = None

    @contextmanager
    def period(self) -> Iterator[None]:
        """The job stands still inside. One period inside another is part of it."""
        if self._found is not None:
            yield
            return
        self._found = {}
        try:
            yield
        finally:
            self._found = None

    def once(self, key: str, look: Callable[[], T]) -> T:
        """What ``look`` gives; in a period it is called once for each key, unless it raises."""
        if self._found is None:
            return look()
        if key not in self._found:
            self._found[key] = look()
        found: T = self._found[key]
        return found
