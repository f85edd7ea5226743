"""The files below a directory of other files, so that hooks and faults of those see every operation."""

from __future__ import annotations

from typing import Any

from store.storage.local import Files, NewFile


class FilesBelow:
    """:class:`store.storage.local.Files` that puts ``folder`` before each path."""

    def __init__(self, outer: Files, folder: str) -> None:
        self._outer, self._folder = outer, folder

    @property
    def root(self) -> Any:
        return self._outer.root / self._folder  # type: ignore[attr-defined] - an AttributeError where there is none

    def _at(self, path: str) -> str:
        return f"{self._folder}/{path}" if path else self._folder

    def create(self, path: str) -> NewFile:
        return self._outer.create(self._at(path))

    def link(self, source: str, target: str) -> None:
        self._outer.link(self._at(source), self._at(target))

    def rename(self, source: str, target: str) -> None:
        self._outer.rename(self._at(source), self._at(target))

    def unlink(self, path: str) -> None:
        self._outer.unlink(self._at(path))

    def make_dir(self, path: str) -> bool:
        made = self._outer.make_dir(self._at(path))
        if path == "":  # as of a local root, the directories above are made and synced
            self._outer.sync_dir(self._folder.rpartition("/")[0])
        return made

    def remove_dir(self, path: str) -> None:
        self._outer.remove_dir(self._at(path))

    def sync_dir(self, path: str) -> None:
        self._outer.sync_dir(self._at(path))

    def list_dir(self, path: str) -> list[str]:
        return self._outer.list_dir(self._at(path))

    def size(self, path: str) -> int:
        return self._outer.size(self._at(path))

    def read(self, path: str, limit: int) -> bytes:
        return self._outer.read(self._at(path), limit)

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        self._outer.read_into(self._at(path), offset, target)

    def below(self, path: str) -> Files:
        return FilesBelow(self, path)
