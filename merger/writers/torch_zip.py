"""Write ``.pt`` files with planned tensors, and find the records of any ``.pt`` file.

``torch.save`` itself writes the file without the tensors' bytes; the zip checksums are set once those are there, so the
file is one that ``torch.save`` could have written. Peak memory: the plain values. Layout of the zip structures:
PKWARE's APPNOTE 6.3, sections 4.3.7 (local header), 4.3.9 (data descriptor) and 4.3.12 (directory entry)."""

import errno
import io
import mmap
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from isal import isal_zlib
from torch.utils._pytree import tree_iter, tree_map

from merger.checkpoint import PlannedTensor
from merger.io.output_file import Hole, read_back_error, write_error
from merger.tensors import memory_of
from store.errors import DamagedError, MergeError, UnsupportedError

_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE: no memory is set aside for it
_LOCAL, _DESCRIPTOR, _ENTRY = b"PK\x03\x04", b"PK\x07\x08", b"PK\x01\x02"


@dataclass
class PtFile:
    """One ``.pt`` file."""

    value: Any  # dicts, lists, tuples, plain values, tensors and :class:`PlannedTensor`
    classes: Sequence[Any] = ()  # other classes in it, which a reader with ``weights_only=True`` must allow
    _literals: dict[int, int] = field(default_factory=dict, init=False)  # CRC-32 of its own tensors, by offset
    _data: tuple[tuple[int, int], ...] = field(default=(), init=False)  # (offset, bytes) of all tensors, in order
    _rest: tuple[int, int] = field(default=(0, 0), init=False)  # size, and CRC-32 of everything but tensors

    def tensors(self) -> Iterable[PlannedTensor]:
        return {id(leaf): leaf for leaf in self._leaves if isinstance(leaf, PlannedTensor)}.values()

    @property
    def nbytes(self) -> int:
        leaves: dict[int, int] = {id(leaf): leaf.nbytes for leaf in self._leaves}
        return 1024 + sum(nbytes + 256 for nbytes in leaves.values())

    @cached_property
    def _leaves(self) -> list[Any]:
        """All tensors, searched once: the random states of many ranks are millions of numbers."""
        return _tensors(self.value)

    def make(self, path: Path) -> tuple[Hole, ...]:
        if path.exists() or path.is_symlink():
            raise FileExistsError("the file exists")
        own: dict[int, Any] = {}
        value = tree_map(partial(_hollow, own), self.value, is_leaf=_is_leaf)
        try:
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(value, path)
        except RuntimeError as error:  # torch's error when the system refuses to write
            raise write_error(path, self.nbytes, error) from error
        leaves = self._leaves
        offsets = _offsets(path, self.classes, leaves)
        self._data = _data(path, leaves, offsets)
        holes: dict[int, Hole] = {}
        with path.open("r+b") as file:
            for leaf, offset in zip(leaves, offsets, strict=True):
                if isinstance(leaf, PlannedTensor):
                    holes[offset] = Hole(offset, leaf)
                elif leaf.numel():
                    data = memory_of(own[id(leaf)])
                    self._literals[offset] = isal_zlib.crc32(data)
                    file.seek(offset)
                    file.write(data)
            self._rest = rest_of(file, self._data)
        return tuple(hole for hole in holes.values() if hole.stored.nbytes)

    def seal(self, path: Path, checksums: Mapping[int, int]) -> None:
        crcs = {**self._literals, **checksums}
        with path.open("r+b") as file:
            if rest_of(file, self._data) != self._rest:  # otherwise damage would become the expected content
                raise read_back_error(path)
            for record in _records(path):
                if record.offset in crcs and record.nbytes:
                    patch_checksum(file, record, crcs[record.offset])
            self._rest = rest_of(file, self._data)

    def check(self, path: Path) -> None:
        planned = {offset for offset, _ in self._data} - self._literals.keys()
        with path.open("rb") as file:
            sound = rest_of(file, self._data) == self._rest
            for record in _records(path) if sound else ():
                if record.offset not in planned:
                    file.seek(record.offset)
                    crc = isal_zlib.crc32(file.read(record.nbytes))
                    sound = sound and crc == record.crc == self._literals.get(record.offset, crc)
        if not sound:
            raise read_back_error(path)


