"""Jobs with a memory tier, and what is left of them when they are killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from store.catalog import Catalog, open_catalog
from store.memory.layout import Tier
from store.storage.local import LocalFiles
from tests.support.internals import abandon, wait_for_snapshot
from tests.support.jobs import Job


def memory(store: Path, **more: Any) -> dict[str, Any]:
    """Settings of a memory tier beside the store."""
    base = store.parent / "shm"
    base.mkdir(exist_ok=True)
    return {"enabled": True, "every": 1, "path": str(base), **more}


def catalog_of(store: Path) -> Catalog:
    """Nothing of it cached."""
    return open_catalog(LocalFiles(store))


def tier_of(store: Path) -> Tier:
    """The store's memory."""
    return Tier(store.parent / "shm", catalog_of(store).store_id)


def settled(one: Job) -> None:
    """Wait until the pending snapshot is sealed."""
    wait_for_snapshot(one.ckpt)


def kept_step(one: Job) -> None:
    """Take a step and wait until its snapshot is sealed."""
    one.step()
    settled(one)


def abandoned(one: Job) -> None:
    """Leave behind what a killed process leaves."""
    abandon(one.ckpt)
