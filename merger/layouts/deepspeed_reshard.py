"""Compute DeepSpeed 0.19's flat layout at another ZeRO stage and world size, with its optimizer steps.

The rules are those of ``zero/stage_1_and_2.py``, ``zero/stage3.py``, ``zero/partition_parameters.py``,
``bf16_optimizer.py`` and ``engine.py``. DeepSpeed keeps one step count for a whole flat partition; if the layers of a
composite have different ones, the step of the run state's run is taken, and certificate and notes record it. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from merger.checkpoint import Checkpoint, config_section, gradient_clipping, with_steps
from merger.layouts import deepspeed_facts as ds_facts
from merger.layouts.deepspeed_facts import EngineFacts, GroupFacts, SubGroupFacts
from merger.tensors import torch_dtype
from store.errors import UnsupportedError
from store.names import group_by_key
from store.text import counted, listed

ALIGNMENT = 2  # `nccl_start_alignment_factor`: a flat group is a multiple of this many elements per rank
PARAMETER_ALIGNMENT = 16  # alignment in bytes of a group's parameters but the first, with `parameter_alignment`
SUB_GROUP_SIZE = 10**9  # default of `zero_optimization.sub_group_size`, in elements
STEP = "step"
_NAMED = 6  # most layers that a note names


def retarget(facts: EngineFacts, checkpoint: Checkpoint, zero_stage: int, world_size: int) -> EngineFacts:
    """Return the facts of an engine at ``zero_stage`` on ``world_size`` ranks that trains the checkpoint's model.

    Only the param groups and the configuration of ``facts`` are used, not the layout. Raises MergeError for a
    parameter that the checkpoint lacks, UnsupportedError if DeepSpeed cannot build such an engine."""
    _require_supported(facts, zero_stage)
    config = ds_facts.config_for(facts.ds_config, (facts.zero_stage, facts.world_size), (zero_stage, world_size))
    engine = {
        "zero_stage": zero_stage,
        "world_size": world_size,
        "ds_config": config,
        "clip_grad": clip_grad(facts) if zero_stage else facts.clip_grad,
        "frozen": unoptimized(checkpoint),
        "partition_count": 1,
        "round_robin_gradients": False,
        "param_alignment_paddings": (),
        "sub_groups": (),
    }
    groups = [optimized_params(checkpoint, group.params) for group in facts.param_groups]
    if zero_stage == 3:
        inside = set(chain.from_iterable(groups))
        for fqn, record in checkpoint.tensors.items():
            if record.kind == "trainable" and checkpoint.numel(fqn) and fqn not in inside:
                raise UnsupportedError(
                    f"{fqn} requires gradients but is in no param group, and ZeRO-3 files cannot hold such a "
                    "parameter; write stage 1 or 2"
                )
        engine |= _zero3(checkpoint, groups, world_size, config)
    elif zero_stage:
        engine |= _zero12(checkpoint, groups, zero_stage, world_size, dtype=facts.dtype, config=config)
    return facts.model_copy(update=engine)


def data_order(params: Sequence[str], zero_stage: int, world_size: int, dtype: str, config: Any) -> list[str]:
    """Return a param group's parameters in the order of its flat tensor."""
    dealt = _uses_round_robin(zero_stage, dtype, config)
    return ds_facts.round_robin_order(params, world_size) if dealt else list(params)


def _uses_round_robin(zero_stage: int, dtype: str, config: Any) -> bool:
    configured = bool(config_section(config, "zero_optimization").get("round_robin_gradients"))
    return configured and ds_facts.optimizer_wrapper(zero_stage, dtype, config) == ds_facts.ZERO_12


