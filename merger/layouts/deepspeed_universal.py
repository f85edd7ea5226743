"""DeepSpeed's universal checkpoint: every parameter whole in files of its own, for any ZeRO stage and world size.

The directory that ``ds_to_universal`` makes, with what the loaders of all stages want in it, so that an engine with
``"checkpoint": {"load_universal": true}`` loads it. Those loaders leave some things out, and get some wrong
(DeepSpeed 0.19); :mod:`merger.layouts.deepspeed_universal_traps` knows which and says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepspeed.checkpoint import constants
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from merger.blocks import xxh3
from merger.checkpoint import Checkpoint
from merger.containers.base import OutFile
from merger.containers.pt import PtFile
from merger.containers.verbatim import Verbatim
from merger.layouts.base import Laid
from merger.layouts.deepspeed_config import config_for
from merger.layouts.deepspeed_facts import EngineFacts, GroupFacts, PlacedParameter, SubGroupFacts, facts_of
from merger.layouts.deepspeed_model import CLIENT_KEY, client_state, model_states
from merger.layouts.deepspeed_retarget import clip_grad, data_order
from merger.layouts.deepspeed_scaler import loss_scaler
from merger.layouts.deepspeed_steps import STEP, common_step, has_state, with_common_steps
from merger.layouts.deepspeed_universal_traps import MODEL_FILE, load_lines, notes_on_loading
from merger.runstate import portable
from merger.stored import Stored, whole
from merger.target import Target
from merger.tensors import torch_dtype
from store.errors import UnsupportedError
from store.names import WEIGHTS

_CLASSES = (ZeroStageEnum, LossScaler, DynamicLossScaler)

_FOLDER = "zero"
_OPTIMIZER = "optimizer_state.pt"
_NAME_BYTES = 255


class UniversalLayout:
    """A universal checkpoint. MergeError where the checkpoint's facts describe no engine, UnsupportedError for
    optimizer state or parameter names that the format has no place for."""

    def lay_out(self, checkpoint: Checkpoint, _: Target) -> Laid:
        """See :class:`merger.layouts.base.Layout`."""
        facts = facts_of(checkpoint)
        groups = optimized_groups(checkpoint, facts)
        checkpoint, notes = with_common_steps(checkpoint, enumerate(groups))
        tag = f"global_step{checkpoint.framework_state['counters']['global_steps']}_universal"
        origin = _origin(checkpoint)
        optimizer = _optimizer(facts, checkpoint, groups, origin)
        files = (
            *(_parameter_files(checkpoint, groups, f"{tag}/{_FOLDER}", origin)),
            OutFile(f"{tag}/{_FOLDER}/{_OPTIMIZER}", PtFile(optimizer, _CLASSES)),
            *_model_files(facts, checkpoint, groups, tag),
            # No ``latest``: an engine that does not load universally would take the weights and start the optimizer
            # anew, without a word.
            OutFile("latest_universal", Verbatim(tag.encode())),
        )
        traps = notes_on_loading(checkpoint, facts, groups, tag)
        return Laid(tag, files, load_lines(checkpoint, groups, tag), (*notes, *traps), checkpoint.certificate)


def optimized_groups(checkpoint: Checkpoint, facts: EngineFacts) -> tuple[tuple[str, ...], ...]:
    """The parameters of each param group that DeepSpeed optimizes: trained ones that have elements."""
    return tuple(
        tuple(fqn for fqn in group.params if checkpoint.record(fqn).kind == "trainable" and checkpoint.numel(fqn))
        for group in facts.param_groups
    )


def _parameter_files(
    checkpoint: Checkpoint, groups: tuple[tuple[str, ...], ...], folder: str, origin: dict[str, Any]
) -> Iterator[OutFile]:
    for params in groups:
        known = next((fqn for fqn in params if has_state(checkpoint, fqn)), None)
        for fqn in params:
            _require_a_name(fqn)
            tensors = {WEIGHTS: whole(checkpoint, fqn, WEIGHTS), **_slots(checkpoint, fqn, known)}
            for slot, stored in tensors.items():
                value = {constants.CAT_DIM: 0, constants.PARAM: stored, CLIENT_KEY: origin}
                yield OutFile(f"{folder}/{fqn}/{slot}.pt", PtFile(value))
            if known is not None:
                scalars = checkpoint.framework_state["scalars"].get(known, {})
                _require_only_a_step(known, scalars)
                if STEP in scalars:
                    yield OutFile(f"{folder}/{fqn}/{STEP}.pt", PtFile(portable(scalars[STEP])))


def _slots(checkpoint: Checkpoint, fqn: str, known: str | None) -> dict[str, Stored]:
    """A parameter's optimizer state; zeros where it has none and others of its param group do, as in a flat one."""
    if known is None:
        return {}
    if has_state(checkpoint, fqn):
        return {slot: whole(checkpoint, fqn, slot) for slot in checkpoint.slots(fqn)}
    shape = tuple(checkpoint.record(fqn).shape)
    return {slot: Stored(shape, torch_dtype(checkpoint.dtype(known, slot)), ()) for slot in checkpoint.slots(known)}


