"""Write DeepSpeed's own checkpoint directory, at any ZeRO stage and world size.

Stock DeepSpeed loads it with ``engine.load_checkpoint``, without Driftpoint installed. State that DeepSpeed does not
save (random-number states, the user's objects) is in the client state under ``driftpoint``. At ZeRO-1/2 each param
group is one flat tensor, cut into equal partitions."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint import constants
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from merger import checkpoint as checkpoints
from merger.checkpoint import Checkpoint, Placement, PlannedTensor, plan_parameter, to_portable
from merger.io.output_file import OutFile, VerbatimFile
from merger.layouts import deepspeed_facts as ds_facts
from merger.layouts.base import LayoutResult, Target, canonical_names, share_tied
from merger.layouts.deepspeed_facts import EngineFacts, Piece
from merger.layouts.deepspeed_reshard import flat_partitions, has_state, retarget, with_common_steps
from merger.layouts.torch_dcp import optimizer_state
from merger.tensors import torch_dtype
from merger.writers.torch_zip import PtFile
from store.errors import MergeError
from store.names import FROZEN, WEIGHTS, Fragment
from store.text import counted

CLIENT_KEY = "driftpoint"  # key of the client state for state that DeepSpeed does not save
CLASSES = (ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address)
"""Classes in the files besides tensors and plain values; every reader has them."""


def deepspeed_layout(checkpoint: Checkpoint, target: Target) -> LayoutResult:
    """Plan the directory of an engine. MergeError if the checkpoint's facts do not describe one."""
    saved = facts = ds_facts.facts_of(checkpoint)
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
        before, after = (ds_facts.batch_of(one.ds_config, one.world_size) for one in (saved, facts))
        if before and after and before.train != after.train:
            yield (
                f"an optimizer step took {counted(before.train, 'sample')} and takes {after.train} with the "
                f"configuration in the files, on {counted(facts.world_size, 'rank')}; set {ds_facts.ACCUMULATION} or "
                f"{ds_facts.MICRO} of your own configuration if that is not what you want"
            )
    if facts.round_robin_gradients and facts.zero_stage in (1, 2):
        yield (
            "the run has round_robin_gradients, so the parameters lie in its order: the engine that loads these files "
            "must have zero_optimization.round_robin_gradients on, or stock DeepSpeed gives each parameter the values "
            "of others, without an error"
        )
    if checkpoints.config_section(facts.ds_config, "checkpoint").get("load_universal"):
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


