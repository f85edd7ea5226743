"""Write files of ``torch.distributed.checkpoint``: ``*.distcp`` and ``.metadata``.

A ``.distcp`` file is a row of ``torch.save`` blobs. ``torch.save`` writes each without the tensor's bytes; the zip
checksums inside are set once those bytes are there. ``.metadata`` is a pickle of torch's classes with the place of each
blob, so it is made last. Peak memory: the plain values."""

import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from merger.checkpoint import PlannedTensor
from merger.io.output_file import Hole, VerbatimFile, read_back_error, write_error
from merger.writers.torch_zip import Record, Window, hollow_tensor, patch_checksum, read_records_from, rest_of

_BLOB_BYTES = 1300  # approximate overhead of `torch.save` per value


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
    """``nbytes`` bytes from ``start`` of the file, and the zip record of planned bytes, if any, by its place there."""

    start: int
    nbytes: int
    planned: Record | None


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
        try:
            with path.open("x+b") as file:
                self.blobs += [_write(file, item.value, path) for item in self.items]
        except RuntimeError as error:  # torch's error when the system refuses to write
            raise write_error(path, self.nbytes, error) from error
        return tuple(Hole(record.offset, stored) for record, stored in self._planned())

    def seal(self, path: Path, checksums: Mapping[int, int]) -> None:
        with path.open("r+b") as file:
            for record, _ in self._planned():
                patch_checksum(file, record, checksums[record.offset])
            self._rest = rest_of(file, self._data())

    def check(self, path: Path) -> None:
        with path.open("rb") as file:
            sound = rest_of(file, self._data()) == self._rest
        if not sound:
            raise read_back_error(path)

    def _planned(self) -> list[tuple[Record, PlannedTensor]]:
        pairs = zip(self.blobs, self.items, strict=True)
        return [(blob.planned, item.value) for blob, item in pairs if blob.planned is not None]

    def _data(self) -> list[tuple[int, int]]:
        return [(record.offset, record.nbytes) for record, _ in self._planned()]


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


def _write(file: BinaryIO, value: Any, path: Path) -> _Blob:
    start = file.seek(0, os.SEEK_END)
    if isinstance(value, PlannedTensor):
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(hollow_tensor(value), file)
    else:
        torch.save(value.detach().clone() if isinstance(value, torch.Tensor) else value, file)
    nbytes = file.seek(0, os.SEEK_END) - start
    if not isinstance(value, PlannedTensor) or not value.nbytes:
        return _Blob(start, nbytes, None)
    found = read_records_from(cast("BinaryIO", Window(file, start, nbytes)), path)
    (own,) = (record for record in found if "/data/" in record.name)
    shifted = replace(own, offset=start + own.offset, header=start + own.header, entry=start + own.entry)
    return _Blob(start, nbytes, shifted)
