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
from store.names import WEIGHTS, Fragment


@dataclass(frozen=True)
class FlatPiece:
    """Elements [start, start + numel) of a flattened parameter are elements from ``offset`` of a flat partition."""

    fqn: str
    start: int
    offset: int
    numel: int


@dataclass(frozen=True)
class FlatState:
    """What the base optimizer keeps for one flat partition, the same on all ranks.

    masters: dtype of the master weights. scalars: of all parameters in it. slots: with their dtypes. known: the
    parameters that the optimizer kept something for; the others get zeros.
    """

    masters: torch.dtype
    scalars: dict[str, Any]
    slots: dict[str, torch.dtype]
    known: frozenset[str]


def flat_state(checkpoint: Checkpoint, fqns: Sequence[str]) -> FlatState:
    """Of the flat partition that these parameters share.

    MergeError where those with state differ in what they keep or in its dtype, or where a slot that the optimizer had
    is not stored.
    """
    known = [fqn for fqn in fqns if has_state(checkpoint, fqn)]
    kept = [(checkpoint.framework_state["scalars"].get(fqn, {}), checkpoint.slots(fqn)) for fqn in known]
    scalars, slots = kept[0] if kept else ({}, ())
    for fqn, other in zip(known, kept, strict=True):
        if other[1] != slots or not _same(other[0], scalars):
            raise MergeError(
                f"{known[0]} and {fqn} share a flat partition but were saved with different optimizer state"
            )
    dtypes = {slot: _flat_dtype(checkpoint, slot, known) for slot in slots}
    return FlatState(_flat_dtype(checkpoint, WEIGHTS, fqns), dict(scalars), dtypes, frozenset(known))


def flat_tensor(slot: str, pieces: Sequence[FlatPiece], numel: int, dtype: torch.dtype) -> Stored:
    """A flat partition of one slot, 1-d, ``numel`` elements; zeros where no parameter lies."""
    return flat(
        numel, dtype, (Placed(Fragment(piece.fqn, slot, piece.start, piece.numel), piece.offset) for piece in pieces)
    )


def flat_slots(state: FlatState, pieces: Sequence[FlatPiece], numel: int) -> dict[str, Any]:
    """The base optimizer's state of one rank's flat partition: its scalars, then its slots."""
    out: dict[str, Any] = dict(portable(state.scalars))
    stored = [piece for piece in pieces if piece.fqn in state.known]
    for slot, dtype in state.slots.items():
        out[slot] = flat_tensor(slot, stored, numel, dtype)
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


def _flat_dtype(checkpoint: Checkpoint, slot: str, fqns: Sequence[str]) -> torch.dtype:
    dtypes = {checkpoint.dtype(fqn, slot) for fqn in fqns}
    if len(dtypes) > 1:
        raise MergeError(f"the parameters of a flat partition have {slot} in several dtypes: {sorted(dtypes)}")
    return torch_dtype(dtypes.pop()) if dtypes else torch.float32


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one is other or (one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one))
