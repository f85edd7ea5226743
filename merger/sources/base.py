"""Source protocol; checked reading of nested values.

What a source is: something that holds a complete training state, or part of one.

Names that stand in files of others: a hint where to look, never a way out of the directory.

A tensor that lies in somebody else's file: which bytes, what dtype and shape. Nothing of it is read until asked.

Reading a nest of plain values that somebody else wrote: every step says where it is, nothing is taken on trust.

Pure. It does not know what any framework means by its values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from merger.checkpoint import Checkpoint
from merger.io.blocks import Block, Damage, Extent
from merger.tensors import memory_of, torch_dtype
from store.errors import DamagedError, MergeError, MissingError, UnsupportedError
from store.storage.local import LocalFiles
from store.text import counted

_LIMIT = 1 << 10

SMALL = 1 << 28
"""Bytes of a record beyond which a tensor is not read as a plain value: memory stays bounded."""


class Source(Protocol):
    """One place that checkpoints are read from. Never changed by a merge.

    kind: as the command line says it: ``store``, ``deepspeed``, ``universal``.
    """

    kind: str

    def checkpoint(self, step: int | str | None, flaws: Set[Damage], /) -> Checkpoint:
        """The state at a step (or named save, or tag), or the newest one for None.

        flaws: versions of stores known to be damaged, which an older version has to stand in for.
        Raises MergeError, naming those that are there, for one that is not; DamagedError, NothingToResumeError.
        """
        ...

    def steps(self) -> tuple[int, ...]:
        """Steps of all checkpoints that are there, newest first."""
        ...


def read_name(folder: Path, file: str) -> str | None:
    """The name of a directory entry that a small file holds, such as ``latest``; None where there is no such file.

    MergeError for anything that is no plain name; DamagedError for a link or a file that is no text.
    """
    try:
        data = LocalFiles(folder).read(file, _LIMIT)
    except MissingError:
        return None
    try:
        text = data.decode().strip()
    except UnicodeDecodeError as error:
        raise DamagedError(f"{folder / file} is no text") from error
    return plain_name(text, str(folder / file))


def plain_name(text: str, where: str) -> str:
    """``text`` if it names an entry of a directory and nothing else. MergeError, naming ``where``."""
    if not text or text in (".", "..") or "/" in text or "\\" in text or not text.isprintable():
        raise MergeError(f"{where} names {text!r}, which is no name inside the directory; name the checkpoint yourself")
    return text


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