def _zero12(
    checkpoint: Checkpoint, groups: Sequence[tuple[str, ...]], stage: int, world_size: int, *, dtype: str, config: Any
) -> dict[str, Any]:
    kind = ds_facts.optimizer_wrapper(stage, dtype, config)
    aligned = kind == ds_facts.ZERO_12 and bool(config_section(config, "zero_optimization").get("parameter_alignment"))
    laid, paddings = [], []
    for index, params in enumerate(groups):
        if not params:
            raise UnsupportedError(
                f"param group {index} has no trained parameter, which DeepSpeed does not support at ZeRO stages 1 and "
                "2; write stage 3, or train without the group"
            )
        order = data_order(params, stage, world_size, dtype, config)
        behind = _paddings(checkpoint, order) if aligned else [0] * len(order)
        row = ((fqn, checkpoint.numel(fqn), gap) for fqn, gap in zip(order, behind, strict=True))
        layout, end = ds_facts.place_in_row(row)
        size = -(-end // (ALIGNMENT * world_size)) * ALIGNMENT
        at_ends = ds_facts.partition_paddings(size, end, world_size)
        laid.append(GroupFacts(params=params, layout=layout, partition_size=size, group_paddings=at_ends))
        paddings.append(tuple(behind))
    return {
        "zero_optimizer": kind,
        "param_groups": tuple(laid),
        "partition_count": (world_size,) * len(groups),
        "round_robin_gradients": _uses_round_robin(stage, dtype, config),
        "param_alignment_paddings": tuple(paddings) if kind == ds_facts.ZERO_12 else (),
    }


def _paddings(checkpoint: Checkpoint, order: Sequence[str]) -> list[int]:
    """Return the elements left free behind each parameter to align the next one; none behind the last."""
    itemsize = torch_dtype(checkpoint.record(order[0]).dtype).itemsize
    alignment = PARAMETER_ALIGNMENT // math.gcd(PARAMETER_ALIGNMENT, itemsize)
    return [*(-checkpoint.numel(fqn) % alignment for fqn in order[:-1]), 0]


def _zero3(checkpoint: Checkpoint, groups: Sequence[tuple[str, ...]], world_size: int, config: Any) -> dict[str, Any]:
    limit = config_section(config, "zero_optimization").get("sub_group_size")
    limit = SUB_GROUP_SIZE if limit is None else int(limit)
    sub_groups = []
    for index, params in enumerate(groups):
        slices = [(fqn, ds_facts.slice_numel(checkpoint.numel(fqn), world_size)) for fqn in params]
        for members in _cut(slices, limit):
            numels = tuple(numel for _, numel in members)
            names = tuple(fqn for fqn, _ in members)
            sub_groups.append(SubGroupFacts(params=names, param_group=index, partition_numels=numels))
    return {
        "zero_optimizer": ds_facts.ZERO_3,
        "param_groups": tuple(GroupFacts(params=params) for params in groups),
        "partition_count": world_size,
        "sub_groups": tuple(sub_groups),
    }


def _cut(slices: Sequence[tuple[str, int]], limit: int) -> list[list[tuple[str, int]]]:
    """Split a param group into sub-groups: each ends with the slice that reaches the limit."""
    out: list[list[tuple[str, int]]] = []
    filled = limit
    for fqn, numel in slices:
        if filled >= limit:
            out.append([])
            filled = 0
        out[-1].append((fqn, numel))
        filled += numel
    return out


def optimized_params(checkpoint: Checkpoint, params: Iterable[str]) -> tuple[str, ...]:
    """Return the parameters that DeepSpeed optimizes: trained, and with at least one element."""
    return tuple(fqn for fqn in params if checkpoint.record(fqn).kind == "trainable" and checkpoint.numel(fqn))


def unoptimized(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the parameters that DeepSpeed does not optimize, in model order."""
    tensors = checkpoint.tensors.items()
    return tuple(fqn for fqn, one in tensors if one.kind == "frozen" or (one.kind == "trainable" and 0 in one.shape))


def _require_supported(facts: EngineFacts, zero_stage: int) -> None:
    """Raise UnsupportedError for variants of DeepSpeed with another layout."""
    zero = config_section(facts.ds_config, "zero_optimization")
    offloads = [config_section(zero, name) for name in ("offload_optimizer", "offload_param")]
    kind = str(config_section(facts.ds_config, "optimizer").get("type", "")).lower()
    variants = {
        "tensor or pipeline parallelism": facts.mp_world_size != 1,
        "zero_optimization.zenflow": zero.get("zenflow") is not None,
        "zero_optimization.mics_shard_size": zero_stage == 3 and int(zero.get("mics_shard_size") or 0) > 0,
        "offload to NVMe": any(one.get("device") == "nvme" for one in offloads),
        "SuperOffload": any(one.get("super_offload") for one in offloads),
        "the optimizer Muon at stage 3": zero_stage == 3 and kind == "muon",
    }
    if found := [name for name, there in variants.items() if there]:
        raise UnsupportedError(
            f"the run's configuration has {' and '.join(found)}, which is not supported at another stage or world "
            "size; write the stage and world size of the run, or layout 'universal' or 'hf'"
        )


def clip_grad(facts: EngineFacts) -> float:
    """Return the gradient clipping; an engine without ZeRO does not keep it in its optimizer."""
    return facts.clip_grad if facts.zero_stage else gradient_clipping(facts.ds_config)


def flat_partitions(facts: EngineFacts) -> list[tuple[int, tuple[str, ...]]]:
    """Return (param group, its parameters in the order of the data) of every flat partition; none without ZeRO."""
    if facts.zero_stage == 0:
        return []
    if facts.zero_stage == 3:
        return [(one.param_group, one.params) for one in facts.sub_groups]
    return [(i, tuple(placed.fqn for placed in group.layout)) for i, group in enumerate(facts.param_groups)]


def with_common_steps(
    checkpoint: Checkpoint, shared: Iterable[tuple[int, Sequence[str]]]
) -> tuple[Checkpoint, tuple[str, ...]]:
    """Return the checkpoint with equal scalars for parameters that share a flat partition, and notes on what changed.

    The certificate records the steps (:class:`merger.checkpoint.StepsCertificate`). Parameters without optimizer state
    keep none. UnsupportedError if a scalar other than ``step`` differs. ``shared``: as of :func:`flat_partitions`."""
    scalars = dict(checkpoint.framework_state["scalars"])
    notes: dict[str, None] = {}
    chosen: list[tuple[int, float, list[tuple[str, float]]]] = []
    for group, fqns in shared:
        known = [fqn for fqn in fqns if has_state(checkpoint, fqn)]
        missing = [fqn for fqn in fqns if not has_state(checkpoint, fqn)]
        if known:
            _require_same_but_step(checkpoint, known)
            steps = {fqn: scalars[fqn][STEP] for fqn in known if STEP in scalars.get(fqn, {})}
            common = dict(scalars.get(known[0], {}))
            if steps:
                common[STEP] = common_step(checkpoint, steps)
                steps |= {fqn: checkpoint.stored_steps[fqn] for fqn in steps if fqn in checkpoint.stored_steps}
                had = [(checkpoint.record(fqn).layer, float(step)) for fqn, step in steps.items()]
                if any(step != float(common[STEP]) for _, step in had):
                    notes[_note_on_steps(checkpoint, group, steps, float(common[STEP]))] = None
                had += [(checkpoint.record(fqn).layer, 0.0) for fqn in missing]
                chosen.append((group, float(common[STEP]), had))
            scalars |= dict.fromkeys(known, common)
        if known and missing:
            note = (
                f"the optimizer had no state yet for {layers_named(checkpoint, missing)} "
                f"({counted(len(missing), 'parameter')} of param group {group}): their moments start as zeros, at the "
                "step of the others, which share their flat partition"
            )
            notes[note] = None
    state = {**checkpoint.framework_state, "scalars": scalars}
    certificate = with_steps(checkpoint.certificate, chosen)
    return replace(checkpoint, framework_state=state, certificate=certificate), tuple(notes)


def has_state(checkpoint: Checkpoint, fqn: str) -> bool:
    """Return whether the optimizer kept anything for a parameter."""
    state = checkpoint.framework_state
    return bool(state["scalars"].get(fqn) or state["slots"].get(fqn))


def common_step(checkpoint: Checkpoint, fqns: Iterable[str]) -> Any:
    """Return the step that parameters share, as the optimizer stores it; None if none has one.

    If they differ, it is the newest that any of them has in the run whose run state is used."""
    fqns, scalars = list(fqns), checkpoint.framework_state["scalars"]
    stored = [scalars[fqn][STEP] for fqn in fqns if STEP in scalars.get(fqn, {})]
    in_run = [checkpoint.run_steps[fqn] for fqn in fqns if fqn in checkpoint.run_steps]
    several = len({float(step) for step in stored}) > 1
    return max(in_run if several and in_run else stored, key=float, default=None)


def layers_named(checkpoint: Checkpoint, fqns: Iterable[str]) -> str:
    """Return the layers of parameters for messages."""
    return listed(dict.fromkeys(checkpoint.record(fqn).layer for fqn in fqns), _NAMED)


def _require_same_but_step(checkpoint: Checkpoint, fqns: Sequence[str]) -> None:
    scalars = checkpoint.framework_state["scalars"]
    first = scalars.get(fqns[0], {})
    for fqn in fqns[1:]:
        other = scalars.get(fqn, {})
        if first is other:
            continue
        for key in sorted(first.keys() | other.keys()):
            absent = key not in first or key not in other
            if absent or (key != STEP and not same_value(first[key], other[key])):
                raise UnsupportedError(
                    f"{fqns[0]} and {fqn} share a flat partition of DeepSpeed, but their optimizer state {key!r} "
                    f"differs: {first.get(key, 'none')} and {other.get(key, 'none')}; merge them from one save, or "
                    "write a layout with state by parameter, such as 'torch'"
                )


def same_value(one: Any, other: Any) -> bool:
    """Return whether two values of an optimizer's state or param groups are equal; tensors and numbers by value."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return (one is not None and other is not None) and torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    return bool(one == other)


def _note_on_steps(checkpoint: Checkpoint, group: int, steps: Mapping[str, Any], chosen: float) -> str:
    others = group_by_key((float(step), fqn) for fqn, step in steps.items() if float(step) != chosen)
    by_step = (f"{step:g} in {layers_named(checkpoint, fqns)}" for step, fqns in sorted(others.items()))
    step_list = listed(by_step, 4, "; ")
    return (
        f"DeepSpeed keeps one optimizer step for parameters that share a flat partition: those of param group {group} "
        f"get the run's, {chosen:g}; it was {step_list}. Only Adam's bias correction depends on it"
    )
