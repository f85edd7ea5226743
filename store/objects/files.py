"""A store's files as objects: whole ones, put once each, under keys that look like paths.

There are no temporary names: an object shows when all of it is there, and an acknowledged put is durable. So links,
renames and syncs have nothing to do here. Directories are what keys have in common: one in which nothing is stands for
one that is there and empty, which is why no list is ever missing.

Invariant: but for :meth:`ObjectFiles.replace` (hints), and for large payloads, whose names are one writer's own, no put
can replace an object.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from store.errors import DamagedError, ExistsError, StorageError, UnsupportedError
from store.files import NewFile
from store.layout import PROBE
from store.objects.bucket import Bucket
from store.objects.newfile import NewObject
from store.objects.options import ObjectOptions
from store.objects.reader import Reader


class ObjectFiles:
    """See :class:`store.files.Files` and :class:`store.files.WholeFiles`. root: for people."""

    def __init__(self, root: Path, bucket: str, prefix: str, options: ObjectOptions) -> None:
        self.root = root
        self._bucket = Bucket(bucket, options)
        self._reader = Reader(self._bucket)
        self._prefix = f"{prefix}/" if prefix else ""

    def put_new(self, path: str, fill: Callable[[NewFile], None], *, patched: bool, most: int) -> None:
        """See :class:`store.files.WholeFiles`."""
        file = NewObject(self._bucket, self._key(path), patched=patched, most=most)
        try:
            fill(file)
            file.publish()
        finally:
            file.close()

    def replace(self, path: str, data: bytes) -> None:
        """See :class:`store.files.WholeFiles`."""
        self._bucket.replace(self._key(path), data)

    def require_conditional_puts(self) -> None:
        """Try whether the server keeps a condition. UnsupportedError where it replaces what it must not."""
        for _ in range(2):
            try:
                self._bucket.create(self._key(PROBE), secrets.token_hex(16).encode())
            except ExistsError:
                return
        raise UnsupportedError(
            f"the server of {self.root} puts objects over others although it is told not to (If-None-Match: *): two "
            "jobs could commit over one another. Use S3 itself, or a server with conditional writes"
        )

    def create(self, path: str) -> NewFile:
        """Refused: files are put whole."""
        raise self._refused("create", path)

    def link(self, source: str, target: str) -> None:  # noqa: ARG002
        """Refused."""
        raise self._refused("link", target)

    def rename(self, source: str, target: str) -> None:  # noqa: ARG002
        """Refused."""
        raise self._refused("rename", target)

    def unlink(self, path: str) -> None:
        """Remove a file. Nothing is said where there is none."""
        self._bucket.delete([self._key(path)])

    def unlink_all(self, paths: Sequence[str]) -> None:
        """See :class:`store.files.WholeFiles`."""
        self._bucket.delete([self._key(path) for path in paths])

    def make_dir(self, path: str) -> bool:
        """Nothing to make. False: it is there."""
        self._checked(path)
        return False

    def remove_dir(self, path: str) -> None:
        """Nothing to remove: it is gone with what was in it."""
        self._checked(path)

    def sync_dir(self, path: str) -> None:
        """Nothing to wait for."""
        self._checked(path)

    def list_dir(self, path: str) -> list[str]:
        """See :class:`store.files.Files`; empty where there is nothing."""
        self._checked(path)
        return self._bucket.names(f"{self._prefix}{path}/" if path else self._prefix)

    def size(self, path: str) -> int:
        """See :class:`store.files.Files`."""
        return self._bucket.size(self._key(path))

    def modified(self, path: str) -> float:
        """When a file was put, by the server's clock, in seconds since 1970."""
        return self._bucket.modified(self._key(path))

    @property
    def part_bytes(self) -> int:
        """Payloads that are no larger go in one request."""
        return self._bucket.options.part_bytes()

    def read(self, path: str, limit: int) -> bytes:
        """See :class:`store.files.Files`."""
        data = self._bucket.get(self._key(path), limit)
        if data is None:
            raise DamagedError(f"{self.root}/{path} has more than the {limit} bytes such a file can have")
        return data

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        """See :class:`store.files.Files`."""
        self._reader.read_into(self._key(path), offset, target)

    def _key(self, path: str) -> str:
        if not path:
            raise StorageError(f"{self.root} itself is no file")
        return self._prefix + self._checked(path)

    def _checked(self, path: str) -> str:
        names = path.split("/") if path else []
        if any(name in ("", ".", "..") or "\0" in name for name in names):
            raise DamagedError(f"{path!r} is no name inside the store {self.root}")
        return path

    def _refused(self, verb: str, path: str) -> StorageError:
        return StorageError(f"cannot {verb} {self.root}/{path}: in an object store files are put whole")