def model_states(facts: EngineFacts, checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    """Return what ``engine.save_checkpoint`` writes into a rank's model states, client state included."""
    state, zero = checkpoint.framework_state, facts.zero_stage
    counters, outside = state["counters"], set(facts.frozen)
    shapes = {fqn: torch.Size(one.shape) for fqn, one in checkpoint.tensors.items() if one.kind != "buffer"}
    groups = [OrderedDict((fqn, shapes[fqn]) for fqn in fqns) for _, fqns in flat_partitions(facts)]
    ties = {alias: fqn for fqn in shapes for alias in checkpoint.tensors[fqn].aliases}
    # From stage 2 on, DeepSpeed saves parameters outside the optimizer separately: frozen or without elements.
    frozen = [fqn for fqn, shape in shapes.items() if fqn in outside or 0 in shape]
    fragments = OrderedDict((fqn, _frozen_fragment(facts, checkpoint, rank, fqn)) for fqn in frozen if zero > 1)
    # At ZeRO-3 each rank has a file, with the run state of the saved ranks that equal it modulo the new world size: its
    # own if the world size is unchanged; otherwise, too, none is lost or written twice.
    saved = [one for one in sorted(checkpoint.run_states) if zero != 3 or one % facts.world_size == rank]
    module = share_tied(canonical_names(checkpoint), lambda fqn: _working_copy(facts, checkpoint, fqn))
    parallel = {constants.CHECKPOINT_PP_DEGREE: 1, constants.CHECKPOINT_TP_DEGREE: facts.mp_world_size}
    return {
        "module": OrderedDict(module),
        "buffer_names": list(facts.buffer_names),
        "optimizer": None if zero else optimizer_state(checkpoint),
        "param_shapes": groups if zero else None,
        "frozen_param_shapes": OrderedDict((fqn, shapes[fqn]) for fqn in frozen) if zero > 1 else None,
        "shared_params": (ties if rank == 0 else {}) if zero else None,
        "frozen_param_fragments": fragments if zero > 1 else None,
        "lr_scheduler": to_portable(state["lr_scheduler"]),
        "data_sampler": None,
        "random_ltd": None,
        **{key: counters[key] for key in ("skipped_steps", "global_steps", "global_samples") if key in counters},
        "dp_world_size": facts.world_size,
        "mp_world_size": facts.mp_world_size,
        constants.CHECKPOINT_PARALLEL_DIMS: parallel,
        "ds_config": facts.ds_config,
        "ds_version": facts.ds_version,
        **to_portable(checkpoint.client_state),  # DeepSpeed puts it among its own keys, after them
        CLIENT_KEY: client_state(checkpoint, saved),
    }


def _working_copy(facts: EngineFacts, checkpoint: Checkpoint, fqn: str) -> PlannedTensor | torch.Tensor:
    record = checkpoint.record(fqn)
    dtype = torch_dtype(record.dtype)
    if facts.zero_stage == 3 and record.kind != "buffer":
        return torch.empty(0, dtype=dtype)  # the values are in the optimizer files
    # A working weight is its fp32 master cast to the working dtype, bit for bit: it is not stored twice.
    return plan_parameter(checkpoint, fqn, dtype)


def client_state(checkpoint: Checkpoint, ranks: Iterable[int]) -> dict[str, Any]:
    """Return ``rng`` and ``user`` by saved rank, the save and step, whether it is exact, and the certificate if not.

    A run may pass all of it on to its own later checkpoints, so readers compare the step."""
    certificate = checkpoint.certificate
    return {
        "save": certificate.save,
        "step": checkpoint.framework_state["counters"]["global_steps"],
        "exact": certificate.exact,
        "as_found": certificate.as_found,
        "unvouched": certificate.unvouched,
        "units": [] if certificate.whole else [asdict(unit) for unit in certificate.units],
        "ranks": checkpoints.portable_run_states(checkpoint, ranks),
    }


def zero12_states(facts: EngineFacts, checkpoint: Checkpoint, kept: "Sequence[FlatState]", rank: int) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` of a rank, without the loss scaler. ``kept``: state by param group."""
    groups, gaps = facts.param_groups, facts.param_alignment_paddings
    masters, states, paddings, mappings = [], [], [], []
    for index, (group, state) in enumerate(zip(groups, kept, strict=True)):
        pieces = group.pieces(rank)
        unpadded = group.partition_size - (0 if facts.is_bf16_optimizer else group.group_paddings[rank])
        # DeepSpeed strips the padding behind the masters, but not behind the moments.
        masters.append(flat_tensor(WEIGHTS, pieces, unpadded, state.masters))
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


def zero3_states(facts: EngineFacts, checkpoint: Checkpoint, kept: "Sequence[FlatState]", rank: int) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` of a rank, without the loss scaler. ``kept``: state by sub-group."""
    masters, states = [], []
    for sub_group, state in zip(facts.sub_groups, kept, strict=True):
        sizes = zip(sub_group.params, sub_group.partition_numels, strict=True)
        pieces = ds_facts.slice_pieces(((fqn, checkpoint.numel(fqn), part) for fqn, part in sizes), rank)
        numel = sum(sub_group.partition_numels)
        masters.append(flat_tensor(WEIGHTS, pieces, numel, state.masters))
        states.append(flat_slots(state, pieces, numel))
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


@dataclass(frozen=True)
class FlatState:
    """State of the base optimizer for one flat partition, the same on all ranks."""

    masters: torch.dtype  # dtype of the master weights
    scalars: dict[str, Any]  # of all parameters in it
    slots: dict[str, torch.dtype]  # dtypes by slot
    known: frozenset[str]  # parameters with optimizer state; the others get zeros


def flat_state(checkpoint: Checkpoint, fqns: Sequence[str]) -> FlatState:
    """Return the optimizer state that parameters of a flat partition share; :func:`with_common_steps` made it equal.

    Raises MergeError if they differ in slots or dtypes, or if a slot of the optimizer is not stored."""
    known = [fqn for fqn in fqns if has_state(checkpoint, fqn)]
    scalars = checkpoint.framework_state["scalars"].get(known[0], {}) if known else {}
    slots = checkpoint.slots(known[0]) if known else ()
    for fqn in known:
        if checkpoint.slots(fqn) != slots:
            raise MergeError(
                f"{known[0]} and {fqn} share a flat partition but have different optimizer state; merge them from one "
                "save"
            )
    dtypes = {slot: _flat_dtype(checkpoint, slot, known) for slot in slots}
    return FlatState(_flat_dtype(checkpoint, WEIGHTS, fqns), dict(scalars), dtypes, frozenset(known))


def flat_tensor(slot: str, pieces: Sequence[Piece], numel: int, dtype: torch.dtype) -> PlannedTensor:
    """Plan a flat partition of one slot, 1-d, ``numel`` elements; zeros between the parameters."""
    full = [one for one in pieces if one.start < one.stop]
    placed = [Placement(Fragment(one.fqn, slot, one.start, one.stop - one.start), one.offset) for one in full]
    return PlannedTensor((numel,), dtype, tuple(sorted(placed, key=lambda one: one.offset)))


def flat_slots(state: FlatState, pieces: Sequence[Piece], numel: int) -> dict[str, Any]:
    """Return the base optimizer's state of one rank's flat partition: its scalars, then its slots."""
    stored = [piece for piece in pieces if piece.fqn in state.known]
    slots = {slot: flat_tensor(slot, stored, numel, dtype) for slot, dtype in state.slots.items()}
    return {**to_portable(state.scalars), **slots}


def base_optimizer_state(
    checkpoint: Checkpoint, states: Sequence[dict[str, Any]], members: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return ``state_dict()`` of the base optimizer.

    ``states``: state of each flat partition. ``members``: for each param group, the indices of its flat partitions."""
    groups = checkpoint.framework_state["param_groups"]
    if len(groups) != len(members):
        raise MergeError(f"the run had {len(groups)} param groups, its layout has {len(members)}; merge another save")
    pairs = zip(groups, members, strict=True)
    return {
        "state": {index: state for index, state in enumerate(states) if state},
        "param_groups": [{**to_portable(group["hyper"]), "params": list(indices)} for group, indices in pairs],
    }


def _flat_dtype(checkpoint: Checkpoint, slot: str, fqns: Sequence[str]) -> torch.dtype:
    dtypes = {checkpoint.dtype(fqn, slot) for fqn in fqns}
    if len(dtypes) > 1:
        raise MergeError(f"parameters of one flat partition have {slot} in several dtypes: {sorted(dtypes)}")
    return torch_dtype(dtypes.pop()) if dtypes else torch.float32


def _frozen_fragment(facts: EngineFacts, checkpoint: Checkpoint, rank: int, fqn: str) -> PlannedTensor | torch.Tensor:
    """Plan a parameter that the optimizer does not hold: the whole, or at ZeRO-3 a rank's slice with its padding."""
    if facts.zero_stage != 3:
        return _working_copy(facts, checkpoint, fqn)
    part = ds_facts.slice_numel(checkpoint.numel(fqn), facts.world_size)
    pieces = ds_facts.slice_pieces([(fqn, checkpoint.numel(fqn), part)], rank)
    return flat_tensor(FROZEN, pieces, part, torch_dtype(checkpoint.dtype(fqn, FROZEN)))


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
        raise MergeError(f"the run used the loss scaler {kind!r}, which no DeepSpeed file holds; write another layout")
    vars(scaler).update(plain)
    return scaler
