"""Write and read segments: one rank's payload (safetensors) and the part that describes it.

The payload is synced and has its final name before its part is written, so a readable part proves that the payload was
complete. Both are immutable. Their names are durable once their directory is synced, which a commit does. This module
writes the safetensors container itself, because it must hash each tensor while it is written and fsync before the name
appears. Offsets are relative to the end of the header."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import xxhash
from msgspec import Struct
from msgspec.structs import asdict

from store.encoding import BF16, RAW, encoding_named, itemsize
from store.encoding.compression import packed_bound
from store.encoding.stream import PACKING, PACKINGS, EncodedEntry
from store.errors import DamagedError, MissingError, NewerFormatError
from store.fragments import Readable
from store.names import Box, SaveId, parse_rank_file, part_path, payload_path, segment_dir
from store.schema import (
    Entry,
    MeasureRecord,
    PartRecord,
    StateTensor,
    TensorRecord,
    digest,
    from_bytes,
    to_bytes,
    without_gc,
)
from store.state_tree import Leaf, leaf_bytes
from store.storage.atomic import ensure_dir, write_new
from store.storage.local import Files, NewFile, as_bytes, list_or_empty

_CHUNK = 1 << 22
_ALIGN = 64
CHUNK_BYTES = 1 << 20  # bytes read and hashed at a time, so that they are in the core's cache when hashed


class StreamedData(Protocol):
    """Bytes produced while they are written, so that they need not all be in memory."""

    @property
    def nbytes(self) -> int:
        """Number of bytes if ``exact``, otherwise an upper bound."""

    @property
    def exact(self) -> bool:
        """Whether the number of bytes is known in advance."""

    def pieces(self) -> Iterable[memoryview]:
        """Yield all bytes once. A piece is valid until the next one; an exception ends the write."""


Data = bytes | bytearray | memoryview | StreamedData


class Item(Struct, frozen=True):
    """One tensor to write. ``data`` must not change until the write returns."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Data

    @property
    def nbytes(self) -> int:
        """Size in bytes if ``exact``, otherwise an upper bound."""
        return as_bytes(self.data).nbytes if isinstance(self.data, bytes | bytearray | memoryview) else self.data.nbytes

    @property
    def exact(self) -> bool:
        """Whether ``nbytes`` is the size. Otherwise the item is stored as ``U8`` of the final size."""
        return isinstance(self.data, bytes | bytearray | memoryview) or self.data.exact


class PayloadPiece(Struct, frozen=True, gc=False):
    """Place of an item in the payload, and its hash."""

    offset: int
    nbytes: int
    xxh3_128: str


class Payload(Struct, frozen=True):
    """A written payload."""

    payload_bytes: int
    header_bytes: int
    header_xxh3_128: str
    placed: tuple[PayloadPiece, ...]


def write_payload(
    files: Files, path: str, items: Sequence[Item], meanwhile: Callable[[], None] = lambda: None
) -> Payload:
    """Write all items under a name that must not exist. The bytes are durable on return; the name is not.

    ``meanwhile`` runs once after all bytes are written and before the fsync."""
    if len({item.name for item in items}) != len(items):
        raise ValueError("two items of a payload have the same name")
    reserved = _header(items, [item.nbytes for item in items], 0)
    headers: list[bytes] = []
    written: list[tuple[int, str]] = []  # size and hash of each item

    def fill(file: NewFile) -> None:
        headers[:], written[:] = [reserved], []
        file.write(reserved)
        written.extend(_stream(file, item) for item in items)
        if not all(item.exact for item in items):  # sizes only shrink, so the new header fits
            headers[:] = [_header(items, [nbytes for nbytes, _ in written], len(reserved))]
            file.write_at(0, headers[0])
        meanwhile()

    most = len(reserved) + sum(item.nbytes for item in items)
    write_new(files, path, fill, patched=not all(item.exact for item in items), most=most, sync_name=False)
    ends = list(accumulate(nbytes for nbytes, _ in written))
    placed = tuple(PayloadPiece(end - size, size, hashed) for end, (size, hashed) in zip(ends, written, strict=True))
    return Payload(len(reserved) + (ends[-1] if ends else 0), len(reserved), digest(headers[0]), placed)


