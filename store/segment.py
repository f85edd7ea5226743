"""Write and read segments and payloads.

Payload files: safetensors, hashed as they stream out, read back piece by piece with every hash checked.

Any safetensors reader opens a payload. This module writes the container itself because it must hash each piece
while it is written and fsync before the name appears. Offsets are relative to the end of the header.

Segments: one rank's payload and the part that describes it.

The payload is durable under its final name before its part is written, so a part that can be read vouches for a
payload that was complete. Both are immutable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import xxhash

from store.encoding import BF16, RAW, encoding_named, itemsize
from store.encoding.compression import packed_bound
from store.encoding.stream import PACKING, EncodedEntry
from store.errors import DamagedError, MissingError, NewerFormatError
from store.layout import parse_rank_file, part_path, payload_path, segment_dir
from store.names import SaveId
from store.schema import Entry, MeasureRecord, PartRecord, StateTensor, digest, from_bytes, to_bytes
from store.state_tree import Leaf, leaf_bytes
from store.storage.atomic import ensure_dir, write_new
from store.storage.local import Files, NewFile

_CHUNK = 1 << 22
_ALIGN = 64

_HASHED = 1 << 20
"""Bytes read and hashed at a time, so that hashing finds them in the core's cache."""


class StreamedData(Protocol):
    """Bytes that are made while they are written, so that they need not all be in memory."""

    @property
    def nbytes(self) -> int:
        """How many there will be; where not ``exact``, at most."""

    @property
    def exact(self) -> bool:
        """Whether the number is known before they are made."""

    def pieces(self) -> Iterable[memoryview]:
        """All of them, once. Each piece stands still until the next is asked for; what is raised ends the write."""


Data = bytes | bytearray | memoryview | StreamedData


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
class PayloadPiece:
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
    placed: tuple[PayloadPiece, ...]


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
    placed = tuple(
        PayloadPiece(end - nbytes, nbytes, hashed) for end, (nbytes, hashed) in zip(ends, found, strict=True)
    )
    return Payload(len(reserved) + (ends[-1] if ends else 0), len(reserved), digest(headers[0]), placed)


def read_piece(files: Files, path: str, header_bytes: int, piece: PayloadPiece, target: memoryview) -> None:
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


PART_LIMIT = 1 << 28
"""Largest part that is read, in bytes: a million fragments."""


@dataclass(frozen=True)
class StagedFragment:
    """A fragment ready to be written: encoded bytes that stand still until the write returns, or come as it goes.

    Only :class:`store.encoding.stream.EncodedEntry` says how they are packed; all others are written as they are."""

    layer: str
    slot: str
    fqn: str
    start: int
    numel: int
    dtype: str
    encoding: str
    data: Data


class RunTensor(Protocol):
    """A tensor of the run state to be written: a :class:`store.state_tree.Leaf`, or one whose bytes come as it is
    written."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def data(self) -> Data:
        """In C order, little-endian."""


@dataclass(frozen=True)
class SegmentDraft:
    """All that one rank writes in one save."""

    store_id: str
    save: SaveId
    rank: int
    world_size: int
    plan: str
    fragments: Sequence[StagedFragment]
    run_state: Any
    run_leaves: Sequence[RunTensor]
    facts: Mapping[str, Any]


def write_segment(
    files: Files, draft: SegmentDraft, measure: Callable[[], Sequence[MeasureRecord]] = lambda: ()
) -> PartRecord:
    """Write payload, then part; both durable on return. ExistsError where this rank wrote this save before.

    ``measure`` is asked for what the part says of the staged copies while the device takes the payload."""
    measures: list[MeasureRecord] = []
    ensure_dir(files, segment_dir(draft.save))
    fragments = [_item(fragment) for fragment in draft.fragments]
    leaves = [Item(f"run_state/{i}", leaf.dtype, leaf.shape, leaf.data) for i, leaf in enumerate(draft.run_leaves)]
    payload = write_payload(
        files, payload_path(draft.save, draft.rank), fragments + leaves, lambda: measures.extend(measure())
    )
    placed = iter(payload.placed)
    part = PartRecord(
        store_id=draft.store_id,
        step=draft.save.step,
        epoch=draft.save.epoch,
        rank=draft.rank,
        world_size=draft.world_size,
        plan=draft.plan,
        payload_bytes=payload.payload_bytes,
        header_bytes=payload.header_bytes,
        header_xxh3_128=payload.header_xxh3_128,
        entries=tuple(_entry(f, next(placed)) for f in draft.fragments),
        measures=tuple(measures),
        run_state=draft.run_state,
        run_tensors=tuple(_state_tensor(leaf, next(placed)) for leaf in draft.run_leaves),
        facts=dict(draft.facts),
    )
    data = to_bytes(part)
    write_new(files, part_path(draft.save, draft.rank), lambda file: file.write(data))
    return part


def read_part(files: Files, store_id: str, save: SaveId, rank: int) -> PartRecord:
    """A rank's part, checked against where it stands and against itself."""
    return parse_part(files.read(part_path(save, rank), PART_LIMIT), store_id, save, rank)


