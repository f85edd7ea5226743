"""Map wanted fragments to stored ones, and read stored fragments chunk by chunk.

Every change of world size, mesh, ZeRO stage or framework is arithmetic on fragments: flat ranges, or boxes. A flat
range is a few boxes, so one algebra does for both. Boxes of a tensor are in a tree that separates them dimension by
dimension, as every mesh does: building it sorts, and what meets a box is found by a bisection at each level.

Reading checks hashes, unpacks and decodes in the memory of a few chunks; values must not be used before the last hash
was checked.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from operator import add, mul, sub
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
import xxhash
from numpy.lib.stride_tricks import as_strided

from store.encoding import encoding_named
from store.encoding.base import Bytes, Values, chunk_sizes
from store.encoding.stream import BaseEntry, encoded_chunks
from store.errors import DamagedError, StorageError
from store.names import BUFFER, FROZEN, WEIGHTS, Box, Fragment, Part, SaveId, cut_range, payload_path, strides_of
from store.schema import Entry, PartRecord
from store.storage.local import Files


class Span(Protocol):
    """Elements [start, stop) of a flattened (fqn, slot), or a box, stored anywhere; ``dtype`` as in safetensors."""

    @property
    def fqn(self) -> str: ...

    @property
    def slot(self) -> str: ...

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    @property
    def box(self) -> Box | None: ...

    @property
    def dtype(self) -> str: ...


S = TypeVar("S", bound=Span)


class Source(NamedTuple):
    """A stored fragment and the part that holds it; a :class:`Span`. ``base``: the fragment it is a difference to."""

    part: PartRecord
    entry: Entry
    base: "Source | None" = None

    @property
    def fqn(self) -> str:
        return self.entry.fqn

    @property
    def slot(self) -> str:
        return self.entry.slot

    @property
    def start(self) -> int:
        return self.entry.start

    @property
    def stop(self) -> int:
        return self.entry.stop

    @property
    def box(self) -> Box | None:
        return self.entry.box

    @property
    def dtype(self) -> str:
        """Of the values, before encoding."""
        return self.entry.dtype


class Steps(NamedTuple):
    """Elements that do not follow each other: ``sizes`` of them, so many apart in the source and in the target."""

    sizes: tuple[int, ...]
    source: tuple[int, ...]
    target: tuple[int, ...]


class Copy(NamedTuple, Generic[S]):
    """``numel`` elements from ``source_start`` of the stored fragment go to ``target_start`` of the wanted one.

    Without ``steps`` they follow each other in both."""

    source: S
    source_start: int
    target_start: int
    numel: int
    steps: Steps | None = None

    def place(self, source: Bytes, target: Bytes, size: int) -> None:
        """Copy between the bytes of all of the stored fragment and of the wanted one. ``size``: bytes of an element."""
        sizes, apart, into = self.steps or ((self.numel,), (1,), (1,))
        found = as_strided(source[self.source_start * size :], (*sizes, size), (*(size * one for one in apart), 1))
        as_strided(target[self.target_start * size :], found.shape, (*(size * one for one in into), 1))[...] = found


class FragmentIndex(Generic[S]):
    """Stored fragments by (fqn, slot), sorted by start."""

    def __init__(self, sources: Iterable[S]) -> None:
        self._by_name: dict[tuple[str, str], list[S]] = {}
        self._regions: dict[tuple[str, str], _Regions[S]] = {}
        for source in sources:
            self._by_name.setdefault((source.fqn, source.slot), []).append(source)
        for name, spans in self._by_name.items():
            if len(spans) == 1:
                continue
            # Empty fragments fill nothing and overlap nothing; one is kept if a tensor has no other.
            spans[:] = [source for source in spans if source.stop > source.start] or spans[:1]
            spans.sort(key=lambda source: source.start)
            box = next((source.box for source in spans if source.box is not None), None)
            if box is None:
                _refuse_overlap(name, spans)
            else:
                self._regions[name] = _Regions(name, spans, box.shape)

    def names(self) -> Mapping[tuple[str, str], Sequence[S]]:
        """Return all (fqn, slot) with their sources in order."""
        return self._by_name

    def dtype(self, fqn: str, slot: str) -> str | None:
        """Return the dtype of a stored (fqn, slot), None if none is stored."""
        spans = self._by_name.get((fqn, slot))
        return spans[0].dtype if spans else None

    def cover(self, wanted: Fragment) -> list[Copy[S]]:
        """Return copies that fill ``wanted`` completely. Raises DamagedError, naming the hole, if there is one."""
        copies, position = [], wanted.start
        name = wanted.fqn, wanted.slot
        spans = self._by_name.get(name, [])
        if wanted.box is not None or name in self._regions or (len(spans) == 1 and spans[0].box is not None):
            if name not in self._regions:
                box = wanted.box or next(source.box for source in spans if source.box is not None)
                self._regions[name] = _Regions(name, spans, box.shape)
            return self._regions[name].cover(wanted)
        if len(spans) == 1 and spans[0].start <= position and wanted.stop <= spans[0].stop and wanted.numel:
            return [Copy(spans[0], position - spans[0].start, 0, wanted.numel)]
        first = max(0, bisect_right(spans, wanted.start, key=lambda source: source.start) - 1)
        for source in spans[first:]:
            if source.start > position or position >= wanted.stop:
                break
            if source.stop <= position:
                continue
            numel = min(source.stop, wanted.stop) - position
            copies.append(Copy(source, position - source.start, position - wanted.start, numel))
            position += numel
        if position < wanted.stop:
            raise DamagedError(
                f"{wanted.fqn}/{wanted.slot}: elements {position} to {wanted.stop} are in no stored fragment"
            )
        return copies


class Place(NamedTuple):
    """Where a region is in its own memory: element c of the tensor at the sum of c * strides, less origin."""

    strides: tuple[int, ...]
    origin: int

    @classmethod
    def of(cls, box: Box | None, start: int, shape: Sequence[int]) -> "Place":
        """Return that of a box, or of a flat range from ``start`` of a tensor of ``shape``."""
        strides = strides_of(shape if box is None else box.sizes)
        return cls(strides, start if box is None else sum(map(mul, box.offsets, strides)))

    def at(self, offsets: Sequence[int]) -> int:
        return sum(a * b for a, b in zip(offsets, self.strides, strict=True)) - self.origin


def steps_between(sizes: Sequence[int], source: Place, target: Place) -> Steps | None:
    """Return how a box of ``sizes`` lies in two memories; None if its elements follow each other in both."""
    found: list[tuple[int, int, int]] = []
    for size, step, other in zip(sizes, source.strides, target.strides, strict=True):
        if size > 1:
            joins = bool(found) and found[-1][1:] == (step * size, other * size)  # one dimension with the one before
            found.append((size * (found.pop()[0] if joins else 1), step, other))
    if not found or (len(found) == 1 and found[0][1:] == (1, 1)):
        return None
    return Steps(*(tuple(column) for column in zip(*found, strict=True)))


_DEPTH = 64  # levels of a tree: far more than any mesh makes, so only records that lie reach it


@dataclass(frozen=True)
class _Slabs:
    """Children that are apart in dimension ``dim``, in order: boxes by index, or further slabs."""

    dim: int
    starts: list[int]
    stops: list[int]
    children: "list[_Slabs | int]"


class BoxTree:
    """Boxes of one tensor that do not overlap. Raises DamagedError, naming the tensor, if two do.

    boxes: With elements."""

    def __init__(self, name: str, boxes: Sequence[Part]) -> None:
        self.boxes = boxes
        first = np.array([offsets for offsets, _ in boxes], np.int64)
        after = first + np.array([sizes for _, sizes in boxes], np.int64)
        self._root = [_grow(name, first, after, np.arange(len(boxes)), 0)] if boxes else []

    def meet(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, Part]]:
        """Yield the index of each box that has elements in common with this one, and those elements."""
        stops = tuple(map(add, offsets, sizes))
        pending = self._root[:]
        while pending:
            node = pending.pop()
            if isinstance(node, _Slabs):
                low = bisect_right(node.stops, offsets[node.dim])
                pending += node.children[low : bisect_left(node.starts, stops[node.dim])]
                continue
            own, lengths = self.boxes[node]
            begin = tuple(map(max, own, offsets))
            common = tuple(map(sub, map(min, map(add, own, lengths), stops), begin))
            if min(common, default=1) > 0:
                yield node, (begin, common)


_Array = npt.NDArray[np.int64]


def _grow(name: str, first: _Array, after: _Array, members: _Array, depth: int) -> "_Slabs | int":
    if len(members) == 1:
        return int(members[0])
    for dim in range(first.shape[1]):
        begin = first[members, dim]
        order = np.argsort(begin, kind="stable")
        begin, end = begin[order], np.maximum.accumulate(after[members[order], dim])
        cuts = np.flatnonzero(begin[1:] >= end[:-1]) + 1
        if len(cuts) and depth < _DEPTH:
            edges = [0, *cuts.tolist(), len(members)]
            starts, stops = begin[edges[:-1]].tolist(), end[np.array(edges[1:]) - 1].tolist()
            children: list[_Slabs | int] = members[order].tolist()
            if len(starts) < len(children):  # not each alone
                parts = (members[order[low:high]] for low, high in pairwise(edges))
                children = [_grow(name, first, after, part, depth + 1) for part in parts]
            return _Slabs(dim, starts, stops, children)
    pair = [(first[index].tolist(), after[index].tolist()) for index in members[:2].tolist()]
    raise DamagedError(f"{name}: {len(members)} stored fragments overlap, or are of no mesh, such as {pair}")


class _Regions(Generic[S]):
    """The stored fragments of one (fqn, slot) as boxes of a tensor of ``shape``."""

    def __init__(self, name: tuple[str, str], spans: Sequence[S], shape: tuple[int, ...]) -> None:
        self._name, self._shape, boxes = "/".join(name), shape, list[Part]()
        self._owners: list[S] = []
        for source in spans:
            boxes += self._parts(source, "a stored fragment does not lie")
            self._owners += [source] * (len(boxes) - len(self._owners))
        self._tree = BoxTree(self._name, boxes)

    def _parts(self, region: S | Fragment, problem: str) -> Iterable[Part]:
        box = region.box
        if (region.stop > prod(self._shape)) if box is None else (box.shape != self._shape):
            raise DamagedError(f"{self._name}: {problem} in a tensor of shape {self._shape}")
        return cut_range(self._shape, region.start, region.stop) if box is None else [box[:2]]

    def cover(self, wanted: Fragment) -> list[Copy[S]]:
        """Return copies that fill ``wanted``, in the order of their sources. Raises DamagedError for a hole."""
        target, copies = Place.of(wanted.box, wanted.start, self._shape), list[tuple[int, Copy[S]]]()
        for part in self._parts(wanted, f"{wanted} is in no stored fragment"):
            for number, (offsets, sizes) in self._tree.meet(*part):
                source = self._owners[number]
                place = Place.of(source.box, source.start, self._shape)
                steps = steps_between(sizes, place, target)
                copies.append((number, Copy(source, place.at(offsets), target.at(offsets), prod(sizes), steps)))
        missing = wanted.numel - sum(copy.numel for _, copy in copies)
        if missing:
            region = f"[{wanted.start}, {wanted.stop})" if wanted.box is None else wanted.box
            raise DamagedError(f"{self._name}: {missing} of the elements {region} are in no stored fragment")
        return [copy for _, copy in sorted(copies, key=lambda one: one[0])]


def covered_numel(entries: Iterable[Entry]) -> int:
    """Return the number of elements in a set of fragments. Raises DamagedError if two overlap."""
    index: FragmentIndex[Entry] = FragmentIndex(entries)
    return sum(entry.numel for spans in index.names().values() for entry in spans)


def _refuse_overlap(name: tuple[str, str], sorted_spans: Sequence[Span]) -> None:
    for before, after in pairwise(sorted_spans):
        if before.stop > after.start:
            spans = f"[{before.start}, {before.stop}) and [{after.start}, {after.stop})"
            raise DamagedError(f"{name[0]}/{name[1]}: stored fragments {spans} overlap")


class Readable(Protocol):
    """Storage that can be read; :class:`store.storage.local.Files` is one."""

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset``. Raises DamagedError if the file ends early, StorageError."""


