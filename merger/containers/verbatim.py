"""Small files whose bytes are known beforehand: configuration, tokenizers, ``latest``, certificates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from merger.containers.base import Hole
from merger.stored import Stored
from store.errors import MergeError


@dataclass(frozen=True)
class Verbatim:
    """A file that holds just ``data``."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """See :class:`merger.containers.base.Container`."""
        return len(self.data)

    def tensors(self) -> tuple[Stored, ...]:
        """None."""
        return ()

    def make(self, path: Path) -> tuple[Hole, ...]:
        """See :class:`merger.containers.base.Container`."""
        with path.open("xb") as file:
            file.write(self.data)
        return ()

    def seal(self, path: Path, checksums: Mapping[int, int]) -> None:
        """Nothing to do."""

    def check(self, path: Path) -> None:
        """See :class:`merger.containers.base.Container`."""
        if path.read_bytes() != self.data:
            raise MergeError(f"{path} does not read back as it was written: the storage under it is not to be trusted")
