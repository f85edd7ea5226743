"""Write DeepSpeed's universal checkpoint: every parameter whole in files of its own, for any ZeRO stage and world size.

The directory is that of ``ds_to_universal``, with everything that the loaders of all stages read, so that an engine
with ``"checkpoint": {"load_universal": true}`` loads it. Those loaders (DeepSpeed 0.19.8,
``runtime/base_optimizer.py`` and ``runtime/zero/stage3.py``) omit some state and load some wrongly. The lines that
load the checkpoint repair what can be repaired after loading; notes name another way for the rest.

Of a run without DeepSpeed, values that only an engine's configuration says (loss scale, clipping, samples) are left
out: the loaders keep the engine's own where a file has none."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint import constants
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from merger.checkpoint import Checkpoint, PlannedTensor, config_section, plan_whole, to_portable
from merger.io.blocks import xxh3
from merger.io.output_file import OutFile, VerbatimFile
from merger.layouts import deepspeed_facts as ds_facts
from merger.layouts import deepspeed_reshard as reshard
from merger.layouts.base import LayoutResult, Target
from merger.layouts.deepspeed import CLIENT_KEY, client_state, loss_scaler, model_states
from merger.layouts.deepspeed_facts import EngineFacts, GroupFacts, SubGroupFacts
from merger.tensors import torch_dtype
from merger.writers.torch_zip import PtFile
from store.errors import MergeError, UnsupportedError
from store.names import WEIGHTS
from store.text import counted, listed

Groups = Sequence[tuple[str, ...]]
MODEL_FILE = "mp_rank_00_model_states.pt"
_ADAM = ("exp_avg", "exp_avg_sq")

_LOAD_HYPER = (
    "from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler",
    "from deepspeed.runtime.zero.config import ZeroStageEnum",
    "with torch.serialization.safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum]):",
    "    kept = torch.load(saved + '/zero/optimizer_state.pt', weights_only=True)['param_groups']",
)
"""Reads the hyperparameters, and allows only the three classes in this file."""

_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable", "param_names"})
"""Settings of torch's param groups that are no hyperparameters: an engine keeps its own."""

_WIDENED = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that DeepSpeed's fp32 masters and moments can hold
_RANKS = 4096  # largest world size checked for param groups without elements on some rank
_CLASSES = (ZeroStageEnum, LossScaler, DynamicLossScaler)
_FOLDER = "zero"
_OPTIMIZER = "optimizer_state.pt"
_NAME_BYTES = 255


def universal_layout(checkpoint: Checkpoint, _: Target) -> LayoutResult:
    """Plan a universal checkpoint.

    Raises MergeError if the checkpoint's facts describe no engine or it has no optimizer state, UnsupportedError for
    optimizer state or parameter names that the format cannot hold."""
    facts, checkpoint = _engine_of(checkpoint)
    groups = tuple(reshard.optimized_params(checkpoint, group.params) for group in facts.param_groups)
    _require_loadable(checkpoint, facts, groups)
    checkpoint, notes = reshard.with_common_steps(checkpoint, enumerate(groups))
    step = checkpoint.framework_state["counters"]["global_steps"]
    tag = f"global_step{step}_universal"
    # Every file below ``zero`` names its save, so a reader can tell these files from converted ones and from other
    # saves'. No engine and no converter passes the note on.
    origin = {"save": checkpoint.certificate.save, "step": step, "contents": _contents(checkpoint)}
    optimizer = _optimizer(facts, checkpoint, groups, origin)
    files = (
        *(_parameter_files(checkpoint, groups, f"{tag}/{_FOLDER}", origin)),
        OutFile(f"{tag}/{_FOLDER}/{_OPTIMIZER}", PtFile(optimizer, _CLASSES)),
        *_model_files(facts, checkpoint, groups, tag),
        # No ``latest``: an engine without load_universal would load the weights and silently restart the optimizer.
        OutFile("latest_universal", VerbatimFile(tag.encode())),
    )
    notes = (*notes, *_notes_on_loading(checkpoint, facts, groups, tag))
    return LayoutResult(tag, files, _load_lines(checkpoint, groups, tag), notes, checkpoint.certificate)


