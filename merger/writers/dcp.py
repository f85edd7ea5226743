""".distcp and .metadata.

A part of an open file that behaves as a file of its own, as blobs inside a larger file need it.

Closing it leaves the file open. It does not know what is in the blob. One thread.

Files of ``torch.distributed.checkpoint``: ``*.distcp``, blobs of ``torch.save`` in a row, and ``.metadata``.

``torch.save`` writes every blob, without the tensors' bytes; the zip checksums inside are put in when those are
there. ``.metadata`` is a pickle of torch's own classes, and says where each blob lies: it is made after the others.
Peak memory: the plain values. This file does not know which keys a checkpoint has or how its tensors are cut.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from isal import isal_zlib
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from merger.checkpoint import Stored
from merger.io.output_file import Hole, refusal
from merger.writers.torch_zip import Record, patch_checksum, records_in
from store.errors import MergeError

_BLOB_BYTES = 1300
"""About what ``torch.save`` puts around one value."""


class Window(io.RawIOBase):
    """Bytes from ``start`` of ``file``: ``nbytes`` of them, or, with None, as many as get written."""

    def __init__(self, file: BinaryIO, start: int, nbytes: int | None = None) -> None:
        self._file, self._start = file, start
        self.nbytes = nbytes or 0
        """Size in bytes, as far as is known."""
        self._position = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def writable(self) -> bool:
        """As the file is."""
        return self._file.writable()

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Position from the window's start."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Set the position; beyond the end is allowed."""
        self._position = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.nbytes}[whence] + offset
        return self._position

    def readinto(self, target: object, /) -> int:
        """Fill ``target`` up to the window's end."""
        view = memoryview(target).cast("B")  # type: ignore[arg-type]
        count = max(0, min(len(view), self.nbytes - self._position))
        self._file.seek(self._start + self._position)
        data = self._file.read(count)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def write(self, data: object, /) -> int:
        """Write at the position; what was skipped is zeros."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        self._file.seek(self._start + self._position)
        self._file.write(view)
        self._position += len(view)
        self.nbytes = max(self.nbytes, self._position)
        return len(view)


@dataclass(frozen=True, eq=False)
class Item:
    """One blob. index: its name and, for a tensor, where in the whole tensor it begins.

    value: a planned tensor, a small tensor, or a plain value.
    """

    index: MetadataIndex
    value: Any

    @property
    def nbytes(self) -> int:
        """About its size in the file."""
        return _BLOB_BYTES + (self.value.nbytes if isinstance(self.value, Stored | torch.Tensor) else 0)


@dataclass(frozen=True)
class _Blob:
    """``nbytes`` bytes from ``start`` of the file. records: of its zip. data: offset of the planned bytes, if any."""

    start: int
    nbytes: int
    records: Sequence[Record]
    data: int | None


@dataclass
class DcpFile:
    """One ``.distcp`` file."""

    items: Sequence[Item]
    blobs: list[_Blob] = field(default_factory=list, init=False)
    """Where each item lies, once the file is made."""
    _rest: tuple[int, int] = field(default=(0, 0), init=False)
    """Size and CRC-32 of all that is not a planned tensor."""

    def tensors(self) -> Iterable[Stored]:
        return (item.value for item in self.items if isinstance(item.value, Stored))

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
        except RuntimeError as error:  # how torch tells that the system refused to write
            raise refusal(path, self.nbytes, error) from error
        return tuple(holes)

    def seal(self, path: Path, checksums: Mapping[int, int]) -> None:
        with path.open("r+b") as file:
            for blob in self.blobs:
                window = cast("BinaryIO", Window(file, blob.start, blob.nbytes))
                for record in blob.records:
                    if blob.start + record.offset == blob.data:
                        patch_checksum(window, record, checksums[blob.data])
            self._rest = self._rest_of(file)

    def check(self, path: Path) -> None:
        with path.open("rb") as file:
            sound = self._rest_of(file) == self._rest and not file.read(1)
        if not sound:
            raise MergeError(
                f"{path} does not read back as it was written: the storage under it is not to be trusted; check "
                "`dmesg`, or name an output directory elsewhere"
            )

    def _rest_of(self, file: BinaryIO) -> tuple[int, int]:
        """(size, CRC-32) of everything but the planned tensors, as it is in the file now. Leaves it at its end."""
        size = crc = 0
        file.seek(0)
        for blob, item in zip(self.blobs, self.items, strict=True):
            parts = [blob.start + blob.nbytes]
            if blob.data is not None:
                parts = [blob.data, *parts]
            for number, stop in enumerate(parts):
                if number:
                    file.seek(item.value.nbytes, os.SEEK_CUR)
                data = file.read(stop - file.tell())
                size, crc = size + len(data), isal_zlib.crc32(data, crc)
        return size, crc


@dataclass
class DcpMetadata:
    """``.metadata``. files: by name, those that it is about, made before it.

    metadata: all but where the blobs lie. aliases: further indices under which a blob is found, as of tied tensors.
    """

    metadata: Metadata
    files: Mapping[str, DcpFile]
    aliases: Mapping[MetadataIndex, MetadataIndex]
    _written: bytes = field(default=b"", init=False)

    @property
    def nbytes(self) -> int:
        return 4096 + 256 * (len(self.aliases) + sum(len(file.items) for file in self.files.values()))

    def tensors(self) -> tuple[Stored, ...]:
        """None."""
        return ()

    def make(self, path: Path) -> tuple[Hole, ...]:
        places = {
            item.index: _StorageInfo(name, blob.start, blob.nbytes)
            for name, file in self.files.items()
            for item, blob in zip(file.items, file.blobs, strict=True)
        }
        places |= {alias: places[index] for alias, index in self.aliases.items()}
        self._written = pickle.dumps(replace(self.metadata, storage_data=places))
        with path.open("xb") as file:
            file.write(self._written)
        return ()

    def seal(self, path: Path, checksums: Mapping[int, int]) -> None:
        """Nothing to do."""

    def check(self, path: Path) -> None:
        if path.read_bytes() != self._written:
            raise MergeError(f"{path} does not read back as it was written: the storage under it is not to be trusted")


def _write(file: BinaryIO, start: int, value: Any, path: Path) -> _Blob:
    window = cast("BinaryIO", Window(file, start))
    if isinstance(value, Stored):
        with FakeTensorMode():
            hollow = torch.empty(value.shape, dtype=value.dtype)  # takes no memory
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(hollow, window)
    else:
        torch.save(value.detach().clone() if isinstance(value, torch.Tensor) else value, window)
    found = records_in(window, path)
    data = None
    if isinstance(value, Stored) and value.nbytes:
        (data,) = (start + record.offset for record in found if "/data/" in record.name)
    return _Blob(start, window.seek(0, os.SEEK_END), found, data)
