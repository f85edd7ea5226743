"""Show an in-memory version as the newest commit of a store, read-only.

Other files come from the store below, so that a layer whose bytes in memory are damaged falls back to its version on
disk. Payloads of ranks on other nodes have a size but may not be readable from here."""

from pathlib import Path
from typing import NoReturn

from store.errors import MissingError, StorageError
from store.fragments import ReadPlan
from store.memory.index import MemoryVersion
from store.names import MANIFESTS, manifest_path, part_path, payload_path, segment_dir
from store.schema import ManifestRecord, to_bytes
from store.storage.local import Files, LocalFiles, OpensFiles


class Overlay:
    """Read-only :class:`store.storage.local.Files`; any write raises StorageError.

    Shows ``manifest`` instead of the version's own; with ``alone`` no other commit, so that a damaged version leaves
    nothing to resume."""

    def __init__(
        self, below: Files, version: MemoryVersion, manifest: ManifestRecord | None = None, *, alone: bool = False
    ) -> None:
        shown = manifest or version.manifest
        self._below, self._version, self._alone = below, version, alone
        self._folder = segment_dir(version.save)
        self._records: dict[str, bytes] = {manifest_path(shown.save): to_bytes(shown)}
        self._manifest = manifest_path(shown.save).rpartition("/")
        self._records |= {part_path(version.save, rank): data for rank, data in version.parts.items()}
        self._ranks = {payload_path(version.save, rank): rank for rank in version.parts}

    @property
    def root(self) -> Path | None:
        found = getattr(self._below, "root", None)
        return found if isinstance(found, Path) else None

    @property
    def whole(self) -> bool:
        """Whether the whole version can be read from here."""
        return not self._version.parts.keys() - self._version.payloads.keys() - self._version.far.keys()

    def alone(self) -> "Overlay":
        """Return an overlay that shows the version as the only commit."""
        return Overlay(self._below, self._version, alone=True)

    def list_dir(self, path: str) -> list[str]:
        if path == self._folder:
            return sorted(name.rpartition("/")[2] for name in (*self._records, *self._ranks) if name.startswith(path))
        if self._alone and path == self._manifest[0]:
            return [self._manifest[2]]
        try:
            names = self._below.list_dir(path)
        except MissingError:
            if path != MANIFESTS:
                raise
            names = []
        return sorted({*names, self._manifest[2]}) if path == self._manifest[0] else names

    def size(self, path: str) -> int:
        if path in self._records:
            return len(self._records[path])
        if path in self._ranks:
            return self._version.records[self._ranks[path]].payload_bytes
        return self._below.size(path)

    def read(self, path: str, limit: int) -> bytes:
        return self._records[path] if path in self._records else self._below.read(path, limit)

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        if path not in self._ranks:
            self._below.read_into(path, offset, target)
            return
        self.read_payload(self._ranks[path], offset, target)

    def open_file(self, path: str) -> int | None:
        if path in self._ranks:
            payload = self._version.payloads.get(self._ranks[path])
            return None if payload is None else LocalFiles(payload.parent).open_file(payload.name)
        return self._below.open_file(path) if isinstance(self._below, OpensFiles) else None

    def expect(self, path: str, offset: int, nbytes: int) -> None:
        if path not in self._ranks and isinstance(self._below, ReadPlan):
            self._below.expect(path, offset, nbytes)

    def read_payload(self, rank: int, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset`` of a rank's payload. Raises StorageError if it is on another node."""
        payload = self._version.payloads.get(rank)
        if payload is not None:
            LocalFiles(payload.parent).read_into(payload.name, offset, target)
            return
        far = self._version.far.get(rank)
        if far is not None:
            far(offset, target)
            return
        for (of, start, nbytes), data in self._version.lent.items():
            if of == rank and start <= offset and offset + target.nbytes <= start + nbytes:
                target[:] = data[offset - start : offset - start + target.nbytes]
                return
        raise StorageError(f"rank {rank}'s memory is on another node")

    def _refuse(self, path: str, *_: str) -> NoReturn:
        raise StorageError(f"cannot change {path}: a version in memory is read-only")

    create = link = rename = unlink = make_dir = remove_dir = sync_dir = below = _refuse
