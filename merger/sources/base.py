"""Define sources of checkpoints, and read nested values and tensors of foreign files with every step checked.

Names found in foreign files are only hints and never lead out of the directory. No tensor is read until asked for."""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from merger.checkpoint import Checkpoint
from merger.io.blocks import Block, Damage, Extent, put_together, read_chunks
from merger.tensors import memory_of, torch_dtype
from store.errors import DamagedError, MergeError, MissingError, UnsupportedError
from store.names import Box, Fragment
from store.storage.local import LocalFiles
from store.text import counted, listed

_NAME_LIMIT = 1 << 10  # largest file that holds a name, in bytes
SMALL = 1 << 28  # largest record, in bytes, whose tensor is read as a plain value: memory stays bounded


class Source(Protocol):
    """A place that checkpoints are read from; never changed. ``kind``: its kind, such as ``store`` or ``deepspeed``."""

    kind: str

    def checkpoint(self, step: int | str | None, flaws: Set[Damage], /) -> Checkpoint:
        """Return the state at a step (or save's name, or tag), or the newest one for None.

        ``flaws``: damaged versions in stores, for which older ones are used. Raises MergeError, naming those that
        exist, if the checkpoint does not; DamagedError if it cannot be read; NothingToResumeError if there is none."""

    def steps(self) -> tuple[int, ...]:
        """Return the steps of all checkpoints, newest first."""


def read_name(folder: Path, file: str) -> str | None:
    """Return the directory entry that a small file such as ``latest`` names; None if there is no such file.

    Raises MergeError if it is not a plain name; DamagedError for a link or a file that is not text."""
    try:
        data = LocalFiles(folder).read(file, _NAME_LIMIT)
    except MissingError:
        return None
    try:
        text = data.decode().strip()
    except UnicodeDecodeError as error:
        raise DamagedError(f"{folder / file} is not text") from error
    return checked_name(text, str(folder / file))


def checked_name(text: str, where: str) -> str:
    """Return ``text`` if it names a directory entry and nothing else. MergeError, naming ``where``."""
    if not text or text in (".", "..") or "/" in text or "\\" in text or not text.isprintable():
        raise MergeError(f"{where} names {text!r}, which is not an entry of the directory; name the checkpoint")
    return text


class StoredTensor:
    """A tensor of ``shape`` in files, in one piece or in several. ``dtype``: safetensors name."""

    dtype: str
    shape: tuple[int, ...]

    def parts(self) -> "Sequence[tuple[tuple[int, ...], FileTensor]]":
        """Return the (offsets in the whole tensor, elements) of its boxes, in order."""
        return [((0,) * len(self.shape), cast("FileTensor", self))]

    def read(self) -> torch.Tensor:
        """Read a small tensor and check its whole record. DamagedError, UnsupportedError."""
        where = listed((part.where for _, part in self.parts()), 2)
        raise UnsupportedError(f"{where}: a sharded tensor of another shape than its parameter is not read")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def extents(self, fqn: str, slot: str) -> Sequence[Extent]:
        """Return where the elements lie, as extents of (fqn, slot). Raises as :meth:`FileTensor.extent`."""
        out = []
        for at, part in self.parts():
            fragment = Fragment.of_box(fqn, slot, Box(at, part.shape, self.shape))
            out.append(replace(part.extent(fqn, slot, fragment.start, fragment.stop), box=fragment.box))
        return put_together(out)

    def place(self) -> tuple[object, ...]:
        """Return a key that is equal for tensors of the same elements of the same records."""
        return tuple((at, x.block, x.offset, x.dtype, x.shape, x.contiguous, x.lazy) for at, x in self.parts())