def _is_leaf(value: Any) -> bool:
    return type(value) not in (dict, OrderedDict, list, tuple)


def _hollow(seen: dict[int, Any], leaf: Any) -> Any:
    """Return a tensor without memory in place of a planned one, and a copy of another tensor; once for each.

    The copy is contiguous, so that a view's base is not part of the file."""
    if isinstance(leaf, PlannedTensor) and id(leaf) not in seen:
        seen[id(leaf)] = hollow_tensor(leaf)
    elif isinstance(leaf, torch.Tensor) and id(leaf) not in seen:
        if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_nested:
            raise UnsupportedError(
                f"a tensor of shape {tuple(leaf.shape)} and dtype {leaf.dtype} is sparse, quantized or nested, which "
                "is not supported; keep it dense"
            )
        seen[id(leaf)] = leaf.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return seen.get(id(leaf), leaf)


def hollow_tensor(planned: PlannedTensor) -> torch.Tensor:
    """Return a tensor that takes no memory, for :func:`torch.serialization.skip_data`: nothing touches its pages."""
    if not planned.nbytes:
        return torch.empty(planned.shape, dtype=planned.dtype)
    try:
        memory = mmap.mmap(-1, planned.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        return torch.frombuffer(memory, dtype=planned.dtype).view(planned.shape)
    except OSError:  # a system that reserves memory for all that is mapped
        with fake_tensors():
            return torch.empty(planned.shape, dtype=planned.dtype)


def load_hollow(file: Any) -> Any:
    """Return what ``torch.load`` would; storages have no memory, but the ``_checkpoint_offset`` of theirs in the file.

    ``weights_only``: raises pickle.UnpicklingError for classes that are not allowed."""
    if _knows_places():
        return torch.load(file, map_location="meta", weights_only=True)
    with fake_tensors():
        return torch.load(file, map_location="cpu", weights_only=True)


@cache
def _knows_places() -> bool:
    """Return whether torch notes offsets when it loads to no device. Earlier versions do so for fake tensors only."""
    torch.save(torch.zeros(1), file := io.BytesIO())
    file.seek(0)
    return hasattr(torch.load(file, map_location="meta", weights_only=True).untyped_storage(), "_checkpoint_offset")


def fake_tensors() -> Any:
    """Return a context in which tensors take no memory. The first one in a process takes seconds."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def _tensors(value: Any) -> list[Any]:
    return [leaf for leaf in tree_iter(value, is_leaf=_is_leaf) if isinstance(leaf, PlannedTensor | torch.Tensor)]


def _offsets(path: Path, classes: Sequence[Any], leaves: Sequence[Any]) -> list[int]:
    """Return the offsets of the tensors' bytes in the same order, as torch itself reads the file."""
    try:
        # pickle writes b"" as a call of bytes, which weights_only does not know by itself.
        with torch.serialization.safe_globals([*classes, bytes]):
            value = load_hollow(path)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise MergeError(f"{path} cannot be read back: {error}") from error
    found = _tensors(value)
    if [(one.shape, one.dtype) for one in found] != [(one.shape, one.dtype) for one in leaves]:
        raise MergeError(f"{path} loads other tensors than were planned, or in another order")
    return [int(leaf.untyped_storage()._checkpoint_offset) for leaf in found]


def _data(path: Path, leaves: Sequence[Any], offsets: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return (offset, bytes) of all tensors of the file. MergeError unless they are exactly the leaves."""
    known = {offset: leaf.nbytes for leaf, offset in zip(leaves, offsets, strict=True)}
    found = {record.offset: record.nbytes for record in _records(path) if "/data/" in record.name}
    if known != found:
        raise MergeError(f"{path} would lose tensors inside sets or objects; keep tensors in dicts, lists and tuples")
    return tuple(sorted(found.items()))


def rest_of(file: BinaryIO, data: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the size of a file and the CRC-32 of everything but its tensors."""
    crc, position = 0, 0
    for offset, nbytes in data:
        file.seek(position)
        crc = isal_zlib.crc32(file.read(offset - position), crc)
        position = offset + nbytes
    file.seek(position)
    return file.tell(), isal_zlib.crc32(file.read(), crc)


def _records(path: Path) -> "list[Record]":
    try:
        return read_records(path)
    except DamagedError as error:
        raise read_back_error(path) from error


class Window(io.RawIOBase):
    """``nbytes`` bytes from ``start`` of an open file as a file. One thread."""

    def __init__(self, file: BinaryIO, start: int, nbytes: int) -> None:
        self._file, self._start, self._nbytes = file, start, nbytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._position = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._nbytes}[whence] + offset
        return self._position

    def readinto(self, target: object, /) -> int:
        view = memoryview(target).cast("B")  # type: ignore[arg-type]
        count = max(0, min(len(view), self._nbytes - self._position))
        self._file.seek(self._start + self._position)
        data = self._file.read(count)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


@dataclass(frozen=True)
class Record:
    """A zip record: bytes and CRC-32, and the offsets of its local header and of its directory entry."""

    name: str
    offset: int
    nbytes: int
    crc: int
    header: int
    entry: int


def read_records(path: Path) -> list[Record]:
    """Return all records of a zip file, in the order of its directory.

    Raises DamagedError unless it is a complete, uncompressed zip. OSError passes through."""
    with path.open("rb") as file:
        return read_records_from(file, path)


def read_records_from(file: BinaryIO, path: Path) -> list[Record]:
    """Return the records of an open zip file; ``path`` is its name in errors."""
    try:
        with zipfile.ZipFile(file) as directory:
            found = []
            entry = directory.start_dir
            for info in directory.infolist():
                if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                    raise DamagedError(f"{path}: record {info.filename} is compressed, which torch.save never does")
                offset = info.header_offset + _size_of(file, info.header_offset, path, _LOCAL, "<26x2H")
                if offset + info.file_size > directory.start_dir:
                    raise DamagedError(f"{path}: record {info.filename} ends beyond the file's data")
                found.append(Record(info.filename, offset, info.file_size, info.CRC, info.header_offset, entry))
                entry += _size_of(file, entry, path, _ENTRY, "<28x3H12x")
            return found
    except (zipfile.BadZipFile, struct.error, NotImplementedError, ValueError, OverflowError) as error:
        raise DamagedError(f"{path} is damaged, or in another format than torch.save's since 1.6: {error}") from error
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise DamagedError(f"{path} is damaged: its zip directory has a negative offset") from error


def patch_checksum(file: BinaryIO, record: Record, crc: int) -> None:
    """Set a record's CRC-32 at all its places in a file open for reading and writing."""
    value = struct.pack("<I", crc)
    file.seek(record.entry + 16)
    file.write(value)
    file.seek(record.header)
    flags = struct.unpack("<4sHH", file.read(8))[2]
    if not flags & 8:
        file.seek(record.header + 14)
        file.write(value)
        return
    file.seek(record.offset + record.nbytes)
    if file.read(4) != _DESCRIPTOR:
        raise DamagedError(f"record {record.name} has no data descriptor")
    file.write(value)


def _size_of(file: BinaryIO, offset: int, path: Path, begins: bytes, lengths: str) -> int:
    """Return the bytes of a zip structure: its fixed part, and the parts behind it whose ``lengths`` are in that."""
    file.seek(offset)
    head = file.read(struct.calcsize(lengths))
    if head[:4] != begins:
        raise DamagedError(f"{path} has no zip record or directory entry at byte {offset}")
    return len(head) + sum(map(int, struct.unpack(lengths, head)))