def stored_slot(index: FragmentIndex[Source], fragment: Fragment) -> str | None:
    """Return the slot that holds the values of a live fragment, or None.

    Frozen parameters have a slot of their own, and a parameter may have been frozen or unfrozen since it was saved. An
    imported state dict does not tell frozen parameters from buffers."""
    tensor = (WEIGHTS, FROZEN, BUFFER)
    options = tensor if fragment.slot in tensor else (fragment.slot,)
    stored = [slot for slot in options if (fragment.fqn, slot) in index.names()]
    if len(stored) == 1:
        return stored[0]
    stored.sort(key=fragment.slot.__ne__)  # of two that are equally new, its own
    return max(stored, key=lambda slot: index.names()[fragment.fqn, slot][0].part.save, default=None)


class FragmentReader:
    """Reads one stored fragment and its base once."""

    def __init__(self, files: Readable, source: Source) -> None:
        self._source = source
        self._own = StoredBytes(files, source)
        self._base = None if source.base is None else StoredBytes(files, source.base)
        self.at_fault: SaveId = source.part.save  # after an error: the save whose bytes are damaged or cannot be read

    def chunks(self) -> Iterator[Values]:
        """Yield the values: float32 from lossy encodings, bytes (uint8) of ``entry.dtype`` from raw.

        Raises DamagedError, perhaps after the last chunk, if stored bytes are not those written; StorageError."""
        entry = self._source.entry
        encoding, state = encoding_named(entry.encoding), xxhash.xxh3_128()
        base = None if self._base is None else BaseEntry(self._base.read, self._base.packed)
        try:
            encoded = encoded_chunks(
                self._own.read, entry.numel, entry.dtype, encoding, packed=self._own.packed, base=base
            )
            for size, chunk in zip(chunk_sizes(entry.numel), encoded, strict=True):
                if self._own.packed:
                    state.update(chunk.data)
                yield encoding.decode(chunk, size, entry.dtype)
            for stored in (self._base, self._own):
                if stored is not None:
                    stored.check()
        except (DamagedError, StorageError):
            self._find_fault()
            raise
        if self._own.packed:
            check_encoded(self._source, state.hexdigest())

    def _find_fault(self) -> None:
        # Damage of a base shows as damage of the fragment that depends on it, so check the base first.
        if self._base is None or self._source.base is None:
            return
        try:
            self._base.check()
        except (DamagedError, StorageError):
            self.at_fault = self._source.base.part.save


