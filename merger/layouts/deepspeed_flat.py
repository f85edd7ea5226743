"""Flat partitions as both families of ZeRO stages have them, filled piece by piece, and the state of the base
optimizer over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from merger.checkpoint import Checkpoint
from merger.layouts.deepspeed_steps import has_state, same_value
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


def flat_tensor(slot: str, pieces: Sequence[FlatPiece], numel: int, dtype: torch.dtype) -> Stored:
    """A flat partition of one slot, 1-d, ``numel`` elements; zeros where no parameter lies."""
    return flat(
        numel, dtype, (Placed(Fragment(piece.fqn, slot, piece.start, piece.numel), piece.offset) for piece in pieces)
    )


def flat_slots(checkpoint: Checkpoint, fqns: Sequence[str], pieces: Sequence[FlatPiece], numel: int) -> dict[str, Any]:
    """What the base optimizer keeps for one flat partition: its scalars, then its slots.

    fqns: all parameters laid out in it, over all ranks; those that the optimizer kept nothing for get zeros.
    MergeError where the others differ in what they keep, or where a slot that the optimizer had is not stored.
    """
    known = [fqn for fqn in fqns if has_state(checkpoint, fqn)]
    kept = [(checkpoint.framework_state["scalars"].get(fqn, {}), checkpoint.slots(fqn)) for fqn in known]
    scalars, slots = kept[0] if kept else ({}, ())
    for fqn, other in zip(known, kept, strict=True):
        if other[1] != slots or not _same(other[0], scalars):
            raise MergeError(
                f"{known[0]} and {fqn} share a flat partition but were saved with different optimizer state"
            )
    out: dict[str, Any] = dict(portable(scalars))
    filled = set(known)
    stored = [piece for piece in pieces if piece.fqn in filled]
    for slot in slots:
        out[slot] = flat_tensor(slot, stored, numel, flat_dtype(checkpoint, slot, known))
    return out


def flat_dtype(checkpoint: Checkpoint, slot: str, fqns: Sequence[str]) -> torch.dtype:
    """The dtype of a slot of all these parameters. MergeError where they were stored in several."""
    dtypes = {checkpoint.dtype(fqn, slot) for fqn in fqns}
    if len(dtypes) > 1:
        raise MergeError(f"the parameters of a flat partition have {slot} in several dtypes: {sorted(dtypes)}")
    return torch_dtype(dtypes.pop()) if dtypes else torch.float32


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
    return one is other or (one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one))