def read_piece(
    files: Readable, path: str, header_bytes: int, piece: PayloadPiece | Entry | StateTensor, target: memoryview
) -> None:
    """Fill ``target`` (exactly ``piece.nbytes`` bytes) and check its hash. Raises DamagedError if it differs."""
    for _ in read_chunks(files, path, header_bytes, piece, as_bytes(target)):
        pass


def read_chunks(
    files: Readable,
    path: str,
    header_bytes: int,
    piece: PayloadPiece | Entry | StateTensor,
    target: memoryview | None = None,
    *,
    scratch: bytearray | None = None,
) -> Iterator[tuple[int, memoryview]]:
    """Yield (offset in the piece, bytes) while reading it into ``target``, or else chunk by chunk into ``scratch``.

    A chunk is small enough to stay in the core's cache. Raises DamagedError if ``target`` has another size, and at the
    end if the hash differs."""
    if target is not None and target.nbytes != piece.nbytes:
        raise DamagedError(f"{path}: a piece has {piece.nbytes} bytes instead of {target.nbytes}")
    state = xxhash.xxh3_128()
    if not target and (scratch is None or len(scratch) < CHUNK_BYTES):
        scratch = bytearray(min(piece.nbytes, CHUNK_BYTES))
    for start in range(0, piece.nbytes, CHUNK_BYTES):
        stop = min(start + CHUNK_BYTES, piece.nbytes)
        chunk = target[start:stop] if target else memoryview(scratch or b"")[: stop - start]
        files.read_into(path, header_bytes + piece.offset + start, chunk)
        state.update(chunk)
        yield start, chunk
    if state.hexdigest() != piece.xxh3_128:
        raise DamagedError(f"{path}: bytes {piece.offset} to {piece.offset + piece.nbytes} do not match their hash")


def check_header(files: Files, path: str, header_bytes: int, expected: str) -> None:
    """Check the hash of the safetensors header. Raises DamagedError if it differs."""
    found = bytearray(header_bytes)
    files.read_into(path, 0, memoryview(found))
    if digest(found) != expected:
        raise DamagedError(f"{path}: the safetensors header does not match its hash")


@without_gc()
def _header(items: Sequence[Item], sizes: Sequence[int], length: int) -> bytes:
    """Return the safetensors header for items of these sizes, padded to ``length`` bytes."""
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
    state, written = xxhash.xxh3_128(), 0
    for piece in _pieces(item.data):
        state.update(piece)
        file.write(piece)
        written += len(piece)
    if written > item.nbytes or (item.exact and written != item.nbytes):
        raise ValueError(f"{item.name} has {written} bytes instead of {item.nbytes}")
    return written, state.hexdigest()


def _pieces(data: Data) -> Iterable[memoryview]:
    whole = (as_bytes(data),) if isinstance(data, bytes | bytearray | memoryview) else data.pieces()
    return (piece[start : start + _CHUNK] for piece in whole for start in range(0, len(piece), _CHUNK))


PART_LIMIT = 1 << 28  # largest part that is read, in bytes; enough for a million fragments


class StagedFragment(Struct, frozen=True):
    """A fragment ready to be written: constant encoded bytes, or bytes produced during the write."""

    layer: str
    slot: str
    fqn: str
    start: int
    numel: int
    dtype: str
    encoding: str
    data: Data  # other than :class:`store.encoding.stream.EncodedEntry` it is written unpacked
    box: Box | None = None