@dataclass(frozen=True, eq=False)
class FileTensor(StoredTensor):
    """Elements from byte ``offset`` of a block, row-major if ``contiguous``."""

    block: Block
    offset: int
    dtype: str
    shape: tuple[int, ...]
    contiguous: bool
    where: str  # place in messages
    lazy: str = ""  # what torch does to the bytes on reading (``conj``, ``neg``), or ""

    def extent(self, fqn: str, slot: str, start: int, stop: int, at: int = 0) -> Extent:
        """Return where elements [start, stop) of (fqn, slot) lie, which begin at element ``at`` of this tensor.

        Raises UnsupportedError if the tensor is not contiguous or is lazy; DamagedError if it is too short."""
        self._refuse_lazy(fqn)
        if not self.contiguous:
            raise UnsupportedError(
                f"{self.where} (shape {self.shape}) is not contiguous in memory, so it cannot be copied; make it "
                "contiguous before saving, e.g. parameter.data = parameter.data.contiguous()"
            )
        if not 0 <= at <= at + stop - start <= self.numel:
            raise DamagedError(
                f"{self.where} has {counted(self.numel, 'element')}, but {fqn}/{slot} needs elements {at} to "
                f"{at + stop - start} of it"
            )
        offset = self.offset + at * torch_dtype(self.dtype).itemsize
        return Extent(fqn, slot, start, stop, self.dtype, self.block, offset)

    def _refuse_lazy(self, name: str) -> None:
        if self.lazy:
            raise UnsupportedError(
                f"{name} ({self.where}) is a lazy view ({self.lazy}), so its bytes are not its values; call "
                f"tensor.resolve_{self.lazy}() before saving"
            )

    def read(self) -> torch.Tensor:
        dtype = torch_dtype(self.dtype)
        self._refuse_lazy("a value")
        if self.numel and (not self.contiguous or self.block.nbytes > SMALL):
            raise UnsupportedError(
                f"{self.where} ({self.block.nbytes} bytes) is too large, or not contiguous, for a plain value"
            )
        out = torch.empty(self.shape, dtype=dtype)
        if self.numel:
            data, end = read_block(self.block), self.offset + self.numel * dtype.itemsize
            memory_of(out)[:] = memoryview(data)[self.offset : end]
        return out


@dataclass(frozen=True, eq=False)
class ChunkedTensor(StoredTensor):
    """A tensor in boxes, as DCP stores it. ``chunks``: (offsets in the whole tensor, elements) of each."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], FileTensor], ...]

    def parts(self) -> Sequence[tuple[tuple[int, ...], FileTensor]]:
        return sorted(self.chunks, key=lambda chunk: chunk[0])


def read_block(block: Block) -> bytearray:
    """Read a small block. DamagedError unless it matches its checksum."""
    data = bytearray(block.nbytes)
    list(read_chunks(block, memoryview(data)))
    return data


def read_values(nest: Any) -> Any:
    """Return a nest with every tensor of a file replaced by its values. Raises as :meth:`FileTensor.read`."""
    if isinstance(nest, StoredTensor):
        return nest.read()
    if isinstance(nest, Mapping):
        return {key: read_values(item) for key, item in nest.items()}
    return type(nest)(read_values(item) for item in nest) if type(nest) in (list, tuple, set) else nest


@dataclass(frozen=True)
class Nest:
    """A value in a file. ``where``: the file and the path to the value, for messages.

    Every method raises DamagedError, naming ``where``, for a value of another kind."""

    value: Any
    where: str

    def at(self, key: object) -> "Nest":
        """Return an item of a mapping or a list."""
        value = self.value
        in_list = isinstance(value, list | tuple) and isinstance(key, int) and 0 <= key < len(value)
        if in_list or (isinstance(value, Mapping) and key in value):
            return Nest(value[key], f"{self.where}, {key}")
        raise DamagedError(f"{self.where} has no {key!r}, which every checkpoint of this kind has")

    def get(self, key: object) -> "Nest | None":
        """Return an item of a mapping, or None if it is absent or None."""
        found = self.mapping().get(key)
        return None if found is None else Nest(found, f"{self.where}, {key}")

    def mapping(self) -> Mapping[Any, Any]:
        return self._of((Mapping,), "a mapping")  # type: ignore[no-any-return]

    def items(self) -> "Iterator[tuple[str, Nest]]":
        """Yield the items of a mapping whose keys are strings."""
        for name in [Nest(key, f"{self.where}, a key").text() for key in self.mapping()]:
            yield name, Nest(self.value[name], f"{self.where}, {name}")

    def entries(self) -> "list[Nest]":
        """Return the items of a list or tuple."""
        return [Nest(value, f"{self.where}, {i}") for i, value in enumerate(self._of((list, tuple), "a list"))]

    def text(self) -> str:
        """Return a string that is not empty."""
        found = self._of((str,), "a name")
        if not found:
            raise DamagedError(f"{self.where} is empty, but must be a name")
        return str(found)

    def natural(self) -> int:
        """Return an integer of at least 0."""
        found = self._of((int,), "a number")
        if isinstance(found, bool) or found < 0:
            raise DamagedError(f"{self.where} is {found!r}, but must be an integer of at least 0")
        return int(found)

    def naturals(self) -> tuple[int, ...]:
        """Return a list of integers of at least 0, such as a shape."""
        return tuple(entry.natural() for entry in self.entries())

    def tensor(self) -> FileTensor:
        return self._of((FileTensor,), "a tensor")  # type: ignore[no-any-return]

    def _of(self, kinds: tuple[type, ...], expected: str) -> Any:
        if not isinstance(self.value, kinds):
            raise DamagedError(f"{self.where} is a {type(self.value).__name__}, but must be {expected}")
        return self.value
