"""Map wanted fragments to stored ones, and read stored fragments chunk by chunk.

Every change of world size, mesh, ZeRO stage or framework is arithmetic on fragments: flat ranges, or boxes. A flat
range is a few boxes, so one algebra does for both. Boxes of a tensor are in a tree that separates them dimension by
dimension, as every mesh does: building it sorts, and a bisection at each level finds the boxes that intersect another.

Reading checks hashes, unpacks and decodes in the memory of a few chunks; values must not be used before the last hash
was checked."""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
import xxhash
from numpy.lib.stride_tricks import as_strided

from store.encoding import encoding_named
from store.encoding.base import Bytes, Values, chunk_sizes
from store.encoding.stream import BaseEntry, encoded_chunks
from store.errors import DamagedError, StorageError
from store.names import BUFFER, FROZEN, WEIGHTS, Box, Fragment, Part, SaveId, cut_range, payload_path
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

    def chain(self) -> "Iterator[Source]":
        """Yield the fragment itself, its base, the base of that, and so on."""
        source: Source | None = self
        while source is not None:
            yield source
            source = source.base

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
    """Elements that are not contiguous: sizes by dimension, and their strides in the source and in the target."""

    sizes: tuple[int, ...]
    source: tuple[int, ...]
    target: tuple[int, ...]


class Copy(NamedTuple, Generic[S]):
    """``numel`` elements from ``source_start`` of the stored fragment go to ``target_start`` of the wanted one."""

    source: S
    source_start: int
    target_start: int
    numel: int
    steps: Steps | None = None  # None: contiguous in both

    def place(self, source: Bytes, target: Bytes, size: int) -> None:
        """Copy from the bytes of the whole stored fragment to those of the wanted one; ``size``: bytes per element."""
        sizes, apart, into = self.steps or ((self.numel,), (1,), (1,))
        values = as_strided(source[self.source_start * size :], (*sizes, size), (*(size * one for one in apart), 1))
        as_strided(target[self.target_start * size :], values.shape, (*(size * one for one in into), 1))[...] = values


class FragmentIndex(Generic[S]):
    """Stored fragments by (fqn, slot), sorted by start."""

    def __init__(self, sources: Iterable[S]) -> None:
        self._by_name: dict[tuple[str, str], list[S]] = {}
        self._regions: dict[tuple[str, str], _Regions[S]] = {}
        for source in sources:
            self._by_name.setdefault((source.fqn, source.slot), []).append(source)
        for name, spans in self._by_name.items():
            if len(spans) == 1 and spans[0].box is None:
                continue
            # Empty fragments fill nothing and overlap nothing; one is kept if a tensor has no other.
            spans[:] = [source for source in spans if source.stop > source.start] or spans[:1]
            spans.sort(key=lambda source: source.start)
            box = next((source.box for source in spans if source.box is not None), None)
            if box is not None:
                self._regions[name] = _Regions(name, spans, box.shape)
            for before, after in pairwise(spans if box is None else ()):
                if before.stop > after.start:
                    both = f"[{before.start}, {before.stop}) and [{after.start}, {after.stop})"
                    raise DamagedError(f"{name[0]}/{name[1]}: stored fragments {both} overlap")

    def names(self) -> Mapping[tuple[str, str], Sequence[S]]:
        """Return all (fqn, slot) with their sources in order."""
        return self._by_name

    def dtype(self, fqn: str, slot: str) -> str | None:
        """Return the dtype of a stored (fqn, slot), None if none is stored."""
        spans = self._by_name.get((fqn, slot))
        return spans[0].dtype if spans else None

    def cover_all(self, wanted: Sequence[Fragment]) -> list[list[Copy[S]]]:
        """Return what :meth:`cover` does, for fragments of one (fqn, slot): of many boxes in a fifth of the time."""
        name, box = wanted[0][:2], next((one.box for one in wanted if one.box is not None), None)
        if box is not None and name not in self._regions:
            self._regions[name] = _Regions(name, self._by_name.get(name, []), box.shape)
        return self._regions[name].cover(wanted) if name in self._regions else list(map(self._cover_range, wanted))

    def cover(self, wanted: Fragment) -> list[Copy[S]]:
        """Return copies that fill ``wanted`` completely. Raises DamagedError, naming the hole, if there is one."""
        if wanted.box is None and wanted[:2] not in self._regions:
            return self._cover_range(wanted)
        return self.cover_all([wanted])[0]

    def _cover_range(self, wanted: Fragment) -> list[Copy[S]]:
        copies, at = [], wanted.start
        spans = self._by_name.get((wanted.fqn, wanted.slot), [])
        if len(spans) == 1 and wanted.numel and (spans[0].start, spans[0].stop) == (wanted.start, wanted.stop):
            return [Copy(spans[0], 0, 0, wanted.numel)]
        first = max(0, bisect_right(spans, wanted.start, key=lambda source: source.start) - 1)
        for source in spans[first:]:
            if source.start > at or at >= wanted.stop:
                break
            if source.stop <= at:
                continue
            numel = min(source.stop, wanted.stop) - at
            copies.append(Copy(source, at - source.start, at - wanted.start, numel))
            at += numel
        if at < wanted.stop:
            raise DamagedError(f"{wanted.fqn}/{wanted.slot}: elements {at} to {wanted.stop} are in no stored fragment")
        return copies