@dataclass(frozen=True)
class SegmentDraft:
    """Contents of the segment that one rank writes in one save."""

    store_id: str
    save: SaveId
    rank: int
    world_size: int
    plan: str
    fragments: Sequence[StagedFragment]
    run_state: Any
    run_leaves: Sequence[Leaf | Item]
    facts: Mapping[str, Any]
    differs: tuple[str, ...] = ()

    def part(self, **written: Any) -> PartRecord:
        """Return the record of the segment. ``written``: the fields that only writing it tells."""
        names = ("store_id", "rank", "world_size", "plan", "run_state", "differs")
        known = {name: getattr(self, name) for name in names}
        return PartRecord(**known, step=self.save.step, epoch=self.save.epoch, facts=dict(self.facts), **written)


def write_segment(
    files: Files, draft: SegmentDraft, measure: Callable[[], Sequence[MeasureRecord]] = lambda: ()
) -> PartRecord:
    """Write payload, then part. Raises ExistsError if this rank wrote this save before.

    Their bytes are durable on return. Their names become so in :func:`store.commit.commit`, once for all ranks.
    ``measure`` is called after the payload is written and before its fsync; its result goes into the part."""
    measures: list[MeasureRecord] = []
    try:
        files.make_dir(segment_dir(draft.save))
    except MissingError:  # segments/ was deleted
        ensure_dir(files, segment_dir(draft.save))
    items = [entry_item(fragment, fragment.data) for fragment in draft.fragments]
    items += [Item(f"run_state/{i}", leaf.dtype, leaf.shape, leaf.data) for i, leaf in enumerate(draft.run_leaves)]
    payload = write_payload(files, payload_path(draft.save, draft.rank), items, lambda: measures.extend(measure()))
    part = _part(draft, payload, measures)
    data = to_bytes(part)
    write_new(files, part_path(draft.save, draft.rank), lambda file: file.write(data), sync_name=False)
    return part


def _part(draft: SegmentDraft, payload: Payload, measures: Sequence[MeasureRecord]) -> PartRecord:
    placed = iter(payload.placed)
    return draft.part(
        payload_bytes=payload.payload_bytes,
        header_bytes=payload.header_bytes,
        header_xxh3_128=payload.header_xxh3_128,
        entries=tuple(_entry(f, next(placed)) for f in draft.fragments),
        measures=tuple(measures),
        run_tensors=tuple(StateTensor(dtype=t.dtype, shape=t.shape, **asdict(next(placed))) for t in draft.run_leaves),
    )


def read_part(files: Files, store_id: str, save: SaveId, rank: int) -> PartRecord:
    """Read a rank's part and check it like :func:`parse_part`."""
    return parse_part(files.read(part_path(save, rank), PART_LIMIT), store_id, save, rank)


def parse_part(data: bytes, store_id: str, save: SaveId, rank: int) -> PartRecord:
    """Parse the bytes of ``part_path(save, rank)``. Raises DamagedError for another rank's or an inconsistent part."""
    path = part_path(save, rank)
    part = from_bytes(PartRecord, data, path)
    if (part.store_id, part.save, part.rank) != (store_id, save, rank):
        raise DamagedError(f"{path} belongs to save {part.save}, rank {part.rank} of store {part.store_id}")
    data_bytes = part.payload_bytes - part.header_bytes
    pieces: list[Entry | StateTensor] = [*part.entries, *part.run_tensors]
    if data_bytes < 0 or any(piece.offset + piece.nbytes > data_bytes for piece in pieces):
        raise DamagedError(f"{path} names bytes beyond the end of its payload")
    for tensor in part.run_tensors:
        if leaf_bytes(tensor.dtype, tensor.shape) != tensor.nbytes:
            raise DamagedError(f"{path}: a tensor of the run state has the wrong size for its dtype")
    for entry in part.entries:
        _check_entry(path, entry)
    return part


def _check_entry(path: str, entry: Entry) -> None:
    encoding = encoding_named(entry.encoding, f"{path}: {entry.fqn}/{entry.slot}")
    if entry.packing not in (None, *PACKINGS):
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


