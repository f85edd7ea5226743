"""An object while it is written: in memory as long as it is small, then in parts, or spooled to a local file.

Records and small payloads go in one request that cannot replace anything. Large payloads go in parts, which S3 puts
together at the end: as they are written, or, where the beginning is written last, from a file without a name on
this machine. Parts come with a condition in no library at hand; their names are one writer's own (a save's, a rank's),
they carry a token, and what is found under the name afterwards has to carry it, too.

One thread writes a file.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from store.errors import ExistsError, MissingError, StorageError
from store.storage.bucket import Bucket


class NewObject:
    """A :class:`store.storage.local.NewFile`, put by :meth:`publish`. patched: ``write_at`` will be called. most:
    bytes that
    it may come to, of a payload; 0: a record, which is never large and never replaces anything."""

    def __init__(self, bucket: Bucket, key: str, *, patched: bool, most: int) -> None:
        self._bucket, self._key = bucket, key
        self._patched, self._most, self._part = patched, most, bucket.options.part_bytes(most)
        self._head = bytearray()
        self._large: _Spooled | _Streamed | None = None
        self._closed = False
        self._size = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._require_open("write")
        view = memoryview(data)
        flat = view.cast("B") if view.nbytes else memoryview(b"")
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
        flat = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        if offset < 0 or offset + len(flat) > self._size:
            raise ValueError(f"bytes {offset} to {offset + len(flat)} of {self._key} were never written")
        self._require_open("write")
        if self._large is None:
            self._head[offset : offset + len(flat)] = flat
        elif isinstance(self._large, _Spooled):
            self._large.write_at(offset, flat)
        else:
            raise ValueError(f"{self._key} was begun as one whose bytes are not written again")

    def sync(self) -> None:
        self._require_open("sync")

    def close(self) -> None:
        """Give up what was not published."""
        self._closed = True
        self._head = bytearray()
        large, self._large = self._large, None
        if large is not None:
            large.abandon()

    def publish(self) -> None:
        """Have it under its name, durable. ExistsError where the name is taken."""
        self._require_open("put")
        if self._large is None:
            self._bucket.create(self._key, bytes(self._head))
            return
        self._large.finish()
        large, self._large = self._large, None
        large.require_own(self._size)

    def _begun(self) -> _Spooled | _Streamed:
        try:
            self._bucket.size(self._key)
        except MissingError:
            return (_Spooled if self._patched else _Streamed)(self._bucket, self._key, self._part)
        raise ExistsError(f"cannot put {self._bucket.where(self._key)}: another object is there already")

    def _require_open(self, verb: str) -> None:
        if self._closed:
            raise StorageError(f"cannot {verb} {self._bucket.where(self._key)}: it is closed")


class _Upload:
    """What both kinds have in common: a token, by which an upload whose answer was lost is known again."""

    def __init__(self, bucket: Bucket, key: str, part: int) -> None:
        self._bucket, self._key, self._part = bucket, key, part
        self._token = secrets.token_hex(16)

    def require_own(self, nbytes: int) -> None:
        """What is there now carries this upload's token, and has so many bytes. StorageError."""
        owner, found = self._bucket.upload_at(self._key)
        if owner != self._token:
            raise StorageError(f"{self._bucket.where(self._key)} was replaced by another upload while it was put")
        if found != nbytes:
            raise StorageError(f"{self._bucket.where(self._key)} has {found} bytes after {nbytes} were written")

    def _require_ours(self, error: BaseException) -> None:
        try:
            if self._bucket.upload_at(self._key)[0] == self._token:
                return
        except MissingError:
            pass
        raise self._bucket.failed(error, "upload", self._key) from error


class _Streamed(_Upload):
    """Parts leave as they fill; as many as there are connections are in memory."""

    def __init__(self, bucket: Bucket, key: str, part: int) -> None:
        super().__init__(bucket, key, part)
        self._stack = ExitStack()
        self._writer: Any = self._stack.enter_context(bucket.writer(key, self._token, part))

    def write(self, data: bytearray | memoryview) -> None:
        try:
            self._writer.write(bytes(data))  # it keeps a view of what it is given until the part is on its way
        except self._bucket.failures as error:
            raise self._bucket.failed(error, "upload", self._key) from error

    def finish(self) -> None:
        try:
            self._stack.close()
        except self._bucket.failures as error:
            self._require_ours(error)

    def abandon(self) -> None:
        """Have the parts removed. Where that fails they stay until the bucket's own rule removes them."""
        try:
            self._stack.__exit__(StorageError, StorageError("given up"), None)
        except self._bucket.failures:
            return


class _Spooled(_Upload):
    """A file that has no name, so that nothing is left of it however the process ends."""

    def __init__(self, bucket: Bucket, key: str, part: int) -> None:
        super().__init__(bucket, key, part)
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=bucket.options.spool)  # noqa: SIM115 - closed below
        except OSError as error:
            raise self._refused(error) from error

    def write(self, data: bytearray | memoryview) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise self._refused(error) from error

    def write_at(self, offset: int, data: memoryview) -> None:
        try:
            self._file.seek(offset)
            self._file.write(data)
            self._file.seek(0, os.SEEK_END)
        except OSError as error:
            raise self._refused(error) from error

    def finish(self) -> None:
        try:
            self._file.flush()
            self._file.seek(0)
            self._bucket.upload(self._key, self._token, self._file, self._part)
        except self._bucket.failures as error:
            self._require_ours(error)
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Give its room back."""
        self._file.close()

    def _refused(self, error: OSError) -> StorageError:
        place = self._bucket.options.spool or Path(tempfile.gettempdir())
        return StorageError(
            f"cannot write the payload of {self._bucket.where(self._key)} to {place} before it is uploaded: "
            f"{error.strerror or error}; name a directory with room as `s3: {{spool: DIR}}`"
        )
