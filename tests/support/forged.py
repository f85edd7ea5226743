"""Edits the records of a store so that all checksums stay right, as another program could have written them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from store.names import SaveId
from store.schema import seal
from store.segment import parts_digest
from tests.support.records import unseal


def forge_part(store: Path, save: SaveId, change: Callable[[dict[str, Any]], Any], rank: int = 0) -> None:
    """Change a part in place, and the digest of it in every manifest."""
    folder = store / "segments" / save.name
    path = folder / f"rank-{rank:05d}.json"
    body = unseal(path.read_bytes(), str(path))
    change(body)
    path.write_bytes(seal(body))
    digest = parts_digest(part.read_bytes() for part in sorted(folder.glob("rank-*.json")))
    for manifest in (store / "manifests").glob("*.json"):
        record = unseal(manifest.read_bytes(), str(manifest))
        if save.name in record["groups"]:
            record["groups"][save.name]["parts"] = digest
            manifest.write_bytes(seal(record))


def saves_of(store: Path) -> list[SaveId]:
    """The saves with a manifest, oldest first."""
    return sorted(SaveId.parse(path.stem) for path in (store / "manifests").glob("*.json"))
