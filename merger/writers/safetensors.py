"""Write safetensors files: a JSON header with dtype, shape and offsets of every tensor, then their bytes."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from merger.checkpoint import PlannedTensor
from merger.io.output_file import Hole, read_back_error
from merger.tensors import dtype_name
from store.errors import UnsupportedError

_ALIGN = 8
_METADATA = "__metadata__"
_LONGEST = 1 << 28  # header that is read, in bytes


@dataclass(frozen=True)
class SafetensorsFile:
    """One safetensors file. ``metadata``: strings for the header.

    Tensors are sorted by element size, largest first, so that each is aligned to its element size, as readers that map
    the file expect. UnsupportedError for a name or dtype that the format lacks."""

    tensors_by_name: Mapping[str, PlannedTensor]
    metadata: Mapping[str, str]

    @cached_property
    def header(self) -> bytes:
        """Bytes before the first tensor."""
        if _METADATA in self.tensors_by_name:
            raise UnsupportedError(f"a tensor is named {_METADATA}, which safetensors reserves; rename it")
        table: dict[str, object] = {_METADATA: dict(self.metadata)} if self.metadata else {}
        end = 0
        for name, stored in self._in_order():
            start, end = end, end + stored.nbytes
            table[name] = {"dtype": dtype_name(stored.dtype), "shape": stored.shape, "data_offsets": [start, end]}
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGN)
        return len(text).to_bytes(8, "little") + text

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(stored.nbytes for stored in self.tensors_by_name.values())

    def tensors(self) -> Iterable[PlannedTensor]:
        return self.tensors_by_name.values()

    def make(self, path: Path) -> tuple[Hole, ...]:
        with path.open("xb") as file:
            file.write(self.header)
            file.truncate(self.nbytes)
        holes, offset = [], len(self.header)
        for _, stored in self._in_order():
            if stored.nbytes:
                holes.append(Hole(offset, stored))
            offset += stored.nbytes
        return tuple(holes)

    def _in_order(self) -> list[tuple[str, PlannedTensor]]:
        return sorted(self.tensors_by_name.items(), key=lambda item: -item[1].dtype.itemsize)

    def seal(self, path: Path, checksums: Mapping[int, int]) -> None:
        """Nothing to do: the format has no checksums."""

    def check(self, path: Path) -> None:
        with path.open("rb") as file:
            header = file.read(len(self.header))
        if header != self.header or path.stat().st_size != self.nbytes:
            raise read_back_error(path)


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return (offset of the first tensor, description of each tensor) of a file. ValueError if it is none."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= min(path.stat().st_size - 8, _LONGEST):
            raise ValueError(f"{path} has no header of safetensors")
        table = json.loads(file.read(size))
    if not isinstance(table, dict):
        raise ValueError(f"{path} has a header that is not an object")
    return 8 + size, {name: one for name, one in table.items() if name != _METADATA}