Array = npt.NDArray[np.int64]


@lru_cache(1 << 12)
def steps_between(sizes: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...]) -> Steps | None:
    """Return how a box of ``sizes`` lies in two memories with these strides; None if it is contiguous in both."""
    joined: list[tuple[int, int, int]] = []
    for size, step, other in zip(sizes, source, target, strict=True):
        if size > 1:
            joins = bool(joined) and joined[-1][1:] == (step * size, other * size)  # one dimension with the one before
            joined.append((size * (joined.pop()[0] if joins else 1), step, other))
    if not joined or (len(joined) == 1 and joined[0][1:] == (1, 1)):
        return None
    return Steps(*(tuple(column) for column in zip(*joined, strict=True)))


_DEPTH = 64  # levels of a tree: far more than any mesh makes, so only forged records reach it


class _Level(NamedTuple):
    """Nodes of a tree, each cut in one dimension. Coordinates of node n begin at n times the reach of the tree, so all
    children are in order, and one bisection finds those of any node."""

    dims: Array
    starts: Array  # of each child, as the next two
    stops: Array
    targets: Array  # nodes of the next level, or ~box


class BoxTree:
    """Boxes of one tensor, each with elements. Raises DamagedError, naming the tensor, if two overlap."""

    def __init__(self, name: str, boxes: Sequence[Part], dims: int) -> None:
        self._first, self._after = _corners(boxes, dims)
        self._reach, self._levels = int(self._after.max(initial=0)) + 1, list[_Level]()
        if self._reach * (len(boxes) + 1) >= 1 << 63:
            raise DamagedError(f"{name}: {len(boxes)} stored fragments in a tensor of {self._reach} rows or columns")
        members = np.arange(len(boxes))
        nodes = np.zeros_like(members)  # of each member, in order
        while len(members) > bool(not self._levels):
            members, nodes = self._grow(name, members, nodes)

    def _grow(self, name: str, members: Array, nodes: Array) -> tuple[Array, Array]:
        """Add a level that cuts all ``nodes``. Return the boxes that are not alone in a child yet, and their nodes."""
        dims = np.full(nodes[-1] + 1, -1)
        bounds, heads = np.empty((2, len(members)), np.int64), np.zeros(len(members), np.bool_)
        for dim in range(self._first.shape[1]):
            at = np.flatnonzero(dims[nodes] < 0)
            own, base = members[at], nodes[at] * self._reach
            order = np.argsort(base + self._first[own, dim], kind="stable")
            own = own[order]
            begin, end = base + self._first[own, dim], np.maximum.accumulate(base + self._after[own, dim])
            apart = np.concatenate([[True], begin[1:] >= end[:-1]])[: len(at)]
            cut = np.bincount(nodes[at], apart, len(dims))[nodes[at]] > 1
            at = at[cut]
            dims[nodes[at]] = dim
            members[at], bounds[0, at], bounds[1, at], heads[at] = own[cut], begin[cut], end[cut], apart[cut]
        if -1 in dims or len(self._levels) == _DEPTH:
            some = members[dims[nodes] < 0] if -1 in dims else members
            pair = [(self._first[index].tolist(), self._after[index].tolist()) for index in some[:2]]
            raise DamagedError(f"{name}: {len(some)} stored fragments overlap, or are of no mesh, such as {pair}")
        edges = np.append(np.flatnonzero(heads), len(members))
        counts = np.diff(edges)
        several = counts > 1
        targets = np.where(several, np.cumsum(several) - 1, ~members[edges[:-1]])
        self._levels.append(_Level(dims, bounds[0, edges[:-1]], bounds[1, edges[1:] - 1], targets))
        return members[np.repeat(several, counts)], np.repeat(np.arange(several.sum()), counts[several])

    def meet(self, boxes: Sequence[Part]) -> tuple[Array, Array, Array, Array]:
        """Return all intersections as (index in ``boxes``, index of a box of the tree, offsets, sizes)."""
        first, after = _corners(boxes, self._first.shape[1])
        wanted = np.repeat(np.arange(len(boxes)), min(1, len(self._first)))
        nodes = np.zeros_like(wanted)
        found = [(wanted, nodes)] if not self._levels else []
        for level in self._levels:
            dim, base = level.dims[nodes], nodes * self._reach
            low = np.searchsorted(level.stops, base + np.minimum(first[wanted, dim], self._reach - 1), "right")
            high = np.searchsorted(level.starts, base + np.minimum(after[wanted, dim], self._reach))
            counts = np.maximum(high - low, 0)
            ends = np.cumsum(counts)
            wanted = np.repeat(wanted, counts)
            targets = level.targets[np.repeat(low - ends + counts, counts) + np.arange(len(wanted))]
            found.append((wanted[targets < 0], ~targets[targets < 0]))
            wanted, nodes = wanted[targets >= 0], targets[targets >= 0]
        wanted, own = map(np.concatenate, zip(*found, strict=True))
        begin = np.maximum(self._first[own], first[wanted])
        sizes = np.minimum(self._after[own], after[wanted]) - begin
        kept = (sizes > 0).all(axis=1)
        return wanted[kept], own[kept], begin[kept], sizes[kept]


