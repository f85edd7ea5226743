"""Optimizer files of ZeRO-1/2, and of the wrapper ``BF16_Optimizer``: one flat tensor per param group, cut evenly."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from deepspeed.checkpoint import constants
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from merger.checkpoint import Checkpoint
from merger.layouts.deepspeed_facts import EngineFacts, GroupFacts, PlacedParameter
from merger.layouts.deepspeed_flat import FlatPiece, FlatState, base_optimizer_state, flat_slots, flat_tensor
from store.names import WEIGHTS


def zero12_states(facts: EngineFacts, checkpoint: Checkpoint, kept: Sequence[FlatState], rank: int) -> dict[str, Any]:
    """What ``optimizer.state_dict()`` gives on a rank, the loss scaler excepted. kept: by param group."""
    groups = facts.param_groups
    masters, states = [], []
    for group, state in zip(groups, kept, strict=True):
        pieces = _pieces(group, rank)
        lean = group.partition_size - (0 if facts.is_bf16_optimizer else group.group_paddings[rank])
        # DeepSpeed strips the padding behind the masters, and leaves it behind the moments.
        masters.append(flat_tensor(WEIGHTS, pieces, lean, state.masters))
        states.append(flat_slots(state, pieces, group.partition_size))
    out: dict[str, Any] = {
        constants.CLIP_GRAD: facts.clip_grad,
        constants.BASE_OPTIMIZER_STATE: base_optimizer_state(checkpoint, states, [[i] for i in range(len(groups))]),
        constants.SINGLE_PARTITION_OF_FP32_GROUPS: masters,
        constants.GROUP_PADDINGS: [_group_padding(facts, group, rank) for group in groups],
        constants.PARTITION_COUNT: list(facts.partition_count) if isinstance(facts.partition_count, tuple) else None,
        constants.DS_VERSION: facts.ds_version,
        constants.PARAM_SLICE_MAPPINGS: [_slice_mapping(facts, i, rank) for i in range(len(groups))],
    }
    return out if facts.is_bf16_optimizer else {**out, **_of_zero(facts)}


def _of_zero(facts: EngineFacts) -> dict[str, Any]:
    return {
        "dynamic_loss_scale": facts.dynamic_loss_scale,
        "overflow": False,
        constants.ZERO_STAGE: ZeroStageEnum(facts.zero_stage),
        constants.PARAM_ALIGNMENT_PADDINGS: [list(group) for group in facts.param_alignment_paddings],
    }


def _group_padding(facts: EngineFacts, group: GroupFacts, rank: int) -> int:
    """What DeepSpeed writes down as a rank's padding; ``BF16_Optimizer`` counts all of a group's as the last rank's."""
    if not facts.is_bf16_optimizer:
        return group.group_paddings[rank]
    return sum(group.group_paddings) if rank == facts.world_size - 1 else 0


def _pieces(group: GroupFacts, rank: int) -> list[FlatPiece]:
    """What of each parameter lies in a rank's partition."""
    first = rank * group.partition_size
    pieces = []
    for placed in group.layout:
        start, stop = max(placed.offset, first), min(placed.offset + placed.numel, first + group.partition_size)
        if start < stop:
            pieces.append(FlatPiece(placed.fqn, start - placed.offset, start - first, stop - start))
    return pieces


def _slice_mapping(facts: EngineFacts, index: int, rank: int) -> OrderedDict[str, fragment_address]:
    group = facts.param_groups[index]
    mapped = group.model_copy(update={"layout": _as_deepspeed_maps(facts, index)})
    return OrderedDict(
        (piece.fqn, fragment_address(numel=piece.numel, start=piece.offset)) for piece in _pieces(mapped, rank)
    )


def _as_deepspeed_maps(facts: EngineFacts, index: int) -> tuple[PlacedParameter, ...]:
    """Places as DeepSpeed writes them into ``param_slice_mappings``, in the order of the param group.

    With ``round_robin_gradients`` and no paddings these are not where the data is: DeepSpeed computes them as
    if the group's order were the data's. Native loading does not use them; they are written as it writes them.
    """
    group = facts.param_groups[index]
    place = {placed.fqn: placed for placed in group.layout}
    paddings = facts.param_alignment_paddings[index] if facts.param_alignment_paddings else ()
    if any(paddings) or not facts.round_robin_gradients:
        return tuple(place[fqn] for fqn in group.params)
    out, offset = [], 0
    for fqn in group.params:
        out.append(PlacedParameter(fqn=fqn, offset=offset, numel=place[fqn].numel))
        offset += place[fqn].numel
    return tuple(out)
