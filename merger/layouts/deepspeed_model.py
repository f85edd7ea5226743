"""Model states of a DeepSpeed checkpoint: working weights, what the optimizer does not hold, counters, client state.

Every file of model states is made here, whatever the ZeRO stage; it does not know optimizer files.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch
from deepspeed.checkpoint import constants

from merger.checkpoint import SLOT_OF_KIND, Checkpoint
from merger.layouts.deepspeed_facts import EngineFacts
from merger.layouts.deepspeed_zero3 import frozen_slices
from merger.layouts.plain import optimizer_state
from merger.runstate import portable
from merger.stored import Stored, whole
from merger.tensors import torch_dtype

CLIENT_KEY = "driftpoint"
"""Where the client state holds what DeepSpeed itself does not save."""


def model_states(facts: EngineFacts, checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    """What ``engine.save_checkpoint`` writes into a rank's file of model states, client state included."""
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
        **portable(checkpoint.client_state),  # where DeepSpeed puts it: among its own keys, and after them
        CLIENT_KEY: client_state(checkpoint, _ranks_in_file(facts, checkpoint, rank)),
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


def client_state(checkpoint: Checkpoint, ranks: Iterable[int]) -> dict[str, Any]:
    """``rng`` and ``user`` by rank that was saved; of which save and step; whether it is exact, and what is not.

    A run may hand all of it on to later checkpoints of its own, so the step has to be compared with theirs.
    """
    states, certificate = checkpoint.run_states, checkpoint.certificate
    return {
        "save": certificate.save,
        "step": checkpoint.framework_state["counters"]["global_steps"],
        "exact": certificate.exact,
        "units": [] if certificate.exact else [asdict(unit) for unit in certificate.units],
        "ranks": {rank: {"rng": portable(states[rank].rng), "user": portable(states[rank].user)} for rank in ranks},
    }


def _ranks_in_file(facts: EngineFacts, checkpoint: Checkpoint, rank: int) -> list[int]:
    """Where each rank has a file, it holds the saved ranks that leave the same remainder: its own if there are as
    many as there were, and none is lost or written twice if not."""
    saved = sorted(checkpoint.run_states)
    return [other for other in saved if other % facts.world_size == rank] if facts.zero_stage == 3 else saved
