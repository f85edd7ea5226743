"""Payload files: safetensors, hashed as they stream out, read back piece by piece with every hash checked.

Any safetensors reader opens a payload. This module writes the container itself because it must hash each piece
while it is written and fsync before the name appears. Offsets are relative to the end of the header.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from store.durable import write_new
from store.errors import DamagedError
from store.files import Files, NewFile
from store.record import digest

_CHUNK = 1 << 22
_ALIGN = 64


class Produced(Protocol):
    """Bytes that are made while they are written, so that they need not all be in memory."""

    @property
    def nbytes(self) -> int:
        """How many there will be."""
        ...

    def pieces(self) -> Iterable[memoryview]:
        """All of them, once. Each piece stands still until the next is asked for; what is raised ends the write."""
        ...


Data = bytes | bytearray | memoryview | Produced


@dataclass(frozen=True)
class Item:
    """One tensor to write. ``data`` must not change until the write returns."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Data

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        if isinstance(self.data, bytes | bytearray | memoryview):
            return memoryview(self.data).nbytes
        return self.data.nbytes


@dataclass(frozen=True)
class Placed:
    """Where an item ended up, and its hash."""

    offset: int
    nbytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Payload:
    """A written payload."""

    payload_bytes: int
    header_bytes: int
    header_xxh3_128: str
    placed: tuple[Placed, ...]


def write_payload(
    files: Files, path: str, items: Sequence[Item], meanwhile: Callable[[], None] = lambda: None
) -> Payload:
    """Write all items under a name that must not exist; durable on return.

    ``meanwhile`` runs once when all bytes are handed to the device and before they are waited for."""
    header, offsets = _header(items)
    hashes: list[str] = []

    def fill(file: NewFile) -> None:
        hashes.clear()
        file.write(header)
        hashes.extend(_stream(file, item) for item in items)
        meanwhile()

    write_new(files, path, fill)
    placed = tuple(
        Placed(offset, item.nbytes, found) for offset, item, found in zip(offsets, items, hashes, strict=True)
    )
    total = len(header) + sum(item.nbytes for item in items)
    return Payload(total, len(header), digest(header), placed)


def read_piece(files: Files, path: str, header_bytes: int, piece: Placed, target: memoryview) -> None:
    """Fill ``target`` (exactly ``piece.nbytes`` bytes) and check its hash. DamagedError where it is not right."""
    if target.nbytes != piece.nbytes:
        raise DamagedError(f"{path}: a piece of {piece.nbytes} bytes does not fit where {target.nbytes} are expected")
    files.read_into(path, header_bytes + piece.offset, target)
    if digest(target) != piece.xxh3_128:
        raise DamagedError(f"{path}: bytes {piece.offset} to {piece.offset + piece.nbytes} do not match their hash")


def check_header(files: Files, path: str, header_bytes: int, expected: str) -> None:
    """Check the container's own header. DamagedError where it is not what was written."""
    found = bytearray(header_bytes)
    files.read_into(path, 0, memoryview(found))
    if digest(found) != expected:
        raise DamagedError(f"{path}: the safetensors header does not match its hash")


def _header(items: Sequence[Item]) -> tuple[bytes, list[int]]:
    offsets, position, table = [], 0, {}
    for item in items:
        offsets.append(position)
        end = position + item.nbytes
        table[item.name] = {"dtype": item.dtype, "shape": list(item.shape), "data_offsets": [position, end]}
        position = end
    if len(table) != len(items):
        raise ValueError("two items of a payload have the same name")
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGN)
    return len(text).to_bytes(8, "little") + text, offsets


def _stream(file: NewFile, item: Item) -> str:
    state, written = xxhash.xxh3_128(), 0
    for piece in _pieces(item.data):
        state.update(piece)
        file.write(piece)
        written += len(piece)
    if written != item.nbytes:
        raise ValueError(f"{item.name} was to have {item.nbytes} bytes and came to {written}")
    return state.hexdigest()


def _pieces(data: Data) -> Iterable[memoryview]:
    if not isinstance(data, bytes | bytearray | memoryview):
        return data.pieces()
    view = memoryview(data)
    flat = view.cast("B") if view.nbytes else memoryview(b"")  # an empty view of several dimensions has no cast
    return (flat[start : start + _CHUNK] for start in range(0, len(flat), _CHUNK))
