"""Write DeepSpeed's own checkpoint directory, at any ZeRO stage and world size.

Stock DeepSpeed loads it with ``engine.load_checkpoint``, without Driftpoint installed. State that DeepSpeed does not
save (random-number states, the user's objects) is in the client state under ``driftpoint``. At ZeRO-1/2 each param
group is one flat tensor, cut into equal partitions."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed.checkpoint import constants
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from merger.checkpoint import Checkpoint, config_section
from merger.io.output_file import OutFile, VerbatimFile
from merger.layouts.base import LayoutResult, Target
from merger.layouts.deepspeed_facts import ACCUMULATION, MICRO, EngineFacts, batch_of, facts_of
from merger.layouts.deepspeed_model import (
    CLIENT_KEY,
    FlatState,
    base_optimizer_state,
    flat_slots,
    flat_state,
    flat_tensor,
    model_states,
    zero3_states,
)
from merger.layouts.deepspeed_reshard import flat_partitions, retarget, with_common_steps
from merger.writers.torch_zip import PtFile
from store.errors import MergeError
from store.names import WEIGHTS
from store.text import counted

CLASSES = (ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address)
"""Classes in the files besides tensors and plain values; every reader has them."""


def deepspeed_layout(checkpoint: Checkpoint, target: Target) -> LayoutResult:
    """Plan the directory of an engine. MergeError if the checkpoint's facts do not describe one."""
    saved = facts = facts_of(checkpoint)
    stage = saved.zero_stage if target.zero_stage is None else target.zero_stage
    world_size = target.world_size or saved.world_size
    if (stage, world_size) != (saved.zero_stage, saved.world_size) or not saved.has_layout:
        facts = retarget(saved, checkpoint, stage, world_size)
    checkpoint, notes = with_common_steps(checkpoint, flat_partitions(facts))
    tag = f"global_step{checkpoint.framework_state['counters']['global_steps']}"
    files = (
        *deepspeed_files(facts, checkpoint, tag),
        *(_recovery_scripts() if facts.zero_stage else ()),
        OutFile("latest", VerbatimFile(tag.encode())),
    )
    load = (f"engine.load_checkpoint({{out!r}}, tag={tag!r})",)
    return LayoutResult(tag, files, load, (*notes, *_notes(saved, facts)), checkpoint.certificate)


def _notes(saved: EngineFacts, facts: EngineFacts) -> Iterator[str]:
    if saved.world_size != facts.world_size:
        yield (
            f"the run had {counted(saved.world_size, 'rank')}, the files are for {facts.world_size}: random-number "
            f"states and the user's objects are still those of {counted(saved.world_size, 'rank')}, in the client "
            f"state under {CLIENT_KEY!r}"
        )
        before, after = batch_of(saved.ds_config, saved.world_size), batch_of(facts.ds_config, facts.world_size)
        if before and after and before.train != after.train:
            yield (
                f"an optimizer step took {counted(before.train, 'sample')} and takes {after.train} with the "
                f"configuration in the files, on {counted(facts.world_size, 'rank')}; set {ACCUMULATION} or {MICRO} of "
                "your own configuration if that is not what you want"
            )
    if facts.round_robin_gradients and facts.zero_stage in (1, 2):
        yield (
            "the run has round_robin_gradients, so the parameters lie in its order: the engine that loads these files "
            "must have zero_optimization.round_robin_gradients on, or stock DeepSpeed gives each parameter the values "
            "of others, without an error"
        )
    if config_section(facts.ds_config, "checkpoint").get("load_universal"):
        yield (
            "the run's configuration loads universal checkpoints, and these are DeepSpeed's own: set load_universal "
            "to false, or write layout 'universal'"
        )


