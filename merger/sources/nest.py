"""Reading a nest of plain values that somebody else wrote: every step says where it is, nothing is taken on trust.

Pure. It does not know what any framework means by its values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from merger.sources.tensor import FileTensor
from store.errors import DamagedError


@dataclass(frozen=True)
class Nest:
    """A value in a file. where: the file and the way to the value, for messages.

    Every method raises DamagedError, naming ``where``, for a value that is not what is asked for.
    """

    value: Any
    where: str

    def at(self, key: object) -> Nest:
        """An item of a mapping or a list."""
        value = self.value
        if isinstance(value, Mapping) and key in value:
            return Nest(value[key], f"{self.where}, {key}")
        if isinstance(value, list | tuple) and isinstance(key, int) and 0 <= key < len(value):
            return Nest(value[key], f"{self.where}, {key}")
        raise DamagedError(f"{self.where} has no {key!r}, which a checkpoint of its kind has")

    def get(self, key: object) -> Nest | None:
        """An item of a mapping, or None where there is none or it is None."""
        found = self.mapping().get(key)
        return None if found is None else Nest(found, f"{self.where}, {key}")

    def mapping(self) -> Mapping[Any, Any]:
        """A mapping."""
        return self._of((Mapping,), "a mapping")  # type: ignore[no-any-return]

    def names(self) -> list[str]:
        """Keys of a mapping, which are all strings, in order."""
        return [Nest(key, f"{self.where}, a key").text() for key in self.mapping()]

    def items(self) -> Iterator[tuple[str, Nest]]:
        """Items of a mapping whose keys are strings."""
        for name in self.names():
            yield name, Nest(self.value[name], f"{self.where}, {name}")

    def entries(self) -> list[Nest]:
        """Items of a list or tuple."""
        values = self._of((list, tuple), "a list")
        return [Nest(value, f"{self.where}, {i}") for i, value in enumerate(values)]

    def text(self) -> str:
        """A string that is not empty."""
        found = self._of((str,), "a name")
        if not found:
            raise DamagedError(f"{self.where} is empty and should be a name")
        return str(found)

    def natural(self) -> int:
        """An integer from 0."""
        found = self._of((int,), "a number")
        if isinstance(found, bool) or found < 0:
            raise DamagedError(f"{self.where} is {found!r} and should be a number from 0")
        return int(found)

    def naturals(self) -> tuple[int, ...]:
        """A list of integers from 0; shapes, for one."""
        return tuple(entry.natural() for entry in self.entries())

    def tensor(self) -> FileTensor:
        """A tensor."""
        return self._of((FileTensor,), "a tensor")  # type: ignore[no-any-return]

    def _of(self, kinds: tuple[type, ...], what: str) -> Any:
        if not isinstance(self.value, kinds):
            raise DamagedError(f"{self.where} is a {type(self.value).__name__} and should be {what}")
        return self.value
