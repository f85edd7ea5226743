"""``.pt`` files: the nest of plain values that ``torch.load`` gives back, with planned tensors inside.

``torch.save`` itself writes the file, without the tensors' bytes; the zip's checksums are put in when those are
there, so that the file is one that ``torch.save`` could have written. Peak memory: the plain values.
It does not know what the values mean.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from isal import isal_zlib
from torch._subclasses.fake_tensor import FakeTensorMode

from merger.containers.base import Hole
from merger.containers.zip import Record, patch_checksum, records
from merger.stored import Stored
from merger.tensors import memory_of
from store.errors import MergeError


@dataclass
class PtFile:
    """One ``.pt`` file. value: dicts, lists, tuples, plain values, tensors and :class:`Stored`.

    classes: what may occur in it besides; whoever loads it with ``weights_only=True`` has to allow these.
    """

    value: Any
    classes: Sequence[Any] = ()
    _structure: int = field(default=0, init=False)
    """CRC-32 of the pickle, as written."""
    _literals: dict[int, int] = field(default_factory=dict, init=False)
    """CRC-32 of the tensors that were there already, by offset."""

    def tensors(self) -> Iterable[Stored]:
        """See :class:`merger.containers.base.Container`."""
        return {id(leaf): leaf for leaf in _leaves(self.value) if isinstance(leaf, Stored)}.values()

    @property
    def nbytes(self) -> int:
        """See :class:`merger.containers.base.Container`."""
        leaves: dict[int, int] = {id(leaf): leaf.nbytes for leaf in _leaves(self.value)}
        return 1024 + sum(nbytes + 256 for nbytes in leaves.values())

    def make(self, path: Path) -> tuple[Hole, ...]:
        """See :class:`merger.containers.base.Container`."""
        if path.exists() or path.is_symlink():
            raise FileExistsError("the name is taken")
        try:
            value = _hollow(self.value, FakeTensorMode(), {})
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(value, path)
        except RuntimeError as error:  # how torch tells that the system refused to write
            raise OSError(str(error)) from error
        holes: dict[int, Hole] = {}
        for leaf, offset in zip(_leaves(self.value), _offsets(path, self.classes), strict=True):
            if isinstance(leaf, Stored):
                holes[offset] = Hole(offset, leaf)
            elif leaf.numel():
                self._literals[offset] = _write_literal(path, offset, leaf)
        self._structure = _pickle_of(path).crc
        return tuple(hole for hole in holes.values() if hole.stored.nbytes)

    def seal(self, path: Path, checksums: Mapping[int, int]) -> None:
        """See :class:`merger.containers.base.Container`."""
        crcs = {**self._literals, **checksums}
        with path.open("r+b") as file:
            for record in records(path):
                if record.offset in crcs and record.nbytes:
                    patch_checksum(file, record, crcs[record.offset])

    def check(self, path: Path) -> None:
        """See :class:`merger.containers.base.Container`."""
        try:
            with zipfile.ZipFile(path) as found:
                for info in found.infolist():
                    if "/data/" not in info.filename:
                        found.read(info)  # checks its CRC-32
            sound = _pickle_of(path).crc == self._structure
            data = {record.offset: record for record in records(path)}
            with path.open("rb") as file:
                for offset, crc in self._literals.items():
                    file.seek(offset)
                    sound = sound and isal_zlib.crc32(file.read(data[offset].nbytes)) == crc == data[offset].crc
        except (zipfile.BadZipFile, KeyError, EOFError) as error:
            raise MergeError(f"{path} does not read back: {error}") from error
        if not sound:
            raise MergeError(
                f"{path} does not read back as it was written: the storage under it is not to be trusted; check "
                "`dmesg`, or name an output directory elsewhere"
            )


def _hollow(value: Any, mode: FakeTensorMode, seen: dict[int, Any]) -> Any:
    """``value`` with tensors that hold no memory in the place of planned ones."""
    if isinstance(value, Stored):
        if id(value) not in seen:
            with mode:
                seen[id(value)] = torch.empty(value.shape, dtype=value.dtype)
        return seen[id(value)]
    if isinstance(value, torch.Tensor):
        if id(value) not in seen:
            # Memory of its own and in order: what it was a view of is not part of the file.
            seen[id(value)] = value.detach().clone(memory_format=torch.contiguous_format)
        return seen[id(value)]
    if isinstance(value, OrderedDict):
        return OrderedDict((key, _hollow(item, mode, seen)) for key, item in value.items())
    if type(value) is dict:
        return {key: _hollow(item, mode, seen) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_hollow(item, mode, seen) for item in value)
    return value


def _leaves(value: Any) -> Iterator[Any]:
    """Tensors, planned ones and others, in the order in which they are met."""
    if isinstance(value, Stored | torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)


def _offsets(path: Path, classes: Sequence[Any]) -> list[int]:
    """Where the tensors' bytes begin, in the same order, as torch reads the file: nothing of its format is guessed."""
    try:
        with torch.serialization.safe_globals(list(classes)), FakeTensorMode():
            value = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise MergeError(f"{path} cannot be read back: {error}") from error
    return [int(leaf.untyped_storage()._checkpoint_offset) for leaf in _leaves(value)]


def _pickle_of(path: Path) -> Record:
    return next(record for record in records(path) if record.name.endswith("/data.pkl"))


def _write_literal(path: Path, offset: int, tensor: torch.Tensor) -> int:
    data = memory_of(tensor.detach().contiguous())
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
    return isal_zlib.crc32(data)
