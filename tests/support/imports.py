"""What an import left in a store, and a store that was begun before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from store.catalog import open_catalog, open_or_create
from store.session import claim_epoch
from store.storage.local import LocalFiles


def saves(target: Path) -> list[str]:
    return [save.name for save in open_catalog(LocalFiles(target)).saves()]


def segments(target: Path) -> list[str]:
    folder = target / "segments"
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def left(target: Path, begun: bool = False) -> list[str]:
    """What a failed import left: anything in a new place, segments and commits in a store that it did not begin."""
    if begun:
        return [*saves(target), *segments(target)]
    return sorted(path.name for path in target.parent.iterdir()) if target.parent.exists() else []


IN_PLACES = pytest.mark.parametrize("begun", [False, True], ids=["new", "a store without a commit"])


def begin(target: Path, begun: bool) -> int:
    """Make the store that the import goes to, if it is to be there. Returns the epochs that it has then."""
    if begun:
        catalog = open_or_create(LocalFiles(target))
        claim_epoch(catalog.files, catalog.store_id)
    return int(begun)


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, torch.Tensor | np.ndarray):
        return type(one) is type(other) and one.dtype == other.dtype and one.tolist() == other.tolist()
    return type(one) is type(other) and bool(one == other)


def payloads(root: Path) -> list[Path]:
    return sorted((root / "segments").rglob("*.safetensors"))
