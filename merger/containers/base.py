"""What a container is: one kind of output file, made with holes where tensors go, filled by others, then sealed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from merger.stored import Stored


@dataclass(frozen=True)
class Hole:
    """Where a planned tensor's bytes go: ``stored.nbytes`` bytes from ``offset`` of the file."""

    offset: int
    stored: Stored


class Container(Protocol):
    """The content of one output file."""

    def make(self, path: Path) -> tuple[Hole, ...]:
        """Create the file at its full size, everything but the holes written. OSError passes through."""
        ...

    def seal(self, path: Path, checksums: Mapping[int, int]) -> None:
        """Write what depends on the tensors' bytes: checksums has the CRC-32 of each hole, by its offset."""
        ...

    def check(self, path: Path) -> None:
        """Read back what :meth:`make` wrote and MergeError where it is not as meant. Tensors are checked elsewhere."""
        ...

    def tensors(self) -> Iterable[Stored]:
        """Every planned tensor of the file, once."""
        ...

    @property
    def nbytes(self) -> int:
        """About how large the file will be, in bytes, for planning."""
        ...


@dataclass(frozen=True)
class OutFile:
    """A file of the output. path: relative to the output's directory, ``/`` between names."""

    path: str
    container: Container
    mode: int = 0o644
