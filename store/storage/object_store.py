"""Keep a store's files as whole objects, put once each, and read them by ranges.

There are no temporary names, links, renames or syncs: an object appears when it is complete, and an acknowledged put is
durable. Directories are common prefixes of keys, so every directory exists and may be empty.

Invariant: except for :meth:`ObjectFiles.replace` (hints) and large payloads, whose names belong to one writer, no put
can replace an object."""

import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from store.errors import DamagedError, ExistsError, StorageError, UnsupportedError
from store.names import PROBE
from store.storage.bucket import MIB, Bucket
from store.storage.local import NewFile, as_bytes, checked_names
from store.storage.object_writer import NewObject

_LARGEST = 4 * MIB  # largest request in bytes


@dataclass
class _Place:
    """End of a thread's last read, and the block that was read ahead. ``size`` is that of the object."""

    key: str
    size: int
    position: int
    window: int = 0
    block: memoryview = field(default_factory=lambda: memoryview(b""))


class Reader:
    """Reads objects of one bucket; sequential reads are fetched ahead, in parallel ranges, for each thread."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._piece = min(_LARGEST, bucket.options.part_bytes())
        self._own = threading.local()
        self._pool = ThreadPoolExecutor(bucket.options.connections, "driftpoint-ranges")  # starts threads when used

    def read_into(self, key: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset``. Raises DamagedError if the object ends early, MissingError."""
        rest, place = as_bytes(target), self._place(key, offset)
        if offset + len(rest) > place.size:
            short = offset + len(rest) - place.size
            raise DamagedError(f"{self._bucket.where(key)} ends at byte {place.size}, {short} bytes too early")
        while len(rest):
            if not len(place.block):
                self._read_on(place, len(rest))
            count = min(len(rest), len(place.block))
            rest[:count] = place.block[:count]
            rest, place.block = rest[count:], place.block[count:]
            place.position += count

    def _place(self, key: str, offset: int) -> _Place:
        place: _Place | None = getattr(self._own, "place", None)
        if place is not None and (place.key, place.position) == (key, offset):
            place.window = min(max(2 * place.window, self._piece), self._piece * self._bucket.options.connections)
            return place
        size = place.size if place is not None and place.key == key else self._bucket.size(key)
        self._own.place = place = _Place(key, size, offset)
        return place

    def _read_on(self, place: _Place, wanted: int) -> None:
        most = self._piece * self._bucket.options.connections
        count = min(max(min(wanted, most), place.window), place.size - place.position)
        end = place.position + count
        stops = [*range(place.position + self._piece, end, self._piece), end]
        starts = [place.position, *stops[:-1]]
        if len(starts) == 1:
            place.block = self._bucket.get_range(place.key, starts[0], stops[0])
        else:
            keys = [place.key] * len(starts)
            try:
                found = self._pool.map(self._bucket.get_range, keys, starts, stops)
            except RuntimeError:  # the interpreter exits, and a pool takes no more work
                found = map(self._bucket.get_range, keys, starts, stops)
            place.block = memoryview(b"".join(found))
        if len(place.block) != count:
            raise DamagedError(f"{self._bucket.where(place.key)} gave {len(place.block)} bytes instead of {count}")


class ObjectFiles:
    """:class:`store.storage.local.Files` and :class:`store.storage.local.WholeFiles` below a prefix of a bucket."""

    def __init__(self, root: Path, bucket: Bucket, prefix: str) -> None:
        self.root = root
        self._bucket = bucket
        self._reader = Reader(self._bucket)
        self._prefix = f"{prefix}/" if prefix else ""

    def put_new(self, path: str, fill: Callable[[NewFile], None], *, patched: bool, most: int) -> None:
        file = NewObject(self._bucket, self._key(path), patched=patched, most=most)
        try:
            fill(file)
            file.publish()
        finally:
            file.close()

    def replace(self, path: str, data: bytes) -> None:
        self._bucket.replace(self._key(path), data)

    def require_conditional_puts(self) -> None:
        """Raise UnsupportedError if the server ignores the condition of a put."""
        for _ in range(2):
            try:
                self._bucket.create(self._key(PROBE), secrets.token_hex(16).encode())
            except ExistsError:
                return
        raise UnsupportedError(
            f"the server of {self.root} ignores the condition of a put and replaces objects, so two jobs could commit "
            "over one another. Use S3 itself, or a server with conditional writes"
        )

    def _refuse(self, path: str, *_: str) -> NoReturn:
        raise StorageError(f"cannot create, link or rename {self.root}/{path}: in an object store files are put whole")

    create = link = rename = _refuse

    def unlink(self, path: str) -> None:
        """Remove a file, if it exists."""
        self._bucket.delete([self._key(path)])

    def unlink_all(self, paths: Sequence[str]) -> None:
        self._bucket.delete([self._key(path) for path in paths])

    def make_dir(self, path: str) -> bool:
        self.sync_dir(path)
        return False

    def sync_dir(self, path: str) -> None:
        checked_names(path, self.root)

    remove_dir = sync_dir

    def list_dir(self, path: str) -> list[str]:
        checked_names(path, self.root)
        return self._bucket.names(f"{self._prefix}{path}/" if path else self._prefix)

    def size(self, path: str) -> int:
        return self._bucket.size(self._key(path))

    def modified(self, path: str) -> float:
        """Return when a file was put, by the server's clock, in seconds since 1970."""
        return self._bucket.modified(self._key(path))

    @property
    def part_bytes(self) -> int:
        """Largest payload that is put in one request."""
        return self._bucket.options.part_bytes()

    def read(self, path: str, limit: int) -> bytes:
        data = self._bucket.get(self._key(path), limit)
        if data is None:
            raise DamagedError(f"{self.root}/{path} has more than the {limit} bytes such a file can have")
        return data

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        self._reader.read_into(self._key(path), offset, target)

    def below(self, path: str) -> "ObjectFiles":
        return ObjectFiles(self.root / path, self._bucket, self._key(path))

    def _key(self, path: str) -> str:
        if not path:
            raise StorageError(f"{self.root} itself is no file")
        return self._prefix + "/".join(checked_names(path, self.root))
