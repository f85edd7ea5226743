"""The run state that every rank stored with a save: read back as plain values and tensors.

``framework`` is the adapter's and the same on all ranks; ``rng`` and ``user`` are each rank's own. Nothing is
unpickled. It does not know what any framework makes of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from merger.tensors import from_leaf
from store.errors import DamagedError, MergeError, StorageError
from store.files import Files
from store.schema import PartRecord
from store.segments import read_leaves
from store.tree import decode


@dataclass(frozen=True)
class RankState:
    """One rank's run state."""

    framework: Mapping[str, Any]
    rng: Any
    user: Any


def read_run_states(
    files: Files, parts: Mapping[int, PartRecord]
) -> tuple[dict[int, RankState], DamagedError | StorageError | None]:
    """(run state by rank, None), or what is damaged about it."""
    states: dict[int, RankState] = {}
    for rank, part in sorted(parts.items()):
        try:
            tree = decode(part.run_state, read_leaves(files, part), from_leaf)
        except (DamagedError, StorageError) as error:
            return states, error
        if not isinstance(tree, dict) or not isinstance(tree.get("framework"), dict):
            raise MergeError(
                f"save {part.save}, rank {rank}: its run state names no framework state, so no checkpoint can be laid "
                "out from it; it was written by something else than driftpoint's saver"
            )
        states[rank] = RankState(tree["framework"], tree.get("rng"), tree.get("user"))
    return states, None


def portable(value: Any) -> Any:
    """``value`` with numpy's types replaced by torch's and Python's, so that it loads without either of ours.

    Arrays become tensors of their dtype, numpy scalars numbers. Everything that a store can hold is covered.
    """
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {portable(key): portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)([portable(item) for item in value])
    return value