def check_encoded(source: Source, unpacked_hash: str) -> None:
    """Raise DamagedError unless a packed fragment unpacked to the bytes that were packed.

    Only this detects a wrong base: its own bytes and those of the difference may all be as they were written."""
    if unpacked_hash != source.entry.encoded_xxh3_128:
        where = payload_path(source.part.save, source.part.rank)
        base = "" if source.base is None else f", as the difference to {source.base.part.save}"
        raise DamagedError(f"{source.fqn}/{source.slot} in {where} does not unpack to what was packed{base}")


class StoredBytes:
    """Reads an entry's stored bytes front to back and hashes them."""

    def __init__(self, files: Readable, source: Source) -> None:
        self._files = files
        self._entry = source.entry
        self._path = payload_path(source.part.save, source.part.rank)
        self._offset = source.part.header_bytes + source.entry.offset
        self._read = 0
        self._hash = xxhash.xxh3_128()
        self.packed = source.entry.packing is not None

    def read(self, nbytes: int) -> memoryview:
        """Return the next bytes, fewer only at the end."""
        data = memoryview(bytearray(min(nbytes, self._entry.nbytes - self._read)))
        self._files.read_into(self._path, self._offset + self._read, data)
        self._read += len(data)
        self._hash.update(data)
        return data

    def check(self) -> None:
        """Read the rest. Raises DamagedError unless all bytes together match their hash."""
        while self._read < self._entry.nbytes:
            self.read(1 << 22)
        if self._hash.hexdigest() != self._entry.xxh3_128:
            raise DamagedError(
                f"{self._path}: bytes {self._offset} to {self._offset + self._entry.nbytes} do not match their hash"
            )


