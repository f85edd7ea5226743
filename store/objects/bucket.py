"""Requests to one bucket: retried, bounded in time, their errors in our words. The one user of obstore.

An answer that did not come says nothing about what happened. So an object that must not exist yet is put on the
condition that it does not, and where the answer is no, or none comes, it is read: what has our very bytes is ours. It
does not know what objects mean. Any thread may use it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from store.errors import ExistsError, MissingError, StorageError, UnreachableError
from store.objects.failures import is_passing, is_taken, library, told
from store.objects.options import ObjectOptions

T = TypeVar("T")

OWNER = "driftpoint-write"
"""Key of the metadata by which an upload in parts is known again."""


class Bucket:
    """One bucket. UnsupportedError where obstore is not installed, StorageError for what it cannot be reached with."""

    def __init__(self, name: str, options: ObjectOptions) -> None:
        self.name, self.options = name, options
        self._lib = library()
        self._failures = (self._lib.exceptions.BaseError, OSError)
        try:
            self._store = self._opened()
        except (*self._failures, ValueError) as error:
            raise told(error, "open", self.where("")) from error

    def where(self, key: str) -> str:
        """An object, for people."""
        return f"s3://{self.name}/{key}"

    def create(self, key: str, data: bytes) -> None:
        """Have an object of just these bytes under a name that was free. ExistsError where others are there."""
        deadline = self._deadline()
        for pause in _pauses():
            try:
                self._lib.put(self._store, key, data, mode="create", use_multipart=False)
            except self._failures as error:
                if not is_taken(error) and not is_passing(error):
                    raise told(error, "put", self.where(key)) from error
                found = self._holds(key, data)
                if found is False:
                    raise ExistsError(f"cannot put {self.where(key)}: another object is there already") from error
                if found is None and time.monotonic() >= deadline:
                    raise self._gave_up(error, "put", key) from error
                if found is None:
                    time.sleep(pause)
                    continue
            return

    def replace(self, key: str, data: bytes) -> None:
        """Put an object, whatever is there."""
        self._asked("put", key, lambda: self._lib.put(self._store, key, data, use_multipart=False))

    def get(self, key: str, limit: int) -> bytes | None:
        """A whole object; None where it has more than ``limit`` bytes. MissingError where there is none."""

        def ask() -> bytes | None:
            found = self._lib.get(self._store, key)
            return bytes(found.bytes()) if found.meta["size"] <= limit else None

        return self._asked("read", key, ask)

    def get_range(self, key: str, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of an object; it must have them."""
        return memoryview(
            self._asked("read", key, lambda: self._lib.get_range(self._store, key, start=start, end=stop))
        )

    def size(self, key: str) -> int:
        """Bytes of an object. MissingError where there is none."""
        found = self._asked("look at", key, lambda: self._lib.head(self._store, key))
        return int(found["size"])

    def modified(self, key: str) -> float:
        """When an object was put, by the server's clock, in seconds since 1970. MissingError where there is none."""
        found = self._asked("look at", key, lambda: self._lib.head(self._store, key))
        return float(found["last_modified"].timestamp())

    def upload_at(self, key: str) -> tuple[str | None, int]:
        """What an upload left as its :data:`OWNER`, and its bytes. MissingError where there is no object."""
        found = self._asked("look at", key, lambda: self._lib.get(self._store, key, options={"head": True}))
        return dict(found.attributes).get(OWNER), int(found.meta["size"])

    def names(self, prefix: str) -> list[str]:
        """What stands directly below a prefix (ending in ``/``, or empty), however much it is, sorted."""
        folder = prefix.rstrip("/")
        found = self._asked("list", prefix, lambda: self._lib.list_with_delimiter(self._store, folder or None))
        below = [*found["common_prefixes"], *(one["path"] for one in found["objects"])]
        # Consoles make a folder of an empty object that is called like it: that is not in it.
        return sorted({key.rstrip("/").rpartition("/")[2] for key in below if key.rstrip("/") != folder})

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects, those of them that are there, a thousand in a request."""
        if not keys:
            return
        with suppress(MissingError):
            self._asked("delete", keys[0], lambda: self._lib.delete(self._store, list(keys)))

    def writer(self, key: str, owner: str, part_bytes: int) -> Any:
        """An upload in parts, replacing what is there when its ``with`` ends well: takes ``write(bytes)``."""
        return self._lib.open_writer(
            self._store,
            key,
            attributes={OWNER: owner},
            buffer_size=part_bytes,
            max_concurrency=self.options.connections,
        )

    def upload(self, key: str, owner: str, source: Any, part_bytes: int) -> None:
        """Put a file's bytes, in parts, replacing what is there."""
        self._lib.put(
            self._store,
            key,
            source,
            attributes={OWNER: owner},
            use_multipart=True,
            chunk_size=part_bytes,
            max_concurrency=self.options.connections,
        )

    def failed(self, error: BaseException, verb: str, key: str) -> StorageError:
        """An error of :meth:`writer` or :meth:`upload` in our words."""
        return told(error, verb, self.where(key))

    @property
    def failures(self) -> tuple[type[BaseException], ...]:
        """What :meth:`writer` and :meth:`upload` may raise."""
        return self._failures

    def _holds(self, key: str, data: bytes) -> bool | None:
        """Whether an object is these bytes; None where there is none."""
        try:
            return self.get(key, len(data)) == data
        except MissingError:
            return None

    def _asked(self, verb: str, key: str, ask: Callable[[], T]) -> T:
        """The answer to what may be asked twice. The library asks again by itself, but not where the server may have
        carried out a request that it takes to be a change."""
        deadline = self._deadline()
        for pause in _pauses():
            try:
                return ask()
            except self._failures as error:
                if not is_passing(error):
                    raise told(error, verb, self.where(key)) from error
                if time.monotonic() >= deadline:
                    raise self._gave_up(error, verb, key) from error
            time.sleep(pause)
        raise AssertionError("there is always another pause")

    def _deadline(self) -> float:
        return time.monotonic() + self.options.retry_seconds

    def _gave_up(self, error: BaseException, verb: str, key: str) -> StorageError:
        """A refusal that might have passed and did not: never that a name is free or taken."""
        found = told(error, verb, self.where(key))
        contradicted = "" if type(found) is StorageError else ", and the answers contradict each other"
        return UnreachableError(f"{found}{contradicted}")

    def _opened(self) -> Any:
        given = self.options
        config: dict[str, Any] = {"virtual_hosted_style_request": given.virtual_hosted}
        if given.endpoint is not None:
            config["endpoint"] = given.endpoint
        if given.region is not None:
            config["region"] = given.region
        # The library takes this from the environment only where it is given no other option of the client.
        plain = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
        client: dict[str, Any] = {
            "timeout": timedelta(seconds=given.request_seconds),
            "allow_http": plain if given.allow_http is None else given.allow_http,
        }
        retry = {"max_retries": 1000, "retry_timeout": timedelta(seconds=given.retry_seconds)}
        return self._lib.store.S3Store(self.name, config=config, client_options=client, retry_config=retry)


def _pauses() -> Iterator[float]:
    """Seconds between tries, without end."""
    yield from (0.1, 0.2, 0.5, 1.0, 2.0)
    while True:
        yield 5.0
