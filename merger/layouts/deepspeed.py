"""DeepSpeed's own checkpoint directory, at any ZeRO stage and world size.

``engine.load_checkpoint`` of stock DeepSpeed reads it, with nothing of ours installed. What DeepSpeed has no
place for (random-number states, the user's own objects) goes into the client state under ``driftpoint``.
This file writes the directory and the model states; the optimizer files are the stages' own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed.checkpoint import constants
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from merger.checkpoint import Checkpoint
from merger.containers.base import OutFile
from merger.containers.pt import PtFile
from merger.containers.verbatim import Verbatim
from merger.layouts.base import Laid
from merger.layouts.deepspeed_config import ACCUMULATION, MICRO, batch_of
from merger.layouts.deepspeed_facts import EngineFacts, facts_of
from merger.layouts.deepspeed_flat import FlatState, flat_state
from merger.layouts.deepspeed_model import CLIENT_KEY, model_states
from merger.layouts.deepspeed_retarget import retarget
from merger.layouts.deepspeed_scaler import loss_scaler
from merger.layouts.deepspeed_steps import flats, with_common_steps
from merger.layouts.deepspeed_zero3 import zero3_states
from merger.layouts.deepspeed_zero12 import zero12_states
from merger.target import Target
from store.text import counted

CLASSES = (ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address)
"""All that occurs in the files besides tensors and plain values; whoever loads them has these."""

_RECOVERY_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")


class DeepSpeedLayout:
    """The directory of an engine. MergeError where the checkpoint's facts do not describe one."""

    def lay_out(self, checkpoint: Checkpoint, target: Target) -> Laid:
        """See :class:`merger.layouts.base.Layout`."""
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
        return Laid(tag, files, load, notes, checkpoint.certificate)


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
