"""DeepSpeed's own checkpoint directory, at any ZeRO stage and world size.

``engine.load_checkpoint`` of stock DeepSpeed reads it, with nothing of ours installed. What DeepSpeed has no
place for (random-number states, the user's own objects) goes into the client state under ``driftpoint``.
This file writes the directory and the model states; the optimizer files are the stages' own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint import constants
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from merger.checkpoint import SLOT_OF_KIND, Checkpoint
from merger.containers.base import OutFile
from merger.containers.pt import PtFile
from merger.containers.verbatim import Verbatim
from merger.layouts.base import Laid
from merger.layouts.deepspeed_config import ACCUMULATION, MICRO, batch_of
from merger.layouts.deepspeed_facts import EngineFacts, engine_facts
from merger.layouts.deepspeed_retarget import retarget
from merger.layouts.deepspeed_steps import flats, with_common_steps
from merger.layouts.deepspeed_zero3 import frozen_slices, zero3_states
from merger.layouts.deepspeed_zero12 import zero12_states
from merger.layouts.plain import optimizer_state
from merger.runstate import portable
from merger.stored import Stored, whole
from merger.target import Target
from merger.tensors import torch_dtype
from store.errors import MergeError

CLASSES = (ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address)
"""All that occurs in the files besides tensors and plain values; whoever loads them has these."""

CLIENT_KEY = "driftpoint"
"""Where the client state holds what DeepSpeed itself does not save."""

_RECOVERY_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")


class DeepSpeedLayout:
    """The directory of an engine. MergeError where the checkpoint's facts do not describe one."""

    def lay_out(self, checkpoint: Checkpoint, target: Target) -> Laid:
        """See :class:`merger.layouts.base.Layout`."""
        saved = engine_facts(checkpoint.facts)
        facts = _facts_for(saved, checkpoint, target)
        checkpoint, notes = with_common_steps(checkpoint, flats(facts))
        tag = f"global_step{checkpoint.framework_state['counters']['global_steps']}"
        files = (
            *deepspeed_files(facts, checkpoint, tag),
            *(_recovery_scripts() if facts.zero_stage else ()),
            OutFile("latest", Verbatim(tag.encode())),
        )
        load = (f"engine.load_checkpoint({{out!r}}, tag={tag!r})",)
        return Laid(tag, files, load, (*notes, *_notes_on_ranks(saved, facts)))


def _facts_for(saved: EngineFacts, checkpoint: Checkpoint, target: Target) -> EngineFacts:
    """Of the engine that will load the files. One that is as it was saved is laid out as it was found to be."""
    stage = saved.zero_stage if target.zero_stage is None else target.zero_stage
    world_size = target.world_size or saved.world_size
    if (stage, world_size) == (saved.zero_stage, saved.world_size) and saved.has_layout:
        return saved
    return retarget(saved, checkpoint, stage, world_size)


def _notes_on_ranks(saved: EngineFacts, facts: EngineFacts) -> tuple[str, ...]:
    if saved.world_size == facts.world_size:
        return ()
    notes = []
    notes.append(
        f"the run had {saved.world_size} ranks, the files are for {facts.world_size}: random-number states and the "
        f"user's objects are still those of {saved.world_size} ranks, in the client state under {CLIENT_KEY!r}"
    )
    before, after = batch_of(saved.ds_config, saved.world_size), batch_of(facts.ds_config, facts.world_size)
    if before and after and before.train != after.train:
        notes.append(
            f"an optimizer step took {before.train} samples and takes {after.train} with the configuration in the "
            f"files, on {facts.world_size} ranks; set {ACCUMULATION} or {MICRO} of your own configuration if that is "
            "not what you want"
        )
    return tuple(notes)


def deepspeed_files(facts: EngineFacts, checkpoint: Checkpoint, tag: str) -> list[OutFile]:
    """The files of all ranks, in the directory ``tag``."""
    ranks = range(facts.world_size)
    files = []
    for rank in ranks if facts.zero_stage == 3 else ranks[:1]:
        states = _model_states(facts, checkpoint, rank)
        files.append(OutFile(f"{tag}/{_model_file(facts, rank)}", PtFile(states, CLASSES)))
    for rank in ranks if facts.zero_stage else ():
        name = f"{facts.optim_prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        files.append(OutFile(f"{tag}/{name}", PtFile(_optim_states(facts, checkpoint, rank), CLASSES)))
    return files


def _model_file(facts: EngineFacts, rank: int) -> str:
    prefix = f"zero_pp_rank_{rank}_" if facts.zero_stage == 3 else ""
    return f"{prefix}mp_rank_00_model_states.pt"


