"""DeepSpeed directory: ZeRO-1/2 and ZeRO-3 optimizer files.

DeepSpeed's loss scalers: objects in its optimizer files, plain values in a run state.

Optimizer files of ZeRO-1/2, and of the wrapper ``BF16_Optimizer``: one flat tensor per param group, cut evenly.

DeepSpeed's own checkpoint directory, at any ZeRO stage and world size.

``engine.load_checkpoint`` of stock DeepSpeed reads it, with nothing of ours installed. What DeepSpeed has no
place for (random-number states, the user's own objects) goes into the client state under ``driftpoint``.
This file writes the directory and the model states; the optimizer files are the stages' own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed.checkpoint import constants
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from merger.checkpoint import Checkpoint
from merger.io.output_file import OutFile, Verbatim
from merger.layouts.base import LayoutResult, Target
from merger.layouts.deepspeed_facts import (
    ACCUMULATION,
    MICRO,
    EngineFacts,
    GroupFacts,
    PlacedParameter,
    batch_of,
    facts_of,
)
from merger.layouts.deepspeed_model import (
    CLIENT_KEY,
    FlatPiece,
    FlatState,
    base_optimizer_state,
    flat_slots,
    flat_state,
    flat_tensor,
    model_states,
    zero3_states,
)
from merger.layouts.deepspeed_reshard import flats, retarget, with_common_steps
from merger.writers.torch_zip import PtFile
from store.errors import MergeError
from store.names import WEIGHTS
from store.text import counted

CLASSES = (ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address)
"""All that occurs in the files besides tensors and plain values; whoever loads them has these."""

_RECOVERY_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")


def loss_scaler(state: Mapping[str, Any], dtype: str) -> LossScaler | DynamicLossScaler:
    """The scaler as it was. MergeError for one that DeepSpeed's files cannot hold.

    dtype: ``bf16``, ``fp16`` or ``fp32``.
    """
    saved = state["loss_scaler"]
    if saved is None and dtype != "fp16":
        return LossScaler(scale=1.0)  # where the engine that was saved had none, and one is asked for
    kind = None if saved is None else saved["class"]
    plain = {} if saved is None else {key: value for key, value in saved.items() if key != "class"}
    if kind == "LossScaler":
        scaler = LossScaler(scale=plain["cur_scale"])
    elif kind == "DynamicLossScaler":
        scaler = DynamicLossScaler(
            plain["cur_scale"],
            plain["scale_window"],
            plain["min_scale"],
            plain["delayed_shift"],
            plain["consecutive_hysteresis"],
        )
    else:
        raise MergeError(f"the run used the loss scaler {kind!r}; DeepSpeed's files can hold its own two only")
    vars(scaler).update(plain)
    return scaler


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


class DeepSpeedLayout:
    """The directory of an engine. MergeError where the checkpoint's facts do not describe one."""

    def lay_out(self, checkpoint: Checkpoint, target: Target) -> LayoutResult:
        saved = facts_of(checkpoint)
        facts = _facts_for(saved, checkpoint, target)
        checkpoint, notes = with_common_steps(checkpoint, flats(facts))
        tag = f"global_step{checkpoint.framework_state['counters']['global_steps']}"
        files = (
            *deepspeed_files(facts, checkpoint, tag),
            *(_recovery_scripts() if facts.zero_stage else ()),
            OutFile("latest", Verbatim(tag.encode())),
        )
        load = (f"engine.load_checkpoint({{out!r}}, tag={tag!r})",)
        notes = (*notes, *_notes_on_ranks(saved, facts), *_notes_on_loading(facts))
        return LayoutResult(tag, files, load, notes, checkpoint.certificate)


def _facts_for(saved: EngineFacts, checkpoint: Checkpoint, target: Target) -> EngineFacts:
    """Of the engine that will load the files. One that is as it was saved is laid out as it was found to be."""
    stage = saved.zero_stage if target.zero_stage is None else target.zero_stage
    world_size = target.world_size or saved.world_size
    if (stage, world_size) == (saved.zero_stage, saved.world_size) and saved.has_layout:
        return saved
    return retarget(saved, checkpoint, stage, world_size)


def _notes_on_loading(facts: EngineFacts) -> tuple[str, ...]:
    section = facts.ds_config.get("checkpoint") if isinstance(facts.ds_config, Mapping) else None
    if not isinstance(section, Mapping) or not section.get("load_universal"):
        return ()
    note = (
        "the run's configuration loads universal checkpoints, and these are DeepSpeed's own: set load_universal to "
        "false, or write layout 'universal'"
    )
    return (note,)


def _notes_on_ranks(saved: EngineFacts, facts: EngineFacts) -> tuple[str, ...]:
    if saved.world_size == facts.world_size:
        return ()
    notes = []
    notes.append(
        f"the run had {counted(saved.world_size, 'rank')}, the files are for {facts.world_size}: random-number states "
        f"and the user's objects are still those of {counted(saved.world_size, 'rank')}, in the client state under "
        f"{CLIENT_KEY!r}"
    )
    before, after = batch_of(saved.ds_config, saved.world_size), batch_of(facts.ds_config, facts.world_size)
    if before and after and before.train != after.train:
        notes.append(
            f"an optimizer step took {counted(before.train, 'sample')} and takes {after.train} with the "
            f"configuration in the files, on {counted(facts.world_size, 'rank')}; set {ACCUMULATION} or {MICRO} of "
            "your own configuration if that is not what you want"
        )
    return tuple(notes)


def deepspeed_files(facts: EngineFacts, checkpoint: Checkpoint, tag: str) -> list[OutFile]:
    """The files of all ranks, in the directory ``tag``."""
    ranks = range(facts.world_size)
    files = []
    for rank in ranks if facts.zero_stage == 3 else ranks[:1]:
        states = model_states(facts, checkpoint, rank)
        files.append(OutFile(f"{tag}/{_model_file(facts, rank)}", PtFile(states, CLASSES)))
    kept = [flat_state(checkpoint, fqns) for _, fqns in flats(facts)]
    for rank in ranks if facts.zero_stage else ():
        name = f"{facts.optim_prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        files.append(OutFile(f"{tag}/{name}", PtFile(_optim_states(facts, checkpoint, kept, rank), CLASSES)))
    return files


def _model_file(facts: EngineFacts, rank: int) -> str:
    prefix = f"zero_pp_rank_{rank}_" if facts.zero_stage == 3 else ""
    return f"{prefix}mp_rank_00_model_states.pt"


def _optim_states(facts: EngineFacts, checkpoint: Checkpoint, kept: Sequence[FlatState], rank: int) -> dict[str, Any]:
    states = (zero3_states if facts.zero_stage == 3 else zero12_states)(facts, checkpoint, kept, rank)
    if not facts.is_bf16_optimizer:
        states = {constants.LOSS_SCALER: loss_scaler(checkpoint.framework_state, facts.dtype), **states}
    return {
        constants.OPTIMIZER_STATE_DICT: states,
        "ds_config": facts.ds_config,
        "ds_version": facts.ds_version,
    }


def _recovery_scripts() -> list[OutFile]:
    """DeepSpeed puts these beside its checkpoints: they make a plain state dict of them."""
    source = Path(deepspeed.__file__).parent / "utils"
    scripts = [source / name for name in _RECOVERY_SCRIPTS]
    return [OutFile(path.name, Verbatim(path.read_bytes()), 0o755) for path in scripts if path.exists()]
