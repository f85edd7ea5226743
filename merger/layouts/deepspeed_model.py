"""Build the model states, flat partitions and ZeRO-3 optimizer states of DeepSpeed checkpoints."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from deepspeed.checkpoint import constants
from deepspeed.runtime.zero.config import ZeroStageEnum

from merger.checkpoint import Checkpoint, Placement, PlannedTensor, plan_parameter, portable_run_states, to_portable
from merger.layouts.base import canonical_names, share_tied
from merger.layouts.deepspeed_facts import EngineFacts, Piece, slice_numel, slice_pieces
from merger.layouts.deepspeed_reshard import flat_partitions, has_state
from merger.layouts.torch_dcp import optimizer_state
from merger.tensors import torch_dtype
from store.errors import MergeError
from store.names import FROZEN, WEIGHTS, Fragment

CLIENT_KEY = "driftpoint"  # key of the client state for state that DeepSpeed does not save


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
    # At ZeRO-3 each rank has a file. It holds the run state of the saved ranks of the same remainder: its own if the
    # world size is unchanged, and none is lost or written twice if not.
    saved = [one for one in sorted(checkpoint.run_states) if zero != 3 or one % facts.world_size == rank]
    return {
        "module": OrderedDict(
            share_tied(canonical_names(checkpoint), lambda fqn: _working_copy(facts, checkpoint, fqn))
        ),
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
        constants.CHECKPOINT_PARALLEL_DIMS: {
            constants.CHECKPOINT_PP_DEGREE: 1,
            constants.CHECKPOINT_TP_DEGREE: facts.mp_world_size,
        },
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
        "ranks": portable_run_states(checkpoint, ranks),
    }


def zero3_states(facts: EngineFacts, checkpoint: Checkpoint, kept: "Sequence[FlatState]", rank: int) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` of a rank without the loss scaler. ``kept``: by sub-group."""
    masters, states = [], []
    for sub_group, state in zip(facts.sub_groups, kept, strict=True):
        sizes = zip(sub_group.params, sub_group.partition_numels, strict=True)
        pieces = slice_pieces(((fqn, checkpoint.numel(fqn), part) for fqn, part in sizes), rank)
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
    placed = [
        Placement(Fragment(one.fqn, slot, one.start, one.stop - one.start), one.offset)
        for one in pieces
        if one.start < one.stop
    ]
    return PlannedTensor((numel,), dtype, tuple(sorted(placed, key=lambda one: one.offset)))


def flat_slots(state: FlatState, pieces: Sequence[Piece], numel: int) -> dict[str, Any]:
    """Return the base optimizer's state of one rank's flat partition: its scalars, then its slots."""
    out: dict[str, Any] = dict(to_portable(state.scalars))
    stored = [piece for piece in pieces if piece.fqn in state.known]
    for slot, dtype in state.slots.items():
        out[slot] = flat_tensor(slot, stored, numel, dtype)
    return out


def base_optimizer_state(
    checkpoint: Checkpoint, states: Sequence[dict[str, Any]], members: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return ``state_dict()`` of the base optimizer.

    ``states``: of each flat partition. ``members``: indices of its flat partitions, by param group."""
    groups = checkpoint.framework_state["param_groups"]
    if len(groups) != len(members):
        raise MergeError(
            f"the run had {len(groups)} param groups, but its layout has {len(members)}; merge another save"
        )
    return {
        "state": {index: state for index, state in enumerate(states) if state},
        "param_groups": [
            {**to_portable(group["hyper"]), "params": list(indices)}
            for group, indices in zip(groups, members, strict=True)
        ],
    }


def _flat_dtype(checkpoint: Checkpoint, slot: str, fqns: Sequence[str]) -> torch.dtype:
    dtypes = {checkpoint.dtype(fqn, slot) for fqn in fqns}
    if len(dtypes) > 1:
        raise MergeError(f"parameters of one flat partition have {slot} in several dtypes: {sorted(dtypes)}")
    return torch_dtype(dtypes.pop()) if dtypes else torch.float32


def _frozen_fragment(facts: EngineFacts, checkpoint: Checkpoint, rank: int, fqn: str) -> PlannedTensor | torch.Tensor:
    """Plan a parameter that the optimizer does not hold: at ZeRO-3 a rank's slice, padding included."""
    if facts.zero_stage != 3:
        return _working_copy(facts, checkpoint, fqn)
    part = slice_numel(checkpoint.numel(fqn), facts.world_size)
    pieces = slice_pieces([(fqn, checkpoint.numel(fqn), part)], rank)
    return flat_tensor(FROZEN, pieces, part, torch_dtype(checkpoint.dtype(fqn, FROZEN)))