def parse_part(data: bytes, store_id: str, save: SaveId, rank: int) -> PartRecord:
    """The part in the bytes of ``part_path(save, rank)``. DamagedError unless it belongs there and is consistent."""
    path = part_path(save, rank)
    part = from_bytes(PartRecord, data, path)
    if (part.store_id, part.save, part.rank) != (store_id, save, rank):
        raise DamagedError(f"{path} belongs to save {part.save}, rank {part.rank} of store {part.store_id}")
    room = part.payload_bytes - part.header_bytes
    pieces: list[Entry | StateTensor] = [*part.entries, *part.run_tensors]
    if room < 0 or any(piece.offset + piece.nbytes > room for piece in pieces):
        raise DamagedError(f"{path} names bytes beyond the end of its payload")
    for tensor in part.run_tensors:
        if leaf_bytes(tensor.dtype, tensor.shape) != tensor.nbytes:
            raise DamagedError(f"{path}: a tensor of the run state has the wrong size for its dtype")
    for entry in part.entries:
        _check_entry(path, entry)
    return part


def _check_entry(path: str, entry: Entry) -> None:
    encoding = encoding_named(entry.encoding, f"{path}: {entry.fqn}/{entry.slot}")
    if entry.packing not in (None, PACKING):
        raise NewerFormatError(
            f"{path}: {entry.fqn}/{entry.slot} is packed as {entry.packing!r}, which this release does not know; run "
            "`pip install --upgrade driftpoint`"
        )
    if entry.packing is None:
        fits = entry.nbytes == encoding.stored_bytes(entry.numel, entry.dtype) and entry.base is None
    else:
        fits = entry.nbytes <= packed_bound(encoding, entry.numel, entry.dtype) and entry.encoded_xxh3_128 is not None
    if not fits:
        raise DamagedError(f"{path}: {entry.fqn}/{entry.slot} has the wrong size for its encoding")


def check_payload_size(files: Files, part: PartRecord) -> None:
    """DamagedError unless the payload is there with the size its part says."""
    path = payload_path(part.save, part.rank)
    try:
        found = files.size(path)
    except MissingError as error:
        raise DamagedError(str(error)) from error
    if found != part.payload_bytes:
        raise DamagedError(f"{path} has {found} bytes instead of {part.payload_bytes}")


def read_entry(files: Files, part: PartRecord, entry: Entry, target: memoryview) -> None:
    """Fill ``target`` (``entry.nbytes`` bytes) with the stored bytes of a fragment, hash checked."""
    placed = PayloadPiece(entry.offset, entry.nbytes, entry.xxh3_128)
    read_piece(files, payload_path(part.save, part.rank), part.header_bytes, placed, target)


def read_leaves(files: Files, part: PartRecord) -> list[Leaf]:
    """The tensors of a part's run state, hashes checked. Their kind is in the tree."""
    leaves = []
    for tensor in part.run_tensors:
        if leaf_bytes(tensor.dtype, tensor.shape) != tensor.nbytes:
            raise DamagedError(f"{part_path(part.save, part.rank)}: a run-state tensor has the wrong size")
        data = bytearray(tensor.nbytes)
        placed = PayloadPiece(tensor.offset, tensor.nbytes, tensor.xxh3_128)
        read_piece(files, payload_path(part.save, part.rank), part.header_bytes, placed, memoryview(data))
        leaves.append(Leaf(tensor.dtype, tensor.shape, data))
    return leaves


def present_parts(files: Files, save: SaveId) -> list[int]:
    """Ranks whose part stands in the group, sorted."""
    try:
        names = files.list_dir(segment_dir(save))
    except MissingError:
        return []
    found = [parse_rank_file(name) for name in names]
    return sorted(item[0] for item in found if item is not None and item[1] == "json")


def parts_digest(part_files: Iterable[bytes]) -> str:
    """Digest of the files of a group's parts, in rank order."""
    state = xxhash.xxh3_128()
    for data in part_files:
        state.update(xxhash.xxh3_128_digest(data))
    return state.hexdigest()


def _item(fragment: StagedFragment) -> Item:
    """What other readers of safetensors see: values where there is a dtype for them, bytes otherwise."""
    name = f"{fragment.fqn}/{fragment.slot}/{fragment.start}"
    dtype = {RAW: fragment.dtype, BF16: "BF16"}.get(fragment.encoding, "U8")
    shape = encoding_named(fragment.encoding).stored_bytes(fragment.numel, fragment.dtype) // itemsize(dtype)
    return Item(name, dtype, (shape,), fragment.data)


def _entry(fragment: StagedFragment, placed: PayloadPiece) -> Entry:
    made = fragment.data if isinstance(fragment.data, EncodedEntry) else None
    return Entry(
        layer=fragment.layer,
        slot=fragment.slot,
        fqn=fragment.fqn,
        start=fragment.start,
        numel=fragment.numel,
        dtype=fragment.dtype,
        encoding=fragment.encoding,
        packing=None if made is None or made.packing is None else PACKING,
        base=None if made is None else made.base,
        offset=placed.offset,
        nbytes=placed.nbytes,
        xxh3_128=placed.xxh3_128,
        encoded_xxh3_128=None if made is None else made.encoded_xxh3_128(),
    )


def _state_tensor(leaf: RunTensor, placed: PayloadPiece) -> StateTensor:
    return StateTensor(
        dtype=leaf.dtype,
        shape=leaf.shape,
        offset=placed.offset,
        nbytes=placed.nbytes,
        xxh3_128=placed.xxh3_128,
    )
