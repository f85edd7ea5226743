"""Flat partitions as both families of ZeRO stages have them, filled piece by piece, and the state of the base
optimizer over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from merger.plan import MergePlan
from merger.read import Reader
from merger.runstate import portable
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
    reader: Reader, slot: str, pieces: Sequence[FlatPiece], numel: int, fallback: torch.dtype = torch.float32
) -> torch.Tensor:
    """A flat partition of one slot, 1-d, ``numel`` elements; zeros where no parameter lies.

    fallback: the dtype where a rank has no piece at all.
    """
    dtypes = {reader.dtype(piece.fqn, slot) for piece in pieces}
    if len(dtypes) > 1:
        raise MergeError(
            f"the parameters of a flat partition have {slot} in several dtypes: {sorted(map(str, dtypes))}"
        )
    out = torch.empty(numel, dtype=dtypes.pop() if dtypes else fallback)
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        out[end : piece.offset] = 0
        end = piece.offset + piece.numel
        reader.fill(Fragment(piece.fqn, slot, piece.start, piece.numel), out[piece.offset : end])
    out[end:] = 0
    return out


def flat_slots(
    plan: MergePlan, reader: Reader, fqns: Sequence[str], pieces: Sequence[FlatPiece], numel: int
) -> dict[str, Any]:
    """What the base optimizer keeps for one flat partition: its scalars, then its slots.

    fqns: all parameters laid out in it, over all ranks. MergeError where they differ in what they keep, or
    where a slot that the optimizer had is not stored.
    """
    state = plan.framework_state
    kept = [(state["scalars"].get(fqn, {}), list(state["slots"].get(fqn, ()))) for fqn in fqns]
    scalars, slots = kept[0] if kept else ({}, [])
    for fqn, other in zip(fqns, kept, strict=True):
        if other[1] != slots or not _same(other[0], scalars):
            raise MergeError(
                f"{fqns[0]} and {fqn} share a flat partition but were saved with different optimizer state"
            )
    out: dict[str, Any] = dict(portable(scalars))
    for slot in slots:
        missing = [fqn for fqn in fqns if not reader.has(fqn, slot)]
        if missing:
            raise MergeError(
                f"the optimizer had {slot} of {missing[0]}, which commit {plan.save} does not hold; name a save that "
                "does (a full one)"
            )
        dtype = reader.dtype(fqns[0], slot)
        out[slot] = flat_tensor(reader, slot, pieces, numel, dtype)
    return out


def base_optimizer_state(
    plan: MergePlan, states: Sequence[dict[str, Any]], members: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """``state_dict()`` of the base optimizer.

    states: of each flat partition, by index. members: by param group, the indices of its flat partitions.
    """
    groups = plan.framework_state["param_groups"]
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
