"""The commits of a store, seen as they appear. Reads records only and never writes; pruning may go on meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from store.catalog import Catalog, open_catalog
from store.errors import DamagedError, NoStoreError
from store.names import SaveId, Unit
from store.schema import ManifestRecord
from store.storage.local import LocalFiles


@dataclass(frozen=True)
class Commit:
    """One commit. units: what it wrote anew. nbytes: its payload, all ranks. avoided: what it did not write."""

    step: int
    epoch: int
    units: frozenset[Unit]
    nbytes: int
    avoided: int


class Watcher:
    """Finds new commits. Ask it more often than commits are pruned, and it misses none."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._catalog: Catalog | None = None
        self._seen: set[SaveId] = set()

    def new(self) -> list[Commit]:
        """Those since the last call, oldest first. None while there is no store."""
        if self._catalog is None:
            try:
                self._catalog = open_catalog(LocalFiles(self._root))
            except NoStoreError:
                return []
        found = []
        for save in reversed(self._catalog.saves()):
            if save not in self._seen:
                self._seen.add(save)
                try:
                    found.append(_commit(self._catalog.manifest(save)))
                except DamagedError:
                    continue  # pruned between the two looks
        return found


def _commit(manifest: ManifestRecord) -> Commit:
    own = frozenset(record.unit for record in manifest.units if record.version == manifest.save)
    nbytes = manifest.groups[manifest.save.name].payload_bytes
    return Commit(manifest.step, manifest.epoch, own, nbytes, manifest.bytes_avoided)
