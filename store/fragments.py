"""Map wanted fragments to stored ones, and read stored fragments chunk by chunk.

Every change of world size, ZeRO stage or framework is interval arithmetic on fragments. Reading checks hashes, unpacks
and decodes in the memory of a few chunks; values must not be used before the last hash was checked.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import xxhash

from store.encoding import encoding_named
from store.encoding.base import Values, chunk_sizes
from store.encoding.stream import BaseEntry, encoded_chunks
from store.errors import DamagedError, StorageError
from store.layout import payload_path
from store.names import BUFFER, FROZEN, WEIGHTS, Fragment, SaveId
from store.schema import Entry, PartRecord
from store.storage.local import Files


class Span(Protocol):
    """Elements [start, stop) of a flattened (fqn, slot), stored anywhere; ``dtype`` as named in safetensors."""

    @property
    def fqn(self) -> str: ...

    @property
    def slot(self) -> str: ...

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

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
    def dtype(self) -> str:
        """Of the values, before encoding."""
        return self.entry.dtype


class Copy(NamedTuple, Generic[S]):
    """``numel`` elements from ``source_start`` of the stored fragment go to ``target_start`` of the wanted one."""

    source: S
    source_start: int
    target_start: int
    numel: int


class FragmentIndex(Generic[S]):
    """Stored fragments by (fqn, slot), sorted by start."""

    def __init__(self, sources: Iterable[S]) -> None:
        self._by_name: dict[tuple[str, str], list[S]] = {}
        for source in sources:
            self._by_name.setdefault((source.fqn, source.slot), []).append(source)
        for name, spans in self._by_name.items():
            if len(spans) == 1:
                continue
            # Empty fragments fill nothing and overlap nothing; one is kept if a tensor has no other.
            spans[:] = [source for source in spans if source.stop > source.start] or spans[:1]
            spans.sort(key=lambda source: source.start)
            _refuse_overlap(name, spans)

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
        spans = self._by_name.get((wanted.fqn, wanted.slot), [])
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
