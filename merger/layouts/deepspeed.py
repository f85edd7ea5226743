"""DeepSpeed's own checkpoint directory, at the stage and world size of the run that wrote the store.

``engine.load_checkpoint`` of stock DeepSpeed reads it, with nothing of ours installed. What DeepSpeed has no
place for (random-number states, the user's own objects) goes into the client state under ``driftpoint``.
This file writes the directory and the model states; the optimizer files are the stages' own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint import constants
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from merger.layouts.base import Written
from merger.layouts.deepspeed_facts import EngineFacts, engine_facts
from merger.layouts.deepspeed_zero3 import frozen_slices, zero3_states
from merger.layouts.deepspeed_zero12 import zero12_states
from merger.layouts.plain import optimizer_state
from merger.output import write_durably
from merger.plan import SLOT_OF_KIND, MergePlan
from merger.ptfile import write_pt
from merger.read import Reader
from merger.runstate import portable
from merger.tensors import torch_dtype
from store.errors import MergeError

CLASSES = (ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address)
"""All that occurs in the files besides tensors and plain values; whoever loads them has these."""

CLIENT_KEY = "driftpoint"
"""Where the client state holds what DeepSpeed itself does not save."""

_RECOVERY_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")


class DeepSpeedLayout:
    """The layout of one plan. MergeError where the plan's facts do not describe an engine."""

    def __init__(self, plan: MergePlan) -> None:
        self.facts = engine_facts(plan.facts)

    def write(self, plan: MergePlan, reader: Reader, folder: Path) -> Written:
        """See :class:`merger.layouts.base.Layout`. Peak memory: the larger of a rank's two files."""
        facts, state = self.facts, plan.framework_state
        tag = f"global_step{state['counters']['global_steps']}"
        (folder / tag).mkdir()
        ranks = range(facts.world_size)
        total = 0
        for rank in ranks if facts.zero_stage == 3 else ranks[:1]:
            make = partial(_model_states, facts, plan, reader, rank)
            total += write_pt(folder / tag / _model_file(facts, rank), make, CLASSES)
        for rank in ranks if facts.zero_stage else ():
            name = f"{facts.optim_prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            total += write_pt(folder / tag / name, partial(_optim_states, facts, plan, reader, rank), CLASSES)
        if facts.zero_stage:
            total += _copy_recovery_scripts(folder)
        return Written(tag, total + write_durably(folder / "latest", tag.encode()))


def _model_file(facts: EngineFacts, rank: int) -> str:
    prefix = f"zero_pp_rank_{rank}_" if facts.zero_stage == 3 else ""
    return f"{prefix}mp_rank_00_model_states.pt"


def _model_states(facts: EngineFacts, plan: MergePlan, reader: Reader, rank: int) -> dict[str, Any]:
    state, zero = plan.framework_state, facts.zero_stage
    counters = state["counters"]
    return {
        "module": _module(facts, plan, reader),
        "buffer_names": list(facts.buffer_names),
        "optimizer": None if zero else optimizer_state(plan, reader),
        "param_shapes": _param_shapes(facts, plan) if zero else None,
        # DeepSpeed saves what the optimizer does not hold apart from stage 2 on.
        "frozen_param_shapes": _frozen(plan, facts, lambda fqn: torch.Size(reader.shape(fqn))) if zero > 1 else None,
        "shared_params": _shared_params(plan) if zero and rank == 0 else {} if zero else None,
        "frozen_param_fragments": _frozen_fragments(facts, plan, reader, rank) if zero > 1 else None,
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
        CLIENT_KEY: _client_state(facts, plan, rank),
    }


def _optim_states(facts: EngineFacts, plan: MergePlan, reader: Reader, rank: int) -> dict[str, Any]:
    if facts.zero_stage == 3:
        states = zero3_states(facts, plan, reader, rank)
    else:
        states = zero12_states(facts, plan, reader, rank)
    scaler = None if facts.is_bf16_optimizer else {constants.LOSS_SCALER: _loss_scaler(plan.framework_state)}
    return {
        constants.OPTIMIZER_STATE_DICT: {**(scaler or {}), **states},
        "ds_config": facts.ds_config,
        "ds_version": facts.ds_version,
    }


