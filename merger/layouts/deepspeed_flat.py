"""Flat partitions as both families of ZeRO stages have them, filled piece by piece, and the state of the base
optimizer over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from merger.checkpoint import Checkpoint
from merger.runstate import portable
from merger.stored import Placed, Stored, flat
from merger.tensors import torch_dtype
from store.errors import MergeError
from store.names import Fragment


@dataclass(frozen=True)
class FlatPiece:
    """Elements [start, start + numel) of a flattened parameter are elements from ``offset`` of a flat partition."""

    fqn: str
    start: int
    offset: int
    numel: int


def flat_tensor(
    checkpoint: Checkpoint, slot: str, pieces: Sequence[FlatPiece], numel: int, fallback: torch.dtype = torch.float32
) -> Stored:
    """A flat partition of one slot, 1-d, ``numel`` elements; zeros where no parameter lies.

    fallback: the dtype where a rank has no piece at all.
    """
    dtypes = {checkpoint.dtype(piece.fqn, slot) for piece in pieces}
    if len(dtypes) > 1:
        raise MergeError(f"the parameters of a flat partition have {slot} in several dtypes: {sorted(dtypes)}")
    dtype = torch_dtype(dtypes.pop()) if dtypes else fallback
    return flat(
        numel, dtype, (Placed(Fragment(piece.fqn, slot, piece.start, piece.numel), piece.offset) for piece in pieces)
    )


def flat_slots(checkpoint: Checkpoint, fqns: Sequence[str], pieces: Sequence[FlatPiece], numel: int) -> dict[str, Any]:
    """What the base optimizer keeps for one flat partition: its scalars, then its slots.

    fqns: all parameters laid out in it, over all ranks. MergeError where they differ in what they keep, or
    where a slot that the optimizer had is not stored.
    """
    kept = [(checkpoint.framework_state["scalars"].get(fqn, {}), checkpoint.slots(fqn)) for fqn in fqns]
    scalars, slots = kept[0] if kept else ({}, ())
    for fqn, other in zip(fqns, kept, strict=True):
        if other[1] != slots or not _same(other[0], scalars):
            raise MergeError(
                f"{fqns[0]} and {fqn} share a flat partition but were saved with different optimizer state"
            )
    out: dict[str, Any] = dict(portable(scalars))
    for slot in slots:
        out[slot] = flat_tensor(checkpoint, slot, pieces, numel, torch_dtype(checkpoint.dtype(fqns[0], slot)))
    return out


def base_optimizer_state(
    checkpoint: Checkpoint, states: Sequence[dict[str, Any]], members: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """``state_dict()`` of the base optimizer.

    states: of each flat partition, by index. members: by param group, the indices of its flat partitions.
    """
    groups = checkpoint.framework_state["param_groups"]
    if len(groups) != len(members):
        raise MergeError(f"the run had {len(groups)} param groups, its layout has {len(members)}")
    return {
        "state": {index: state for index, state in enumerate(states) if state},
        "param_groups": [
            {**portable(group["hyper"]), "params": list(indices)}
            for group, indices in zip(groups, members, strict=True)
        ],
    }


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in one
    )
