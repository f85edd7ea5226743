"""Jobs with a memory tier, and what is left of them when they are killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from store.catalog import Catalog, open_catalog
from store.memory.layout import Tier
from store.storage.local import LocalFiles
from tests.support.jobs import Job, tracer_of


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


def kept_step(one: Job) -> None:
    """A step, and the version of it is whole."""
    one.step()
    tier = one.ckpt._memory
    assert tier is not None and tier._writer.join(180)


def abandoned(one: Job) -> None:
    """As a process leaves it that is killed: nothing is told to anybody."""
    one.ckpt._closed = True
    one.ckpt._unregister_exit()
    one.ckpt.flush()
    assert one.ckpt._memory is not None
    one.ckpt._memory._writer.stop()
    arena = one.ckpt._memory._buffers.arena
    assert arena is not None
    arena.close(remove=False)
    one.ckpt._saver._session.release()  # type: ignore[union-attr]
    tracer_of(one.ckpt).close(1.0)