def partial_tensor(parts: Iterable[PartRecord], tensors: Mapping[str, TensorRecord]) -> str:
    """Return a slot of which the parts of all ranks hold more or fewer elements than its tensor has; empty if none."""
    numels: Counter[tuple[str, str]] = Counter()
    for part in parts:
        for entry in part.entries:
            numels[entry.fqn, entry.slot] += entry.numel
    for (fqn, slot), numel in numels.items():  # every slot has its parameter's shape
        shape = tensors[fqn].shape if fqn in tensors else None
        if shape is None or math.prod(shape) != numel:
            return (
                f"{numel} elements of {fqn}/{slot}, whose shape is {shape}: the ranks hold different tensors, or only "
                "some of them have optimizer state"
            )
    return ""


def check_payload_size(files: Files, part: PartRecord) -> None:
    """Raise DamagedError unless the payload exists with the size that its part records."""
    path = payload_path(part.save, part.rank)
    try:
        found = files.size(path)
    except MissingError as error:
        raise DamagedError(str(error)) from error
    if found != part.payload_bytes:
        raise DamagedError(f"{path} has {found} bytes instead of {part.payload_bytes}")


def read_leaves(files: Readable, part: PartRecord) -> list[Leaf]:
    """Read the tensors of a part's run state and check their hashes."""
    leaves = []
    for tensor in part.run_tensors:
        data = bytearray(tensor.nbytes)
        read_piece(files, payload_path(part.save, part.rank), part.header_bytes, tensor, memoryview(data))
        leaves.append(Leaf(tensor.dtype, tensor.shape, data))
    return leaves


def present_parts(files: Files, save: SaveId) -> list[int]:
    """Return the ranks whose part is present in the group, sorted."""
    parsed = [parse_rank_file(name) for name in list_or_empty(files, segment_dir(save))]
    return sorted(item[0] for item in parsed if item is not None and item[1] == "json")


def has_all_files(files: Files, save: SaveId, world_size: int) -> bool:
    """Return whether the group has a part and a payload for every rank, by their names."""
    names = map(parse_rank_file, list_or_empty(files, segment_dir(save)))
    return sum(name is not None for name in names) == 2 * world_size


def parts_digest(part_files: Iterable[bytes]) -> str:
    """Return the digest of a group's part files, given in rank order."""
    state = xxhash.xxh3_128()
    for data in part_files:
        state.update(xxhash.xxh3_128_digest(data))
    return state.hexdigest()


def remove_segment(files: Files, save: SaveId, rank: int) -> None:
    """Remove a rank's segment, or its remains, of a save that no manifest names."""
    for path in (part_path(save, rank), payload_path(save, rank)):  # a part must not outlive its payload
        with suppress(MissingError):
            files.unlink(path)


def entry_item(fragment: StagedFragment | Entry, data: Data) -> Item:
    """Return the tensor that holds a fragment. safetensors readers see values where safetensors has the dtype."""
    name = f"{fragment.fqn}/{fragment.slot}/{fragment.start}"
    dtype = {RAW: fragment.dtype, BF16: "BF16"}.get(fragment.encoding, "U8")
    shape = encoding_named(fragment.encoding).stored_bytes(fragment.numel, fragment.dtype) // itemsize(dtype)
    return Item(name, dtype, (shape,), data)


def _entry(fragment: StagedFragment, placed: PayloadPiece) -> Entry:
    encoded = fragment.data if isinstance(fragment.data, EncodedEntry) else None
    return Entry(
        **{name: getattr(fragment, name) for name in StagedFragment.__struct_fields__ if name != "data"},
        packing=None if encoded is None or encoded.packing is None else PACKING,
        base=None if encoded is None else encoded.base,
        encoded_xxh3_128=None if encoded is None else encoded.encoded_xxh3_128(),
        **asdict(placed),
    )
