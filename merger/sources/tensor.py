"""A tensor that lies in somebody else's file: which bytes, what dtype and shape. Nothing of it is read until asked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from merger.blocks import Block, Extent
from merger.tensors import memory_of, torch_dtype
from store.errors import DamagedError, UnsupportedError
from store.text import counted

SMALL = 1 << 28
"""Bytes of a record beyond which a tensor is not read as a plain value: memory stays bounded."""


@dataclass(frozen=True, eq=False)
class FileTensor:
    """Elements from byte ``offset`` of a block, row-major if ``contiguous``.

    dtype: as safetensors names it. where: for messages. lazy: what torch does to the bytes when it reads them
    (``conj``, ``neg``), or nothing.
    """

    block: Block
    offset: int
    dtype: str
    shape: tuple[int, ...]
    contiguous: bool
    where: str
    lazy: str = ""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def extent(self, fqn: str, slot: str, start: int, stop: int, at: int = 0) -> Extent:
        """Elements [start, stop) of (fqn, slot) are this tensor's from its element ``at``.

        UnsupportedError for a tensor that is not in order in memory, or not as it is there;
        DamagedError where it is too short.
        """
        self._refuse_lazy(fqn)
        if not self.contiguous:
            raise UnsupportedError(
                f"{self.where} is not contiguous in memory (shape {self.shape}), so it cannot be copied as one run of "
                "bytes: make it contiguous before saving, e.g. parameter.data = parameter.data.contiguous()"
            )
        if not 0 <= at <= at + stop - start <= self.numel:
            raise DamagedError(
                f"{self.where} has {counted(self.numel, 'element')}, and {fqn}/{slot} should be elements {at} to "
                f"{at + stop - start} of it"
            )
        offset = self.offset + at * torch_dtype(self.dtype).itemsize
        return Extent(fqn, slot, start, stop, self.dtype, self.block, offset)

    def same_place(self, other: FileTensor) -> bool:
        """Whether both are the same elements of the same file, as tied tensors are."""
        return self.numel > 0 and self.place() == other.place()

    def place(self) -> tuple[object, ...]:
        """Equal for tensors that are the same elements of the same record."""
        return self.block, self.offset, self.dtype, self.shape, self.contiguous, self.lazy

    def _refuse_lazy(self, name: str) -> None:
        if self.lazy:
            raise UnsupportedError(
                f"{name} ({self.where}) is a view that torch resolves as it reads ({self.lazy}): its bytes are not its "
                f"values. Store the values before saving, with tensor.resolve_{self.lazy}()"
            )

    def read(self) -> torch.Tensor:
        """The values, with memory of their own; the whole record's checksum is checked. For small tensors.

        DamagedError, UnsupportedError for one that is not contiguous, not small or lazily conjugated.
        """
        dtype = torch_dtype(self.dtype)
        self._refuse_lazy("a value")
        if self.numel and (not self.contiguous or self.block.nbytes > SMALL):
            raise UnsupportedError(
                f"{self.where} is too large, or not contiguous, to be kept as a plain value: {self.block.nbytes} bytes"
            )
        out = torch.empty(self.shape, dtype=dtype)
        if not self.numel:
            return out
        data = read_block(self.block)
        size = self.numel * dtype.itemsize
        memory_of(out)[:] = memoryview(data)[self.offset : self.offset + size]
        return out


def read_block(block: Block) -> bytearray:
    """All bytes of a small block. DamagedError unless they match its checksum."""
    data = bytearray(block.nbytes)
    block.files.read_into(block.path, block.offset, memoryview(data))
    running = block.checksum()
    running.update(memoryview(data))
    if running.hexdigest() != block.digest:
        raise DamagedError(f"{block.name}: the bytes of the record do not match its checksum")
    return data


def values(nest: Any) -> Any:
    """A nest with every tensor of a file replaced by its values. Raises what :meth:`FileTensor.read` raises."""
    if isinstance(nest, FileTensor):
        return nest.read()
    if isinstance(nest, Mapping):
        return {key: values(item) for key, item in nest.items()}
    if type(nest) in (list, tuple, set):
        return type(nest)(values(item) for item in nest)
    return nest