def deepspeed_files(facts: EngineFacts, checkpoint: Checkpoint, tag: str) -> list[OutFile]:
    """Return the files of all ranks, in the directory ``tag``."""
    ranks = range(facts.world_size)
    files = []
    for rank in ranks if facts.zero_stage == 3 else ranks[:1]:
        states = model_states(facts, checkpoint, rank)
        prefix = f"zero_pp_rank_{rank}_" if facts.zero_stage == 3 else ""
        files.append(OutFile(f"{tag}/{prefix}mp_rank_00_model_states.pt", PtFile(states, CLASSES)))
    kept = [flat_state(checkpoint, fqns) for _, fqns in flat_partitions(facts)]
    for rank in ranks if facts.zero_stage else ():
        states = (zero3_states if facts.zero_stage == 3 else zero12_states)(facts, checkpoint, kept, rank)
        if not facts.is_bf16_optimizer:
            states = {constants.LOSS_SCALER: loss_scaler(checkpoint.framework_state, facts.dtype), **states}
        value = {constants.OPTIMIZER_STATE_DICT: states, "ds_config": facts.ds_config, "ds_version": facts.ds_version}
        name = f"{'bf16_' if facts.dtype == 'bf16' else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        files.append(OutFile(f"{tag}/{name}", PtFile(value, CLASSES)))
    return files


def _recovery_scripts() -> list[OutFile]:
    """Return the scripts that DeepSpeed puts beside its checkpoints to make a plain state dict of them."""
    source = Path(deepspeed.__file__).parent / "utils"
    scripts = (source / name for name in ("zero_to_fp32.py", "zero_to_torch.py"))
    return [OutFile(path.name, VerbatimFile(path.read_bytes()), 0o755) for path in scripts if path.exists()]


def zero12_states(facts: EngineFacts, checkpoint: Checkpoint, kept: Sequence[FlatState], rank: int) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` of a rank without the loss scaler. ``kept``: by param group."""
    groups, gaps = facts.param_groups, facts.param_alignment_paddings
    masters, states, paddings, mappings = [], [], [], []
    for index, (group, state) in enumerate(zip(groups, kept, strict=True)):
        pieces = group.pieces(rank)
        lean = group.partition_size - (0 if facts.is_bf16_optimizer else group.group_paddings[rank])
        # DeepSpeed strips the padding behind the masters, but not behind the moments.
        masters.append(flat_tensor(WEIGHTS, pieces, lean, state.masters))
        states.append(flat_slots(state, pieces, group.partition_size))
        # ``BF16_Optimizer`` counts all padding as the last rank's.
        all_on_last = sum(group.group_paddings) if rank == facts.world_size - 1 else 0
        paddings.append(all_on_last if facts.is_bf16_optimizer else group.group_paddings[rank])
        mapped = group.mapped_pieces(rank, gaps[index] if gaps else (), round_robin=facts.round_robin_gradients)
        addresses = ((one.fqn, fragment_address(numel=one.stop - one.start, start=one.offset)) for one in mapped)
        mappings.append(OrderedDict(addresses))
    out: dict[str, Any] = {
        constants.CLIP_GRAD: facts.clip_grad,
        constants.BASE_OPTIMIZER_STATE: base_optimizer_state(checkpoint, states, [[i] for i in range(len(groups))]),
        constants.SINGLE_PARTITION_OF_FP32_GROUPS: masters,
        constants.GROUP_PADDINGS: paddings,
        constants.PARTITION_COUNT: list(facts.partition_count) if isinstance(facts.partition_count, tuple) else None,
        constants.DS_VERSION: facts.ds_version,
        constants.PARAM_SLICE_MAPPINGS: mappings,
    }
    if not facts.is_bf16_optimizer:
        out |= {
            "dynamic_loss_scale": facts.dynamic_loss_scale,
            "overflow": False,
            constants.ZERO_STAGE: ZeroStageEnum(facts.zero_stage),
            constants.PARAM_ALIGNMENT_PADDINGS: [list(group) for group in gaps],
        }
    return out


def loss_scaler(state: Mapping[str, Any], dtype: str) -> LossScaler | DynamicLossScaler:
    """Return the loss scaler as it was. MergeError if DeepSpeed's files cannot hold it. ``dtype``: as in facts."""
    saved = state["loss_scaler"]
    if saved is None and dtype != "fp16":
        return LossScaler(scale=1.0)  # the saved engine had none, but the target needs one
    kind = None if saved is None else saved["class"]
    plain = {} if saved is None else {key: value for key, value in saved.items() if key != "class"}
    if kind == "LossScaler":
        scaler = LossScaler(scale=plain["cur_scale"])
    elif kind == "DynamicLossScaler":
        given = ("cur_scale", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis")
        scaler = DynamicLossScaler(*(plain[name] for name in given))
    else:
        raise MergeError(
            f"the run used the loss scaler {kind!r}, which DeepSpeed's files cannot hold; write another layout"
        )
    vars(scaler).update(plain)
    return scaler
