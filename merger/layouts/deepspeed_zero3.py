"""Optimizer files of ZeRO-3: parameters cut into ceil(numel / world size) slices, sub-groups of slices laid flat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed.checkpoint import constants
from deepspeed.runtime.zero.config import ZeroStageEnum

from merger.checkpoint import Checkpoint
from merger.layouts.deepspeed_facts import EngineFacts, SubGroupFacts
from merger.layouts.deepspeed_flat import FlatPiece, FlatState, base_optimizer_state, flat_slots, flat_tensor
from merger.stored import Placed, Stored, flat
from merger.tensors import torch_dtype
from store.names import FROZEN, WEIGHTS, Fragment


def zero3_states(facts: EngineFacts, checkpoint: Checkpoint, kept: Sequence[FlatState], rank: int) -> dict[str, Any]:
    """What ``optimizer.state_dict()`` gives on a rank, the loss scaler excepted. kept: by sub-group."""
    masters, states = [], []
    for sub_group, state in zip(facts.sub_groups, kept, strict=True):
        pieces = _pieces(checkpoint, sub_group, rank)
        masters.append(flat_tensor(WEIGHTS, pieces, sub_group.flat_numel, state.masters))
        states.append(flat_slots(state, pieces, sub_group.flat_numel))
    members: list[list[int]] = [[] for _ in facts.param_groups]
    for index, sub_group in enumerate(facts.sub_groups):
        members[sub_group.param_group].append(index)
    return {
        constants.ZERO_STAGE: ZeroStageEnum.weights,
        "dynamic_loss_scale": facts.dynamic_loss_scale,
        "overflow": False,
        constants.PARTITION_COUNT: facts.partition_count,
        constants.OPTIMIZER_STATE_DICT: base_optimizer_state(checkpoint, states, members),
        constants.FP32_FLAT_GROUPS: masters,
    }


def frozen_slices(facts: EngineFacts, checkpoint: Checkpoint, rank: int, fqn: str) -> Stored:
    """A rank's slice of a parameter that the optimizer does not hold, padding included."""
    numel = checkpoint.numel(fqn)
    part = -(-numel // facts.world_size)
    start, count = _slice(part, numel, rank)
    return flat(part, torch_dtype(checkpoint.dtype(fqn, FROZEN)), [Placed(Fragment(fqn, FROZEN, start, count), 0)])


def _pieces(checkpoint: Checkpoint, sub_group: SubGroupFacts, rank: int) -> list[FlatPiece]:
    pieces, offset = [], 0
    for fqn, part in zip(sub_group.params, sub_group.partition_numels, strict=True):
        start, count = _slice(part, checkpoint.numel(fqn), rank)
        if count:
            pieces.append(FlatPiece(fqn, start, offset, count))
        offset += part
    return pieces


def _slice(part: int, numel: int, rank: int) -> tuple[int, int]:
    """(start, count) of a rank's slice, without padding."""
    start = min(rank * part, numel)
    return start, min(part, numel - start)
