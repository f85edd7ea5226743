"""Write files of ``torch.distributed.checkpoint``: ``*.distcp`` and ``.metadata``.

A ``.distcp`` file is a row of ``torch.save`` blobs. ``torch.save`` writes each without the tensor's bytes; the zip
checksums inside are set once those bytes are there. ``.metadata`` is a pickle of torch's classes with the place of each
blob, so it is made last. Peak memory: the plain values."""

import io
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from merger.checkpoint import PlannedTensor
from merger.io.output_file import Hole, VerbatimFile, read_back_error, write_error
from merger.writers.torch_zip import Record, hollow_tensor, patch_checksum, read_records_from, rest_of

_BLOB_BYTES = 1300  # approximate overhead of `torch.save` per value


class Window(io.RawIOBase):
    """``nbytes`` bytes from ``start`` of an open file as a file; None: as many as are written. One thread."""

    def __init__(self, file: BinaryIO, start: int, nbytes: int | None = None) -> None:
        self._file, self._start = file, start
        self.nbytes = nbytes or 0
        self._position = 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return self._file.writable()

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._position = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.nbytes}[whence] + offset
        return self._position

    def readinto(self, target: object, /) -> int:
        view = memoryview(target).cast("B")  # type: ignore[arg-type]
        count = max(0, min(len(view), self.nbytes - self._position))
        self._file.seek(self._start + self._position)
        data = self._file.read(count)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def write(self, data: object, /) -> int:
        """Write at the position; skipped bytes are zeros."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        self._file.seek(self._start + self._position)
        self._file.write(view)
        self._position += len(view)
        self.nbytes = max(self.nbytes, self._position)
        return len(view)


@dataclass(frozen=True, eq=False)
class Item:
    """One blob."""

    index: MetadataIndex  # its name and, for a tensor, its offset in the whole tensor
    value: Any  # a planned tensor, a small tensor, or a plain value

    @property
    def nbytes(self) -> int:
        """Approximate size in the file."""
        return _BLOB_BYTES + (self.value.nbytes if isinstance(self.value, PlannedTensor | torch.Tensor) else 0)


@dataclass(frozen=True)
class _Blob:
    """``nbytes`` bytes from ``start`` of the file, its zip records, and the offset of planned bytes, if any."""

    start: int
    nbytes: int
    records: Sequence[Record]
    data: int | None


@dataclass
class DcpFile:
    """One ``.distcp`` file."""

    items: Sequence[Item]
    blobs: list[_Blob] = field(default_factory=list, init=False)  # place of each item, once the file is made
    _rest: tuple[int, int] = field(default=(0, 0), init=False)  # size, and CRC-32 of everything but planned tensors

    def tensors(self) -> Iterable[PlannedTensor]:
        return (item.value for item in self.items if isinstance(item.value, PlannedTensor))

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)

    def make(self, path: Path) -> tuple[Hole, ...]:
        holes, start = [], 0
        try:
            with path.open("x+b") as file:
                for item in self.items:
                    blob = _write(file, start, item.value, path)
                    self.blobs.append(blob)
                    if blob.data is not None:
                        holes.append(Hole(blob.data, item.value))
                    start += blob.nbytes
        except RuntimeError as error:  # torch's error when the system refuses to write
            raise write_error(path, self.nbytes, error) from error
        return tuple(holes)

    def seal(self, path: Path, checksums: Mapping[int, int]) -> None:
        with path.open("r+b") as file:
            for blob in self.blobs:
                window = cast("BinaryIO", Window(file, blob.start, blob.nbytes))
                for record in blob.records:
                    if blob.start + record.offset == blob.data:
                        patch_checksum(window, record, checksums[blob.data])
            self._rest = rest_of(file, self._planned())

    def check(self, path: Path) -> None:
        with path.open("rb") as file:
            sound = rest_of(file, self._planned()) == self._rest
        if not sound:
            raise read_back_error(path)

    def _planned(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, bytes) of the planned tensors."""
        for blob, item in zip(self.blobs, self.items, strict=True):
            if blob.data is not None:
                yield blob.data, item.value.nbytes


@dataclass
class DcpMetadata(VerbatimFile):
    """The ``.metadata`` file. ``data`` is known once the other files are made."""

    metadata: Metadata  # everything but the places of the blobs
    files: Mapping[str, DcpFile]  # the ``.distcp`` files by name, made before it
    aliases: Mapping[MetadataIndex, MetadataIndex]  # further indices of a blob, as tied tensors have
    data: bytes = field(default=b"", init=False)

    @property
    def nbytes(self) -> int:
        return 4096 + 256 * (len(self.aliases) + sum(len(file.items) for file in self.files.values()))

    def make(self, path: Path) -> tuple[Hole, ...]:
        places = {
            item.index: _StorageInfo(name, blob.start, blob.nbytes)
            for name, file in self.files.items()
            for item, blob in zip(file.items, file.blobs, strict=True)
        }
        places |= {alias: places[index] for alias, index in self.aliases.items()}
        self.data = pickle.dumps(replace(self.metadata, storage_data=places))
        return super().make(path)


def _write(file: BinaryIO, start: int, value: Any, path: Path) -> _Blob:
    window = cast("BinaryIO", Window(file, start))
    if isinstance(value, PlannedTensor):
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(hollow_tensor(value), window)
    else:
        torch.save(value.detach().clone() if isinstance(value, torch.Tensor) else value, window)
    found = read_records_from(window, path)
    data = None
    if isinstance(value, PlannedTensor) and value.nbytes:
        (data,) = (start + record.offset for record in found if "/data/" in record.name)
    return _Blob(start, window.seek(0, os.SEEK_END), found, data)