def _engine_of(checkpoint: Checkpoint) -> tuple[EngineFacts, Checkpoint]:
    """Return (facts of the engine, checkpoint); for a run without DeepSpeed, both as an engine would have them."""
    if checkpoint.framework == "deepspeed":
        return ds_facts.facts_of(checkpoint), checkpoint
    state = checkpoint.framework_state
    groups = state["param_groups"]
    if not groups:
        raise MergeError(f"{checkpoint.origin} has no optimizer state, so no engine can go on from it; write layout hf")
    several = any(group.get("member") for group in groups)
    if several or state.get("counters"):
        kind = f"several optimizers ({state['optimizer']})" if several else "DeepSpeed's PipelineModule"
        raise UnsupportedError(
            f"{checkpoint.origin} is of {kind}, and a universal checkpoint is for engines of one optimizer and "
            "without a pipeline; write layout 'torch' or 'dcp'"
        )
    facts = EngineFacts(
        ds_version=deepspeed.__version__,
        zero_stage=2,  # of the file for ZeRO-1/2
        world_size=len(checkpoint.run_states) or 1,
        dtype="fp32",
        ds_config={},
        zero_optimizer=ds_facts.ZERO_12,
        dynamic_loss_scale=False,
        clip_grad=0.0,
        buffer_names=tuple(fqn for fqn, record in checkpoint.tensors.items() if record.kind == "buffer"),
        param_groups=tuple(GroupFacts(params=tuple(group["params"])) for group in groups),
        frozen=reshard.unoptimized(checkpoint),
    )
    plain = [{**one, "hyper": {k: v for k, v in one["hyper"].items() if k not in _IMPLEMENTATION}} for one in groups]
    counters = {"global_steps": checkpoint.step, "skipped_steps": 0}
    return facts, replace(checkpoint, framework_state={**state, "param_groups": plain, "counters": counters})


def _dtype(checkpoint: Checkpoint, fqn: str, slot: str) -> torch.dtype:
    """Return the dtype to write: as stored, or float32 for a run without DeepSpeed. UnsupportedError if it rounds."""
    dtype = torch_dtype(checkpoint.dtype(fqn, slot))
    if checkpoint.framework == "deepspeed":
        return dtype
    if dtype not in _WIDENED:
        raise UnsupportedError(
            f"{slot} of {fqn} is in {str(dtype).removeprefix('torch.')}, and DeepSpeed's master weights and moments "
            "are in float32; write layout 'torch' or 'dcp'"
        )
    return torch.float32


def _parameter_files(checkpoint: Checkpoint, groups: Groups, folder: str, origin: dict[str, Any]) -> Iterator[OutFile]:
    for params in groups:
        known = _first_with_state(checkpoint, params)
        for fqn in params:
            if fqn in ("", ".", "..", _OPTIMIZER) or "/" in fqn or "\0" in fqn or len(fqn.encode()) > _NAME_BYTES:
                raise UnsupportedError(
                    f"the parameter {fqn!r} cannot be in a universal checkpoint, because its name is not a valid "
                    "directory name; write layout 'torch', or of a run with DeepSpeed layout 'deepspeed'"
                )
            for slot, stored in _tensors(checkpoint, fqn, known).items():
                value = {constants.CAT_DIM: 0, constants.PARAM: stored, CLIENT_KEY: origin}
                yield OutFile(f"{folder}/{fqn}/{slot}.pt", PtFile(value))
            scalars = {} if known is None else checkpoint.framework_state["scalars"].get(known, {})
            if others := sorted(scalars.keys() - {reshard.STEP}):
                raise UnsupportedError(
                    f"the optimizer keeps {', '.join(map(repr, others))} for {known}, but a universal checkpoint holds "
                    "only 'step'; write layout 'torch', or of a run with DeepSpeed layout 'deepspeed'"
                )
            if reshard.STEP in scalars:
                yield OutFile(f"{folder}/{fqn}/{reshard.STEP}.pt", PtFile(to_portable(scalars[reshard.STEP])))