def _corners(boxes: Sequence[Part], dims: int) -> tuple[Array, Array]:
    first, sizes = np.array(boxes, np.int64).reshape(len(boxes), 2, dims).swapaxes(0, 1)
    return first, first + sizes


class _Regions(Generic[S]):
    """The stored fragments of one (fqn, slot) as boxes of a tensor of ``shape``."""

    def __init__(self, name: tuple[str, str], spans: Sequence[S], shape: tuple[int, ...]) -> None:
        self._name, self._shape, self._spans = "/".join(name), shape, spans
        boxes, self._owners = self._parts(spans, "a stored fragment does not lie")
        self._tree = BoxTree(self._name, boxes, len(shape))
        self._strides, self._starts = self._places(spans)

    def _parts(self, regions: Sequence[S] | Sequence[Fragment], problem: str) -> tuple[list[Part], Array]:
        """Split regions into boxes. Return the boxes, and the index of the region of each."""
        boxes, counts = list[Part](), list[int]()
        for region in regions:
            box, before = region.box, len(boxes)
            if (region.stop > prod(self._shape)) if box is None else (box.shape != self._shape):
                raise DamagedError(f"{self._name}: {problem} in a tensor of shape {self._shape}")
            boxes += cut_range(self._shape, region.start, region.stop) if box is None else [box[:2]]
            counts.append(len(boxes) - before)
        return boxes, np.repeat(np.arange(len(counts)), counts)

    def _places(self, regions: Sequence[S] | Sequence[Fragment]) -> tuple[Array, Array]:
        """Return the strides of regions in their own memory, and the offset there of the tensor's first element."""
        whole = Box((0,) * len(self._shape), self._shape, self._shape)  # a flat range lies as in the flattened tensor
        boxes = [one.box or whole for one in regions]
        first, after = _corners([box[:2] for box in boxes], len(self._shape))
        inner = np.append(np.ones((len(boxes), 1), np.int64), (after - first)[:, :0:-1], axis=1)
        strides = inner.cumprod(axis=1)[:, ::-1][:, : len(self._shape)]
        starts = np.array([0 if one.box else one.start for one in regions], np.int64)
        return strides, -starts - (first * strides).sum(axis=1)

    def cover(self, wanted: Sequence[Fragment]) -> list[list[Copy[S]]]:
        """Return the copies that fill each fragment, in the order of their sources. Raises DamagedError for a hole."""
        boxes, numbers = self._parts(wanted, "what is wanted does not lie")
        part, own, offsets, sizes = self._tree.meet(boxes)
        part, own = numbers[part], self._owners[own]
        strides, starts = self._places(wanted)
        source, target = self._strides[own], strides[part]
        source_starts = (offsets * source).sum(axis=1) + self._starts[own]
        target_starts = (offsets * target).sum(axis=1) + starts[part]
        order = np.lexsort((own, part))
        part, own, numels = part[order], own[order], sizes.prod(axis=1)[order]
        filled = np.zeros(len(wanted), np.int64)
        np.add.at(filled, part, numels)
        for index in np.flatnonzero(filled != [one.numel for one in wanted])[:1].tolist():
            one, missing = wanted[index], wanted[index].numel - int(filled[index])
            region = f"[{one.start}, {one.stop})" if one.box is None else one.box
            raise DamagedError(f"{self._name}: {missing} of the elements {region} are in no stored fragment")
        shapes = (map(tuple, one[order].tolist()) for one in (sizes, source, target))
        begins, intos = source_starts[order].tolist(), target_starts[order].tolist()
        spans, steps = map(self._spans.__getitem__, own.tolist()), map(steps_between, *shapes)
        copies = list(map(Copy, spans, begins, intos, numels.tolist(), steps))
        edges = np.searchsorted(part, np.arange(len(wanted) + 1)).tolist()
        return [copies[start:stop] for start, stop in pairwise(edges)]


