"""What a save took, read from the store that holds it: bytes by slot, and all of its files."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from store.catalog import open_catalog
from store.names import manifest_path, part_path, segment_dir
from store.schema import PartRecord, from_bytes
from store.storage.local import LocalFiles


@dataclass(frozen=True)
class SaveBytes:
    """slots: bytes of the stored fragments, by slot. files: with all else that the save wrote: header, run state, part
    and manifest. differences: by slot, elements that are stored as differences, and the bytes that takes."""

    slots: dict[str, int]
    files: int
    differences: dict[str, tuple[int, int]]

    @property
    def values(self) -> int:
        """Bytes of all fragments."""
        return sum(self.slots.values())


def newest_save(root: Path) -> SaveBytes:
    """Of the newest commit, of one rank."""
    files = LocalFiles(root)
    save = open_catalog(files).saves()[0]
    part = from_bytes(PartRecord, files.read(part_path(save, 0), 1 << 28), str(save))
    slots: Counter[str] = Counter()
    differences: dict[str, tuple[int, int]] = {}
    for entry in part.entries:
        slots[entry.slot] += entry.nbytes
        if entry.base is not None:
            numel, nbytes = differences.get(entry.slot, (0, 0))
            differences[entry.slot] = (numel + entry.numel, nbytes + entry.nbytes)
    folder = sum(path.stat().st_size for path in (root / segment_dir(save)).iterdir())
    return SaveBytes(dict(slots), folder + (root / manifest_path(save)).stat().st_size, differences)
