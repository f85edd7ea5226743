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
from store.errors import DamagedError, MergeError, StorageError, UnreachableError
from store.files import Files
from store.schema import PartRecord
from store.segments import read_leaves
from store.tree import decode


@dataclass(frozen=True)
class RankState:
    """What is one rank's own: its random-number generators and the user's objects."""

    rng: Any
    user: Any


@dataclass(frozen=True)
class RunStates:
    """The run state of a save. framework: the adapter's. ranks: by rank. client_state: of an imported checkpoint."""

    framework: Mapping[str, Any]
    ranks: Mapping[int, RankState]
    client_state: Mapping[str, Any]


def read_run_states(
    files: Files, parts: Mapping[int, PartRecord]
) -> tuple[RunStates | None, DamagedError | StorageError | None]:
    """(run state, None), or (None, what is damaged about it)."""
    trees: dict[int, dict[str, Any]] = {}
    for rank, part in sorted(parts.items()):
        try:
            trees[rank] = decode(_wanted(part, rank), read_leaves(files, part), from_leaf)
        except UnreachableError:
            raise
        except (DamagedError, StorageError) as error:
            return None, error
    framework = trees[0].get("framework")
    if not isinstance(framework, dict):
        raise MergeError(
            f"save {parts[0].save}: its run state names no framework state, so no checkpoint can be laid out from it; "
            "it was written by something else than driftpoint's saver"
        )
    ranks = {rank: RankState(tree.get("rng"), tree.get("user")) for rank, tree in trees.items()}
    return RunStates(framework, ranks, trees[0].get("client_state") or {}), None


def _wanted(part: PartRecord, rank: int) -> dict[str, Any]:
    """A part's run state without the framework's, which is the same on all ranks and large, but on rank 0."""
    tree = part.run_state if isinstance(part.run_state, dict) else {}
    return {key: value for key, value in tree.items() if rank == 0 or key != "framework"}


def portable(value: Any) -> Any:
    """``value`` with numpy's types replaced by torch's and Python's, so that it loads without either of ours.

    Arrays become tensors of their dtype, numpy scalars numbers. Everything that a store can hold is covered.
    """
    if type(value) in (int, float, str, bool, type(None)):
        return value  # by far the most: a generator's state alone is hundreds of numbers
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {portable(key): portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)([portable(item) for item in value])
    return value