def covered_numel(entries: Iterable[Entry]) -> int:
    """Return the number of elements in a set of fragments. Raises DamagedError if two overlap."""
    index: FragmentIndex[Entry] = FragmentIndex(entries)
    return sum(entry.numel for spans in index.names().values() for entry in spans)


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
    """Reads one stored fragment and its bases once."""

    def __init__(self, files: Readable, source: Source) -> None:
        self._source = source
        self._chain = [(one, StoredBytes(files, one)) for one in source.chain()]
        self.at_fault: SaveId = source.part.save  # after an error: the save whose bytes are damaged or cannot be read

    def chunks(self, out: Values | None = None) -> Iterator[Values]:
        """Yield the values: float32 from lossy encodings, in ``out`` if given, bytes of ``entry.dtype`` from raw.

        Raises DamagedError, perhaps after the last chunk, if stored bytes are not those written; StorageError."""
        entry, (_, own) = self._source.entry, self._chain[0]
        encoding, state = encoding_named(entry.encoding), xxhash.xxh3_128()
        base: BaseEntry | None = None
        for _, stored in reversed(self._chain[1:]):
            base = BaseEntry(stored.read, stored.packed, base)
        try:
            encoded = encoded_chunks(own.read, entry.numel, entry.dtype, encoding, packed=own.packed, base=base)
            for size, chunk in zip(chunk_sizes(entry.numel), encoded, strict=True):
                if own.packed:
                    state.update(chunk.data)
                yield encoding.decode(chunk, size, entry.dtype, None if out is None else out[:size])
                out = None if out is None else out[size:]
            for _, stored in reversed(self._chain):
                stored.check()
        except (DamagedError, StorageError):
            self._find_fault()
            raise
        if own.packed:
            check_encoded(self._source, state.hexdigest())

    def _find_fault(self) -> None:
        # Damage of a base shows as damage of the fragments that depend on it, so check the bases first.
        for source, stored in reversed(self._chain[1:]):
            try:
                stored.check()
            except (DamagedError, StorageError):
                self.at_fault = source.part.save
                return


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
        self.nbytes, self.exact = source.entry.nbytes, not self.packed  # to be written elsewhere, as they are

    def pieces(self) -> Iterator[memoryview]:
        """Yield all bytes once. Raises DamagedError at their end unless they match their hash."""
        while self._read < self.nbytes:
            yield self.read(1 << 22)
        self.check()

    def read(self, nbytes: int) -> memoryview:
        """Return the next bytes, fewer only at the end."""
        data = np.empty(min(nbytes, self._entry.nbytes - self._read), np.uint8).data
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
