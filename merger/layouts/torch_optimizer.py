"""The optimizer's hyperparameters and counters as torch's own optimizers have them, whatever was training.

DeepSpeed's Adam variants keep fewer hyperparameters than torch's and count steps in plain numbers; torch's AdamW
refuses or ignores such a state. What is added are torch's defaults, which mean the same. It does not know files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from merger.checkpoint import Checkpoint
from merger.runstate import portable
from store.errors import UnsupportedError

_ADAMS = frozenset({"FusedAdam", "DeepSpeedCPUAdam"})
"""They compute what torch's AdamW does, or its Adam, by their ``adam_w_mode``."""


def torch_hyper(checkpoint: Checkpoint) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """(hyperparameters of each param group, what was assumed). UnsupportedError where torch's has no such setting."""
    groups = [dict(portable(group["hyper"])) for group in checkpoint.framework_state["param_groups"]]
    if not _is_theirs(checkpoint):
        return groups, ()
    kind = torch.optim.AdamW if _decoupled(checkpoint.facts) else torch.optim.Adam
    defaults = kind([torch.zeros(1)]).defaults
    filled = []
    for group in groups:
        if not group.pop("bias_correction", True):
            raise UnsupportedError(
                "the run used Adam without bias correction, which torch's optimizers cannot do; merge it with layout "
                "deepspeed"
            )
        group.pop("step", None)
        filled.append({**defaults, **group})
    note = (
        f"the run used one of DeepSpeed's own Adams: its state is laid out for torch.optim.{kind.__name__}, which "
        "computes the same up to rounding; load it with that one"
    )
    return filled, (note,)


def torch_scalars(checkpoint: Checkpoint, group: Mapping[str, Any], fqn: str) -> dict[str, Any]:
    """What the optimizer keeps for a parameter of a param group besides its slots; ``step`` as a tensor."""
    kept = checkpoint.framework_state["scalars"]
    found = dict(portable(kept.get(fqn, {})))
    if not found or not _is_theirs(checkpoint):
        return found
    # FusedAdam counts in the last parameter of a group only, and means all of them.
    steps = [kept[other]["step"] for other in group["params"] if "step" in kept.get(other, {})]
    return {**found, "step": torch.tensor(float(max(steps)))} if steps else found


def _is_theirs(checkpoint: Checkpoint) -> bool:
    name = checkpoint.framework_state.get("optimizer") or checkpoint.facts.get("optimizer")
    if name is not None:
        return name in _ADAMS
    # Where a checkpoint names no optimizer its hyperparameters do: torch's have no bias_correction, Lamb's have more.
    return any(
        "bias_correction" in group["hyper"] and "max_coeff" not in group["hyper"]
        for group in checkpoint.framework_state["param_groups"]
    )


def _decoupled(facts: Mapping[str, Any]) -> bool:
    """Whether weight decay was decoupled: DeepSpeed takes both ``Adam`` and ``AdamW`` for it unless told otherwise."""
    config = facts.get("ds_config")
    section = config.get("optimizer") if isinstance(config, Mapping) else None
    if not isinstance(section, Mapping) or str(section.get("type", "")).lower() == "adamw":
        return True
    params = section.get("params")
    return bool(params.get("adam_w_mode", True)) if isinstance(params, Mapping) else True
