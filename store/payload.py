"""Payload files: safetensors, hashed as they stream out, read back piece by piece with every hash checked.

Any safetensors reader opens a payload. This module writes the container itself because it must hash each piece
while it is written and fsync before the name appears. Offsets are relative to the end of the header.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import xxhash

from store.durable import write_new
from store.errors import DamagedError
from store.files import Files, NewFile
from store.record import digest

_CHUNK = 1 << 22
_ALIGN = 64

_HASHED = 1 << 20
"""Bytes read and hashed at a time, so that hashing finds them in the core's cache."""


class Produced(Protocol):
    """Bytes that are made while they are written, so that they need not all be in memory."""

    @property
    def nbytes(self) -> int:
        """How many there will be; where not ``exact``, at most."""
        ...

    @property
    def exact(self) -> bool:
        """Whether the number is known before they are made."""
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
        """Size in bytes; where it is not known yet, the largest it may come to."""
        if isinstance(self.data, bytes | bytearray | memoryview):
            return memoryview(self.data).nbytes
        return self.data.nbytes

    @property
    def exact(self) -> bool:
        """Whether ``nbytes`` is the size. Otherwise the item is a row of bytes (``U8``), as many as come."""
        return isinstance(self.data, bytes | bytearray | memoryview) or self.data.exact


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
    if len({item.name for item in items}) != len(items):
        raise ValueError("two items of a payload have the same name")
    reserved = _header(items, [item.nbytes for item in items], 0)
    headers: list[bytes] = []
    found: list[tuple[int, str]] = []

    def fill(file: NewFile) -> None:
        headers[:], found[:] = [reserved], []
        file.write(reserved)
        found.extend(_stream(file, item) for item in items)
        if not all(item.exact for item in items):  # sizes only shrink, and shorter numbers leave room
            headers[:] = [_header(items, [nbytes for nbytes, _ in found], len(reserved))]
            file.write_at(0, headers[0])
        meanwhile()

    most = len(reserved) + sum(item.nbytes for item in items)
    write_new(files, path, fill, patched=not all(item.exact for item in items), most=most)
    ends = list(accumulate(nbytes for nbytes, _ in found))
    placed = tuple(Placed(end - nbytes, nbytes, hashed) for end, (nbytes, hashed) in zip(ends, found, strict=True))
    return Payload(len(reserved) + (ends[-1] if ends else 0), len(reserved), digest(headers[0]), placed)


def read_piece(files: Files, path: str, header_bytes: int, piece: Placed, target: memoryview) -> None:
    """Fill ``target`` (exactly ``piece.nbytes`` bytes) and check its hash. DamagedError where it is not right."""
    if target.nbytes != piece.nbytes:
        raise DamagedError(f"{path}: a piece of {piece.nbytes} bytes does not fit where {target.nbytes} are expected")
    state, flat = xxhash.xxh3_128(), target.cast("B") if target.nbytes else memoryview(b"")
    for start in range(0, piece.nbytes, _HASHED):
        part = flat[start : start + _HASHED]
        files.read_into(path, header_bytes + piece.offset + start, part)
        state.update(part)
    if state.hexdigest() != piece.xxh3_128:
        raise DamagedError(f"{path}: bytes {piece.offset} to {piece.offset + piece.nbytes} do not match their hash")


def check_header(files: Files, path: str, header_bytes: int, expected: str) -> None:
    """Check the container's own header. DamagedError where it is not what was written."""
    found = bytearray(header_bytes)
    files.read_into(path, 0, memoryview(found))
    if digest(found) != expected:
        raise DamagedError(f"{path}: the safetensors header does not match its hash")


def _header(items: Sequence[Item], sizes: Sequence[int], length: int) -> bytes:
    """The container's header for items of these sizes, filled up to ``length`` bytes."""
    position, table = 0, {}
    for item, nbytes in zip(items, sizes, strict=True):
        end = position + nbytes
        dtype, shape = (item.dtype, item.shape) if item.exact else ("U8", (nbytes,))
        table[item.name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * max(-(len(text) + 8) % _ALIGN, length - 8 - len(text))
    return len(text).to_bytes(8, "little") + text


def _stream(file: NewFile, item: Item) -> tuple[int, str]:
    """Bytes written, and their hash."""
    state, written = xxhash.xxh3_128(), 0
    for piece in _pieces(item.data):
        state.update(piece)
        file.write(piece)
        written += len(piece)
    if written > item.nbytes or (item.exact and written != item.nbytes):
        raise ValueError(f"{item.name} was to have {item.nbytes} bytes and came to {written}")
    return written, state.hexdigest()


def _pieces(data: Data) -> Iterable[memoryview]:
    if not isinstance(data, bytes | bytearray | memoryview):
        return data.pieces()
    view = memoryview(data)
    flat = view.cast("B") if view.nbytes else memoryview(b"")  # an empty view of several dimensions has no cast
    return (flat[start : start + _CHUNK] for start in range(0, len(flat), _CHUNK))
