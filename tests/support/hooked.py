"""Real files with a hook before and after every operation: to refuse, delay or kill at a chosen moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from store.storage.local import Files, LocalFiles, NewFile
from tests.support.files_below import FilesBelow

Hook = Callable[[str, str], None]
"""Called with the operation's name and its path."""


def nothing(operation: str, path: str) -> None:
    """The hook that does nothing."""


class HookedFiles:
    """:class:`store.storage.local.LocalFiles` underneath; nothing else is changed."""

    def __init__(self, inner: Files, before: Hook = nothing, after: Hook = nothing) -> None:
        self._inner = inner
        self.before, self.after = before, after

    @property
    def root(self) -> Any:
        assert isinstance(self._inner, LocalFiles)
        return self._inner.root

    def create(self, path: str) -> NewFile:
        return _HookedFile(self._told("create", path), self, path)

    def link(self, source: str, target: str) -> None:
        self.before("link", target)
        self._inner.link(source, target)
        self.after("link", target)

    def rename(self, source: str, target: str) -> None:
        self.before("rename", target)
        self._inner.rename(source, target)
        self.after("rename", target)

    def unlink(self, path: str) -> None:
        self._told("unlink", path)

    def make_dir(self, path: str) -> bool:
        return bool(self._told("make_dir", path))

    def remove_dir(self, path: str) -> None:
        self._told("remove_dir", path)

    def sync_dir(self, path: str) -> None:
        self._told("sync_dir", path)

    def list_dir(self, path: str) -> list[str]:
        return list(self._told("list_dir", path))

    def size(self, path: str) -> int:
        return int(self._told("size", path))

    def read(self, path: str, limit: int) -> bytes:
        self.before("read", path)
        return self._inner.read(path, limit)

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        self.before("read", path)
        self._inner.read_into(path, offset, target)

    def below(self, path: str) -> Files:
        return FilesBelow(self, path)

    def _told(self, operation: str, path: str) -> Any:
        self.before(operation, path)
        result = getattr(self._inner, operation)(path)
        self.after(operation, path)
        return result


class _HookedFile:
    def __init__(self, inner: NewFile, files: HookedFiles, path: str) -> None:
        self._inner, self._files, self._path = inner, files, path

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._files.before("write", self._path)
        self._inner.write(data)
        self._files.after("write", self._path)

    def write_at(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        self._files.before("write", self._path)
        self._inner.write_at(offset, data)
        self._files.after("write", self._path)

    def sync(self) -> None:
        self._files.before("sync", self._path)
        self._inner.sync()
        self._files.after("sync", self._path)

    def close(self) -> None:
        self._inner.close()