def _optimizer(
    facts: EngineFacts, checkpoint: Checkpoint, groups: tuple[tuple[str, ...], ...], origin: dict[str, Any]
) -> dict[str, Any]:
    """State that belongs to no parameter, in the places where the loaders of ZeRO-1/2 and of ZeRO-3 look for it."""
    hyper = [
        {**portable(group["hyper"]), "params": [index]}
        for index, group in enumerate(checkpoint.framework_state["param_groups"])
    ]
    step = common_step(checkpoint, (fqn for params in groups for fqn in params))
    return {
        constants.LOSS_SCALER: loss_scaler(checkpoint.framework_state, facts.dtype),
        "dynamic_loss_scale": facts.dynamic_loss_scale,
        "overflow": False,
        constants.CLIP_GRAD: clip_grad(facts),
        constants.ZERO_STAGE: ZeroStageEnum(_stage_12(facts)),
        constants.PARTITION_COUNT: facts.world_size,
        constants.DS_VERSION: facts.ds_version,
        constants.PARAM_GROUPS: hyper,
        constants.OPTIMIZER_STATE_DICT: {
            "state": {} if step is None else {0: {STEP: portable(step)}},
            "param_groups": hyper,
        },
        CLIENT_KEY: {**origin, "slots": [_slots_of(checkpoint, params) for params in groups]},
    }


def _origin(checkpoint: Checkpoint) -> dict[str, Any]:
    """What stands in every file below ``zero``, where no engine and no converter carries it anywhere else: a reader
    can tell these files from converted ones, and from those of another save."""
    return {
        "save": checkpoint.certificate.save,
        "step": checkpoint.framework_state["counters"]["global_steps"],
        "contents": _contents(checkpoint),
    }


def _contents(checkpoint: Checkpoint) -> str:
    """A checksum over the checksums of all that the checkpoint's tensors are read from, and of their store's id:
    saves of two runs may have the same name and step. The same for every merge of the same save."""
    running = xxh3()
    running.update(memoryview(checkpoint.certificate.store_id.encode()))
    for name, extents in sorted(checkpoint.index.names().items()):
        for extent in extents:
            place = (*name, extent.start, extent.stop, extent.dtype, extent.offset, extent.block.digest)
            running.update(memoryview(repr(place).encode()))
    return running.hexdigest()


def _slots_of(checkpoint: Checkpoint, params: tuple[str, ...]) -> list[str]:
    """The slots that every parameter of a param group has in the files."""
    known = next((fqn for fqn in params if has_state(checkpoint, fqn)), None)
    return [] if known is None else sorted(checkpoint.slots(known))


def _model_files(
    facts: EngineFacts, checkpoint: Checkpoint, groups: tuple[tuple[str, ...], ...], tag: str
) -> Iterator[OutFile]:
    """One file that engines of ZeRO-1/2 read, and one for ZeRO-3: all ranks read the same."""
    info = {constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE}
    for stage, name in ((_stage_12(facts), MODEL_FILE), (3, f"zero_pp_rank_0_{MODEL_FILE}")):
        states = {
            **model_states(_without_places(facts, groups, stage), checkpoint, 0),
            "frozen_param_fragments": None,  # they are in ``module`` of the first file
            constants.UNIVERSAL_CHECKPOINT_INFO: info,
            CLIENT_KEY: client_state(checkpoint, sorted(checkpoint.run_states)),
        }
        yield OutFile(f"{tag}/{name}", PtFile(states))


def _stage_12(facts: EngineFacts) -> int:
    """What the file for ZeRO-1/2 says it is of, and the optimizer's with it."""
    return facts.zero_stage if facts.zero_stage in (1, 2) else 2


def _without_places(facts: EngineFacts, groups: tuple[tuple[str, ...], ...], stage: int) -> EngineFacts:
    """Facts of an engine at ``stage`` that name the parameters of each group in the order of the data, and no place."""
    here = (facts.zero_stage, facts.world_size)
    config = config_for(facts.ds_config, here, (stage, facts.world_size))
    ordered = [data_order(params, stage, facts.world_size, facts.dtype, config) for params in groups]
    named = tuple(
        GroupFacts(params=params, layout=tuple(PlacedParameter(fqn=fqn, offset=0, numel=0) for fqn in order))
        for params, order in zip(groups, ordered, strict=True)
    )
    flat = tuple(
        SubGroupFacts(params=params, param_group=i, partition_numels=(0,) * len(params), flat_numel=0)
        for i, params in enumerate(groups)
    )
    return facts.model_copy(
        update={"zero_stage": stage, "ds_config": config, "param_groups": named, "sub_groups": flat}
    )


def _require_a_name(fqn: str) -> None:
    """A parameter's name becomes a directory's."""
    if fqn in ("", ".", "..", _OPTIMIZER) or "/" in fqn or "\0" in fqn or len(fqn.encode()) > _NAME_BYTES:
        raise UnsupportedError(
            f"the parameter {fqn!r} cannot be in a universal checkpoint, where its name is a directory's; write layout "
            "'deepspeed' at the stage and world size you need"
        )


def _require_only_a_step(fqn: str, scalars: dict[str, Any]) -> None:
    others = sorted(scalars.keys() - {STEP})
    if others:
        raise UnsupportedError(
            f"the optimizer keeps {', '.join(map(repr, others))} for {fqn}, and a universal checkpoint has a place for "
            "'step' only; write layout 'deepspeed' at the stage and world size you need"
        )