def _module(facts: EngineFacts, plan: MergePlan, reader: Reader) -> OrderedDict[str, torch.Tensor]:
    canonical = {alias: fqn for fqn, record in plan.tensors.items() for alias in record.aliases}
    found: dict[str, torch.Tensor] = {}
    out: OrderedDict[str, torch.Tensor] = OrderedDict()
    for name in facts.state_dict_names:
        fqn = canonical.get(name, name)
        if fqn not in found:
            found[fqn] = _working_copy(facts, plan, reader, fqn)
        out[name] = found[fqn]
    return out


def _working_copy(facts: EngineFacts, plan: MergePlan, reader: Reader, fqn: str) -> torch.Tensor:
    reader.shape(fqn)
    record = plan.tensors[fqn]
    dtype = torch_dtype(record.dtype)
    if facts.zero_stage == 3 and record.kind != "buffer":
        return torch.empty(0, dtype=dtype)  # the truth is in the optimizer files
    # A working weight is its fp32 master cast to the working dtype, bit for bit: it is not stored twice.
    return reader.tensor(fqn, SLOT_OF_KIND[record.kind]).to(dtype)


def _param_shapes(facts: EngineFacts, plan: MergePlan) -> list[OrderedDict[str, torch.Size]]:
    if facts.zero_stage == 3:
        groups = [sub_group.params for sub_group in facts.sub_groups]
    else:
        groups = [tuple(placed.fqn for placed in group.layout) for group in facts.param_groups]
    return [OrderedDict((fqn, torch.Size(plan.tensors[fqn].shape)) for fqn in group) for group in groups]


def _frozen(plan: MergePlan, facts: EngineFacts, value: Callable[[str], Any]) -> OrderedDict[str, Any]:
    """What the optimizer does not hold: frozen parameters, and those without elements."""
    frozen = set(facts.frozen)
    return OrderedDict(
        (fqn, value(fqn))
        for fqn, record in plan.tensors.items()
        if record.kind != "buffer" and (fqn in frozen or 0 in record.shape)
    )


def _frozen_fragments(facts: EngineFacts, plan: MergePlan, reader: Reader, rank: int) -> OrderedDict[str, Any]:
    def value(fqn: str) -> torch.Tensor:
        if facts.zero_stage == 3:
            return frozen_slices(facts, plan, reader, rank, fqn)
        return _working_copy(facts, plan, reader, fqn)

    return _frozen(plan, facts, value)


def _shared_params(plan: MergePlan) -> dict[str, str]:
    return {alias: fqn for fqn, record in plan.tensors.items() if record.kind != "buffer" for alias in record.aliases}


def _loss_scaler(state: Mapping[str, Any]) -> LossScaler | DynamicLossScaler:
    saved = state["loss_scaler"]
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


def _client_state(facts: EngineFacts, plan: MergePlan, rank: int) -> dict[str, Any]:
    """By rank: ``rng`` and ``user``. A ZeRO-3 file holds its own rank's, the one file of other stages all ranks'."""
    ranks = plan.run_states if facts.zero_stage != 3 else {rank: plan.run_states[rank]}
    return {
        "save": plan.save.name,
        "ranks": {
            other: {"rng": portable(state.rng), "user": portable(state.user)} for other, state in sorted(ranks.items())
        },
    }


def _copy_recovery_scripts(folder: Path) -> int:
    """DeepSpeed puts these beside its checkpoints: they make a plain state dict of them."""
    source = Path(deepspeed.__file__).parent / "utils"
    scripts = [source / name for name in _RECOVERY_SCRIPTS]
    return sum(write_durably(folder / path.name, path.read_bytes(), 0o755) for path in scripts if path.exists())
