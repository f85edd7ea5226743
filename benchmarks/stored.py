"""What a save took, read from the store that holds it: bytes by slot, and all of its files."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from store.catalog import open_catalog
from store.files import LocalFiles
from store.layout import manifest_path, part_path, payload_path, segment_dir
from store.schema import PartRecord, from_bytes


@dataclass(frozen=True)
class SaveBytes:
    """slots: bytes of the stored fragments, by slot. payload: with the header and the run state. files: all of it,
    part and manifest too. differences: share of the fragments' bytes that are differences. encodings: by slot."""

    slots: dict[str, int]
    payload: int
    files: int
    differences: float
    encodings: dict[str, set[str]]

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
    encodings: dict[str, set[str]] = {}
    for entry in part.entries:
        slots[entry.slot] += entry.nbytes
        encodings.setdefault(entry.slot, set()).add(entry.encoding)
    differences = sum(entry.nbytes for entry in part.entries if entry.base is not None)
    folder = sum(path.stat().st_size for path in (root / segment_dir(save)).iterdir())
    return SaveBytes(
        dict(slots),
        (root / payload_path(save, 0)).stat().st_size,
        folder + (root / manifest_path(save)).stat().st_size,
        differences / max(1, sum(slots.values())),
        encodings,
    )
