"""Write an object: in memory while it is small, then in parts, or spooled to a local file.

Records and small payloads are put in one conditional request that cannot replace an object. Large payloads are uploaded
in parts: as they are written, or, if their beginning is written last, from an unnamed temporary file. obstore has no
conditional upload in parts, but the name belongs to one writer (one rank of one save), and the object found there
afterwards must carry the upload's token. One thread writes a file."""

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from store.errors import ExistsError, MissingError, StorageError
from store.storage.bucket import Bucket
from store.storage.local import as_bytes


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
                begun = self._bucket.writer(self._key, self._token, self._part, kept)
                self._writer = self._stack.enter_context(begun)
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