def _model_states(facts: EngineFacts, checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    state, zero = checkpoint.framework_state, facts.zero_stage
    counters = state["counters"]
    return {
        "module": _module(facts, checkpoint),
        "buffer_names": list(facts.buffer_names),
        "optimizer": None if zero else optimizer_state(checkpoint),
        "param_shapes": _param_shapes(facts, checkpoint) if zero else None,
        # DeepSpeed saves what the optimizer does not hold apart from stage 2 on.
        "frozen_param_shapes": _frozen(checkpoint, facts, lambda fqn: torch.Size(checkpoint.record(fqn).shape))
        if zero > 1
        else None,
        "shared_params": _shared_params(checkpoint) if zero and rank == 0 else {} if zero else None,
        "frozen_param_fragments": _frozen_fragments(facts, checkpoint, rank) if zero > 1 else None,
        "lr_scheduler": portable(state["lr_scheduler"]),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": counters["skipped_steps"],
        "global_steps": counters["global_steps"],
        "global_samples": counters["global_samples"],
        "dp_world_size": facts.world_size,
        "mp_world_size": facts.mp_world_size,
        constants.CHECKPOINT_PARALLEL_DIMS: {
            constants.CHECKPOINT_PP_DEGREE: 1,
            constants.CHECKPOINT_TP_DEGREE: facts.mp_world_size,
        },
        "ds_config": facts.ds_config,
        "ds_version": facts.ds_version,
        CLIENT_KEY: _client_state(facts, checkpoint, rank),
    }


def _optim_states(facts: EngineFacts, checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    states = (zero3_states if facts.zero_stage == 3 else zero12_states)(facts, checkpoint, rank)
    scaler = (
        None
        if facts.is_bf16_optimizer
        else {constants.LOSS_SCALER: _loss_scaler(checkpoint.framework_state, facts.dtype)}
    )
    return {
        constants.OPTIMIZER_STATE_DICT: {**(scaler or {}), **states},
        "ds_config": facts.ds_config,
        "ds_version": facts.ds_version,
    }


def _module(facts: EngineFacts, checkpoint: Checkpoint) -> OrderedDict[str, Stored | torch.Tensor]:
    canonical = {alias: fqn for fqn, record in checkpoint.tensors.items() for alias in record.aliases}
    found: dict[str, Stored | torch.Tensor] = {}
    out: OrderedDict[str, Stored | torch.Tensor] = OrderedDict()
    for name in facts.state_dict_names:
        fqn = canonical.get(name, name)
        if fqn not in found:
            found[fqn] = _working_copy(facts, checkpoint, fqn)
        out[name] = found[fqn]
    return out


def _working_copy(facts: EngineFacts, checkpoint: Checkpoint, fqn: str) -> Stored | torch.Tensor:
    record = checkpoint.record(fqn)
    dtype = torch_dtype(record.dtype)
    if facts.zero_stage == 3 and record.kind != "buffer":
        return torch.empty(0, dtype=dtype)  # the truth is in the optimizer files
    # A working weight is its fp32 master cast to the working dtype, bit for bit: it is not stored twice.
    return whole(checkpoint, fqn, SLOT_OF_KIND[record.kind], dtype)


def _param_shapes(facts: EngineFacts, checkpoint: Checkpoint) -> list[OrderedDict[str, torch.Size]]:
    if facts.zero_stage == 3:
        groups = [sub_group.params for sub_group in facts.sub_groups]
    else:
        groups = [tuple(placed.fqn for placed in group.layout) for group in facts.param_groups]
    return [OrderedDict((fqn, torch.Size(checkpoint.tensors[fqn].shape)) for fqn in group) for group in groups]


def _frozen(checkpoint: Checkpoint, facts: EngineFacts, value: Callable[[str], Any]) -> OrderedDict[str, Any]:
    """What the optimizer does not hold: frozen parameters, and those without elements."""
    frozen = set(facts.frozen)
    return OrderedDict(
        (fqn, value(fqn))
        for fqn, record in checkpoint.tensors.items()
        if record.kind != "buffer" and (fqn in frozen or 0 in record.shape)
    )


def _frozen_fragments(facts: EngineFacts, checkpoint: Checkpoint, rank: int) -> OrderedDict[str, Any]:
    def value(fqn: str) -> Stored | torch.Tensor:
        if facts.zero_stage == 3:
            return frozen_slices(facts, checkpoint, rank, fqn)
        return _working_copy(facts, checkpoint, fqn)

    return _frozen(checkpoint, facts, value)


def _shared_params(checkpoint: Checkpoint) -> dict[str, str]:
    return {
        alias: fqn for fqn, record in checkpoint.tensors.items() if record.kind != "buffer" for alias in record.aliases
    }


def _loss_scaler(state: Mapping[str, Any], dtype: str) -> LossScaler | DynamicLossScaler:
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


def _client_state(facts: EngineFacts, checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    """By rank that was saved: ``rng`` and ``user``.

    Where each rank has a file, it holds the ranks that leave the same remainder: the own one if there are as many
    as there were, and none is lost or written twice if not.
    """
    ranks = {
        other: state
        for other, state in checkpoint.run_states.items()
        if facts.zero_stage != 3 or other % facts.world_size == rank
    }
    return {
        "save": checkpoint.certificate.save,
        "ranks": {
            other: {"rng": portable(state.rng), "user": portable(state.user)} for other, state in sorted(ranks.items())
        },
    }


def _recovery_scripts() -> list[OutFile]:
    """DeepSpeed puts these beside its checkpoints: they make a plain state dict of them."""
    source = Path(deepspeed.__file__).parent / "utils"
    scripts = [source / name for name in _RECOVERY_SCRIPTS]
    return [OutFile(path.name, Verbatim(path.read_bytes()), 0o755) for path in scripts if path.exists()]
