"""Keep a store's files as whole objects, put once each, and read them by ranges.

There are no temporary names, links, renames or syncs: an object appears when it is complete, and an acknowledged put is
durable. Directories are common prefixes of keys, so every directory exists and may be empty.

Records and small payloads are put in one conditional request that cannot replace an object. Large payloads are uploaded
in parts, which obstore cannot do conditionally; but the name belongs to one writer (one rank of one save), and the
object found there afterwards must carry the upload's token. One thread writes a file.

Invariant: except for :meth:`ObjectFiles.replace` (hints) and large payloads, no put can replace an object."""

import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

from store.errors import DamagedError, ExistsError, MissingError, StorageError, UnsupportedError
from store.names import PROBE
from store.storage.bucket import MIB, Bucket
from store.storage.local import NewFile, as_bytes, checked_names

_LARGEST = 4 * MIB  # largest request in bytes


@dataclass
class _Place:
    """Where a thread's last read ended, and the block that was read ahead. ``size`` is that of the object."""

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
                parts = self._pool.map(self._bucket.get_range, keys, starts, stops)
            except RuntimeError:  # the interpreter exits, and a pool takes no more work
                parts = map(self._bucket.get_range, keys, starts, stops)
            place.block = memoryview(b"".join(parts))
        if len(place.block) != count:
            raise DamagedError(f"{self._bucket.where(place.key)} gave {len(place.block)} bytes instead of {count}")


class NewObject:
    """A :class:`store.storage.local.NewFile` that :meth:`publish` puts; ``sync`` does nothing.

    ``patched``: ``write_at`` will be called. ``most``: largest size of a payload in bytes; 0 for a record, which is
    never large and never replaces an object."""

    def __init__(self, bucket: Bucket, key: str, *, patched: bool, most: int) -> None:
        self._bucket, self._key = bucket, key
        self._patched, self._most, self._part = patched, most, bucket.options.part_bytes(most)
        self._head = bytearray()
        self._large: _Spooled | _Streamed | None = None
        self._closed = False
        self._size = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._require_open("write")
        flat = as_bytes(data)
        self._size += len(flat)
        if self._large is None:
            self._head += flat
            if self._most and len(self._head) > self._part:
                self._large = self._begun()
                self._large.write(self._head)
                self._head = bytearray()
        else:
            self._large.write(flat)

    def write_at(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        flat = as_bytes(data)
        if offset < 0 or offset + len(flat) > self._size:
            raise ValueError(f"bytes {offset} to {offset + len(flat)} of {self._key} were never written")
        self._require_open("write")
        if self._large is None:
            self._head[offset : offset + len(flat)] = flat
        elif isinstance(self._large, _Spooled):
            self._large.write_at(offset, flat)
        else:
            raise ValueError(f"{self._key} was opened without `patched`, so its bytes cannot be written again")

    def sync(self) -> None:
        self._require_open("sync")

    def close(self) -> None:
        """Discard unpublished bytes."""
        self._closed = True
        self._head = bytearray()
        large, self._large = self._large, None
        if large is not None:
            large.abandon()

    def publish(self) -> None:
        """Put the object under its name, durably. Raises ExistsError if the name is taken."""
        self._require_open("put")
        if self._large is None:
            self._bucket.create(self._key, bytes(self._head))
            return
        self._large.finish()
        large, self._large = self._large, None
        large.require_own(self._size)

    def _begun(self) -> "_Spooled | _Streamed":
        try:
            self._bucket.size(self._key)
        except MissingError:
            return (_Spooled if self._patched else _Streamed)(self._bucket, self._key, self._part)
        raise ExistsError(f"cannot put {self._bucket.where(self._key)}: another object is there already")

    def _require_open(self, verb: str) -> None:
        if self._closed:
            raise StorageError(f"cannot {verb} {self._bucket.where(self._key)}: it is closed")


class _Upload:
    """Base of uploads: a token identifies an upload whose answer was lost."""

    def __init__(self, bucket: Bucket, key: str, part: int) -> None:
        self._bucket, self._key, self._part = bucket, key, part
        self._token = secrets.token_hex(16)

    def require_own(self, nbytes: int) -> None:
        """Raise StorageError unless the object carries this upload's token and has ``nbytes`` bytes."""
        owner, found = self._bucket.upload_at(self._key)
        if owner != self._token:
            raise StorageError(f"{self._bucket.where(self._key)} was replaced by another upload while it was put")
        if found != nbytes:
            raise StorageError(f"{self._bucket.where(self._key)} has {found} bytes after {nbytes} were written")


class _Streamed(_Upload):
    """Uploads parts as they fill; at most ``connections`` parts are in memory."""

    def __init__(self, bucket: Bucket, key: str, part: int) -> None:
        super().__init__(bucket, key, part)
        self._stack = ExitStack()
        self._writer: Any = None

    def write(self, data: bytearray | memoryview) -> None:
        """Write ``data``, the first time more than a part."""
        kept = bytes(data)  # the writer keeps a view of the data until the part is sent
        try:
            if self._writer is None:
                self._writer = self._stack.enter_context(self._bucket.writer(self._key, self._token, self._part, kept))
            else:
                self._writer.write(kept)
        except self._bucket.failures as error:
            raise self._bucket.failed(error, "upload", self._key) from error

    def finish(self) -> None:
        try:
            self._stack.close()
        except self._bucket.failures as error:
            with suppress(MissingError):
                if self._bucket.upload_at(self._key)[0] == self._token:
                    return
            raise self._bucket.failed(error, "upload", self._key) from error

    def abandon(self) -> None:
        """Remove the parts. If that fails they stay until the bucket's lifecycle rule removes them."""
        try:
            self._stack.__exit__(StorageError, StorageError("given up"), None)
        except self._bucket.failures:
            return


class _Spooled(_Upload):
    """Spools to an unnamed file, of which nothing remains when the process ends."""

    def __init__(self, bucket: Bucket, key: str, part: int) -> None:
        super().__init__(bucket, key, part)
        with self._spooling():
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=bucket.options.spool)  # noqa: SIM115 - closed below

    def write(self, data: bytearray | memoryview) -> None:
        with self._spooling():
            self._file.write(data)

    def write_at(self, offset: int, data: memoryview) -> None:
        with self._spooling():
            self._file.seek(offset)
            self._file.write(data)
            self._file.seek(0, os.SEEK_END)

    def finish(self) -> None:
        try:
            self._file.flush()
            self._bucket.upload(self._key, self._token, self._file, self._part)
        finally:
            self._file.close()

    def abandon(self) -> None:
        self._file.close()

    @contextmanager
    def _spooling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            place = self._bucket.options.spool or Path(tempfile.gettempdir())
            raise StorageError(
                f"cannot write the payload of {self._bucket.where(self._key)} to {place} before it is uploaded: "
                f"{error.strerror or error}; name a directory with room as `s3: {{spool: DIR}}`"
            ) from error


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