def _tensors(checkpoint: Checkpoint, fqn: str, known: str | None) -> dict[str, PlannedTensor]:
    """Return a parameter and its optimizer state; zeros if it has none but ``known`` of its param group does."""
    slots = (WEIGHTS, *checkpoint.slots(fqn))
    tensors = {slot: plan_whole(checkpoint, fqn, slot, _dtype(checkpoint, fqn, slot)) for slot in slots}
    if known is not None and not reshard.has_state(checkpoint, fqn):
        shape = tuple(checkpoint.record(fqn).shape)
        tensors |= {slot: PlannedTensor(shape, _dtype(checkpoint, known, slot), ()) for slot in checkpoint.slots(known)}
    return tensors


def _optimizer(facts: EngineFacts, checkpoint: Checkpoint, groups: Groups, origin: dict[str, Any]) -> dict[str, Any]:
    """Return the state that belongs to no single parameter, under the keys that loaders of ZeRO-1/2 and ZeRO-3 read."""
    values = (to_portable(group["hyper"]) for group in checkpoint.framework_state["param_groups"])
    hyper = [{**one, "params": [index]} for index, one in enumerate(values)]
    step = reshard.common_step(checkpoint, (fqn for params in groups for fqn in params))
    known = [_first_with_state(checkpoint, params) for params in groups]
    configured = {
        constants.LOSS_SCALER: loss_scaler(checkpoint.framework_state, facts.dtype),
        "dynamic_loss_scale": facts.dynamic_loss_scale,
        constants.CLIP_GRAD: reshard.clip_grad(facts),
    }
    base = {"state": {} if step is None else {0: {reshard.STEP: to_portable(step)}}, "param_groups": hyper}
    return {
        **(configured if checkpoint.framework == "deepspeed" else {}),
        "overflow": False,
        constants.ZERO_STAGE: ZeroStageEnum(_stage_12(facts)),
        constants.PARTITION_COUNT: facts.world_size,
        constants.DS_VERSION: facts.ds_version,
        constants.PARAM_GROUPS: hyper,
        constants.OPTIMIZER_STATE_DICT: base,
        CLIENT_KEY: {**origin, "slots": [sorted(checkpoint.slots(one)) if one else [] for one in known]},
    }


def _contents(checkpoint: Checkpoint) -> str:
    """Return a checksum over the checksums of all blocks that the tensors are read from, and the store's id.

    It tells saves of two runs with the same name and step apart, and is the same for every merge of one save."""
    running = xxh3()
    running.update(memoryview(checkpoint.certificate.store_id.encode()))
    for name, extents in sorted(checkpoint.index.names().items()):
        for extent in extents:
            place = (*name, extent.start, extent.stop, extent.dtype, extent.offset, extent.block.digest)
            running.update(memoryview(repr(place).encode()))
    return running.hexdigest()


def _first_with_state(checkpoint: Checkpoint, params: Sequence[str]) -> str | None:
    """Return a parameter that has the slots which every parameter of its param group has in the files."""
    return next((fqn for fqn in params if reshard.has_state(checkpoint, fqn)), None)


def _model_files(facts: EngineFacts, checkpoint: Checkpoint, groups: Groups, tag: str) -> Iterator[OutFile]:
    """Yield one file for engines of ZeRO-1/2 and one for ZeRO-3; all ranks read the same."""
    info = {constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE}
    for stage, name in ((_stage_12(facts), MODEL_FILE), (3, f"zero_pp_rank_0_{MODEL_FILE}")):
        states = {
            **model_states(_without_places(facts, groups, stage), checkpoint, 0),
            "frozen_param_fragments": None,  # in ``module`` of the first file
            constants.UNIVERSAL_CHECKPOINT_INFO: info,
            CLIENT_KEY: client_state(checkpoint, sorted(checkpoint.run_states)),
        }
        yield OutFile(f"{tag}/{name}", PtFile(states))


def _stage_12(facts: EngineFacts) -> int:
    """Return the stage to write into the model file for ZeRO-1/2 and into the optimizer's file."""
    return facts.zero_stage if facts.zero_stage in (1, 2) else 2