WINDOW = 256 << 20  # bytes announced ahead: far more than any disk has in flight, and little of a node's memory


@runtime_checkable
class ReadPlan(Protocol):
    """Storage that can fetch ahead."""

    def expect(self, path: str, offset: int, nbytes: int) -> None:
        """Announce that these bytes will be read soon. A hint that changes no byte read; raises nothing."""


class ReadAhead:
    """Announces stored fragments to storage in the order in which they will be read."""

    def __init__(self, files: Files, sources: Iterable[Source]) -> None:
        self._files = files if isinstance(files, ReadPlan) else None
        self._rest = deque(sources if self._files is not None else ())
        self._lead = -WINDOW

    def reading(self, nbytes: int) -> None:
        """Announce more fragments, as the next ``nbytes`` stored bytes are about to be read."""
        self._lead -= nbytes
        while self._rest and self._lead < 0:
            path, offset, end = byte_range(self._rest.popleft())
            while self._rest and (path, end) == byte_range(self._rest[0])[:2]:  # neighbours in a file: one request
                end = byte_range(self._rest.popleft())[2]
            self._lead += end - offset
            if self._files is not None:
                self._files.expect(path, offset, end - offset)


def byte_range(source: Source) -> tuple[str, int, int]:
    """Return the payload of a stored fragment, and where its bytes begin and end there."""
    part, entry = source.part, source.entry
    first = part.header_bytes + entry.offset
    return payload_path(part.save, part.rank), first, first + entry.nbytes