def _without_places(facts: EngineFacts, groups: Groups, stage: int) -> EngineFacts:
    """Return facts of an engine at ``stage`` that name each group's parameters in data order, without offsets."""
    config = ds_facts.config_for(facts.ds_config, (facts.zero_stage, facts.world_size), (stage, facts.world_size))
    ordered = [reshard.data_order(params, stage, facts.world_size, facts.dtype, config) for params in groups]
    named = tuple(
        GroupFacts(params=params, layout=ds_facts.place_in_row((fqn, 0, 0) for fqn in order)[0])
        for params, order in zip(groups, ordered, strict=True)
    )
    flat = tuple(
        SubGroupFacts(params=params, param_group=i, partition_numels=(0,) * len(params))
        for i, params in enumerate(groups)
    )
    update = {"zero_stage": stage, "ds_config": config, "param_groups": named, "sub_groups": flat}
    return facts.model_copy(update=update)


def _require_loadable(checkpoint: Checkpoint, facts: EngineFacts, groups: Groups) -> None:
    """Raise UnsupportedError for optimizer state that the files have no place for, or that differs within a group."""
    named = set(chain.from_iterable(group.params for group in facts.param_groups))
    frozen = [fqn for fqn in named.difference(*groups) if checkpoint.numel(fqn) and reshard.has_state(checkpoint, fqn)]
    if frozen:
        raise UnsupportedError(
            f"the optimizer keeps state of frozen parameters ({reshard.layers_named(checkpoint, sorted(frozen))}), and "
            "a universal checkpoint holds that of trained ones only; write layout 'torch' or 'dcp'"
        )
    for params in groups:
        kept = {frozenset(checkpoint.slots(fqn)) for fqn in params if reshard.has_state(checkpoint, fqn)}
        if len(kept) > 1 or any("/" in slot for slots in kept for slot in slots):
            slots = listed(sorted(set().union(*kept)), 6)
            raise UnsupportedError(
                f"parameters of one param group differ in their optimizer state ({slots}), or a name in it has a "
                "slash, which DeepSpeed does not load from a universal checkpoint; write layout 'torch' or 'dcp'"
            )


def _load_lines(checkpoint: Checkpoint, groups: Groups, tag: str) -> tuple[str, ...]:
    """Return Python that loads the checkpoint completely, at any stage; ``{out}`` is the directory."""
    lines = [f"saved = {{out!r}} + '/{tag}'"]
    if _not_loaded(checkpoint, groups):
        read = f"torch.load(saved + '/{MODEL_FILE}', weights_only=True)['module']"
        lines.append(f"model.load_state_dict({read})  # before initialize")
    option = ""
    if checkpoint.framework != "deepspeed":
        option = ", load_lr_scheduler_states=False"
        count = f"len(engine.optimizer.optimizer.param_groups) == {len(groups)}"
        lines.append(f"assert {count}  # DeepSpeed silently loads the first ones alone")
    setting = '# with "checkpoint": {{"load_universal": true}}'
    lines.append(f"engine.load_checkpoint({{out!r}}, tag={tag!r}{option})  {setting}")
    if _hyper_differs(checkpoint):
        lines.extend(_LOAD_HYPER)
        lines.append("for group, own in zip(engine.optimizer.optimizer.param_groups, kept, strict=True):")
        lines.append("    group.update({{key: value for key, value in own.items() if key != 'params'}})")
    if isinstance(reshard.common_step(checkpoint, chain.from_iterable(groups)), torch.Tensor):
        lines.append("for state in engine.optimizer.optimizer.state.values():")
        lines.append("    state['step'] = state['step'].clone()")
    return tuple(lines)


def _notes_on_loading(checkpoint: Checkpoint, facts: EngineFacts, groups: Groups, tag: str) -> Iterator[str]:
    """Yield what to know before loading, each with a remedy: what is not loaded, and what ZeRO-1/2 loads wrongly."""
    if left := _not_loaded(checkpoint, groups):
        yield (
            "a universal load restores what the optimizer trains and nothing else: "
            f"{counted(len(left), 'frozen parameter or buffer', 'frozen parameters and buffers')} (in "
            f"{reshard.layers_named(checkpoint, left)}) {'stays' if len(left) == 1 else 'stay'} as the model was "
            f"built. Before deepspeed.initialize run model.load_state_dict(torch.load('.../{tag}/{MODEL_FILE}', "
            "weights_only=True)['module'])"
        )
    if checkpoint.framework != "deepspeed":
        yield (
            "the run had no DeepSpeed engine: one that loads it keeps its own loss scale and gradient clipping, and "
            f"a learning-rate scheduler of its own starts anew: bring it to step {checkpoint.step}"
        )
    zero = config_section(facts.ds_config, "zero_optimization")
    if zero.get("round_robin_gradients") and not zero.get("parameter_alignment"):
        yield (
            "the run had round_robin_gradients on: DeepSpeed 0.19's ZeRO-1/2 loads a universal checkpoint into the "
            "wrong places then, without an error. Load it with round_robin_gradients off (or at stage 3), or write "
            "layout 'deepspeed' at the stage and world size you need"
        )
    numels = [sum(checkpoint.numel(fqn) for fqn in params) for params in groups]
    limits = [(ranks, i) for i, numel in enumerate(numels) if (ranks := _ranks_that_hold(numel)) is not None]
    if limits:
        ranks, group = min(limits)
        yield (
            f"param group {group} has only {counted(numels[group], 'element')}: on more than {counted(ranks, 'rank')} "
            "one of them holds nothing of it, and DeepSpeed's ZeRO-1/2 stops with an IndexError there. Join the group "
            "to another, or load at stage 3"
        )
    yield from _notes_on_zero3(checkpoint, groups)


def _not_loaded(checkpoint: Checkpoint, groups: Groups) -> list[str]:
    """Return the tensors in no param group, which the loaders do not touch."""
    inside = set(chain.from_iterable(groups))
    return [fqn for fqn in checkpoint.tensors if fqn not in inside and checkpoint.numel(fqn)]


def _ranks_that_hold(numel: int) -> int | None:
    """Return the largest world size at which every rank holds a part of a flat group; None: over the limit."""
    for ranks in range(1, _RANKS):
        size = -(-numel // (reshard.ALIGNMENT * (ranks + 1))) * reshard.ALIGNMENT
        if size * ranks >= numel:
            return ranks
    return None


def _notes_on_zero3(checkpoint: Checkpoint, groups: Groups) -> Iterator[str]:
    """Yield what DeepSpeed's ZeRO-3 loads wrongly or refuses."""
    if differing := _hyper_differs(checkpoint):
        yield (
            f"the param groups differ in {', '.join(differing)}, and DeepSpeed's ZeRO-3 gives every group those of the "
            "first when it loads a universal checkpoint. Set them afterwards from zero/optimizer_state.pt, as the "
            "lines that load it do"
        )
    common = reshard.common_step(checkpoint, chain.from_iterable(groups))
    if isinstance(common, torch.Tensor):
        yield (
            "DeepSpeed's ZeRO-3 puts one and the same step tensor into every sub-group when it loads a universal "
            "checkpoint, and with several param groups or sub-groups each of them then counts it up. Give each its own "
            "afterwards, as the lines that load it do"
        )
    steps = [reshard.common_step(checkpoint, params) for params in groups]
    if len({float(step) for step in steps if step is not None}) > 1:
        step_list = listed(("none" if step is None else f"{float(step):g}" for step in steps), 6)
        yield (
            f"the param groups are at different optimizer steps ({step_list}), and DeepSpeed's ZeRO-3 takes "
            f"{float(common):g} for all when it loads a universal checkpoint; load it at stage 1 or 2 to keep them"
        )
    kept = {slot for params in groups for fqn in params for slot in checkpoint.slots(fqn)}
    kept |= set() if common is None else {reshard.STEP}
    if kept != {*_ADAM, reshard.STEP}:
        yield (
            f"the optimizer keeps {', '.join(sorted(kept)) or 'nothing'}, and DeepSpeed's ZeRO-3 loads universal "
            f"checkpoints of Adam's kind only ({', '.join(_ADAM)}, {reshard.STEP}); load it at stage 1 or 2"
        )


def _hyper_differs(checkpoint: Checkpoint) -> list[str]:
    hypers = [group["hyper"] for group in checkpoint.framework_state["param_groups"]]
    keys = dict.fromkeys(key for hyper in hypers for key in hyper)
    return [key for key in keys if not all(reshard.same_value(hypers[0].get(key), one.get(key)) for one in hypers[1:])]
