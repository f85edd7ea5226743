"""The optimizer's hyperparameters and counters as torch's own optimizers have them, whatever was training.

DeepSpeed's Adam variants keep fewer hyperparameters than torch's and count steps in plain numbers; torch's AdamW
refuses or ignores such a state. What is added are torch's defaults, which mean the same. It does not know files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from merger.checkpoint import Checkpoint
from merger.optimizer_steps import ChosenStep, changed_steps, chosen_steps, with_steps
from merger.runstate import portable
from store.errors import UnsupportedError

_ADAMS = frozenset({"FusedAdam", "DeepSpeedCPUAdam"})
"""They compute what torch's AdamW does, or its Adam, by their ``adam_w_mode``."""

_UNTOLD = frozenset({"adam", "adamw", "unknown"})
"""What a foreign checkpoint may call them: it has the configuration's word for it, or none."""

STEP = "step"


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
        group.pop(STEP, None)
        filled.append({**defaults, **group})
    note = (
        f"the run used one of DeepSpeed's own Adams: its state is laid out for torch.optim.{kind.__name__}, which "
        "computes the same up to rounding; load it with that one"
    )
    if not _says_type(checkpoint.facts):
        note += ". The configuration names no optimizer, so nothing says whether its weight decay was decoupled "
        note += "(adam_w_mode): it is taken to be, as it is by default"
    return filled, (note,)


def with_torch_steps(checkpoint: Checkpoint) -> tuple[Checkpoint, tuple[str, ...]]:
    """The checkpoint with step counts as torch's optimizers have them, a float32 tensor for each parameter; notes.

    Each parameter keeps its own, but where FusedAdam counted for a whole param group in one parameter: there all get
    the group's, and in a composite, to which that parameter may have come from another save, the run's; then the
    certificate says so (:class:`merger.optimizer_steps.StepsCertificate`).
    """
    if not _is_theirs(checkpoint):
        return checkpoint, ()
    scalars = {fqn: dict(kept) for fqn, kept in checkpoint.framework_state["scalars"].items()}
    chosen: list[tuple[int, float, list[tuple[str, float]]]] = []
    for number, group in enumerate(checkpoint.framework_state["param_groups"]):
        own = {fqn: float(scalars[fqn][STEP]) for fqn in group["params"] if STEP in scalars.get(fqn, {})}
        if own and _counts_in_one(checkpoint, group["hyper"]):
            run = [float(checkpoint.run_steps[fqn]) for fqn in group["params"] if fqn in checkpoint.run_steps]
            common = max(run or own.values())
            if run:
                had = [(checkpoint.record(fqn).layer, step) for fqn, step in own.items()]
                chosen.append((number, common, had))
            own = {fqn: common for fqn in group["params"] if scalars.get(fqn)}
        for fqn, step in own.items():
            scalars[fqn][STEP] = torch.tensor(step)
    state = {**checkpoint.framework_state, "scalars": scalars}
    certificate = with_steps(checkpoint.certificate, chosen_steps(chosen)) if chosen else checkpoint.certificate
    found = replace(checkpoint, framework_state=state, certificate=certificate)
    return found, tuple(_note_on_steps(one) for one in changed_steps(certificate))


def _note_on_steps(one: ChosenStep) -> str:
    return (
        f"FusedAdam counts the steps of a param group in one of its parameters: all those of param group "
        f"{one.param_group} get the run's, {one.chosen:g}, whichever save they are of. Only Adam's bias correction "
        "depends on it"
    )


def _is_theirs(checkpoint: Checkpoint) -> bool:
    name = _name(checkpoint)
    if name in _ADAMS:
        return True
    # A configuration says AdamW for DeepSpeed's and for torch's alike, and nothing of an optimizer that the user made.
    # Hyperparameters tell: torch's have no bias_correction, Lamb's have more.
    return (name or "unknown").lower() in _UNTOLD and any(
        "bias_correction" in group["hyper"] and "max_coeff" not in group["hyper"]
        for group in checkpoint.framework_state["param_groups"]
    )


def _counts_in_one(checkpoint: Checkpoint, hyper: Mapping[str, Any]) -> bool:
    """Whether one parameter has the count of the whole group: FusedAdam's way, where ZeRO does not give it one flat
    partition at a time. DeepSpeedCPUAdam, which alone has ``amsgrad``, counts for each parameter."""
    name = _name(checkpoint)
    fused = name == "FusedAdam" if name in _ADAMS else "amsgrad" not in hyper
    return fused and not checkpoint.facts.get("zero_stage")


def _name(checkpoint: Checkpoint) -> str | None:
    name = checkpoint.framework_state.get("optimizer") or checkpoint.facts.get("optimizer")
    return None if name is None else str(name)


def _says_type(facts: Mapping[str, Any]) -> bool:
    section = _section(facts)
    return section is not None and section.get("type") is not None


def _section(facts: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What DeepSpeed's configuration says of the optimizer."""
    config = facts.get("ds_config")
    section = config.get("optimizer") if isinstance(config, Mapping) else None
    return section if isinstance(section, Mapping) else None


def _decoupled(facts: Mapping[str, Any]) -> bool:
    """Whether weight decay was decoupled: DeepSpeed takes both ``Adam`` and ``AdamW`` for it unless told otherwise."""
    section = _section(facts)
    if section is None or str(section.get("type", "")).lower() == "adamw":
        return True
    params = section.get("params")
    return bool(params.get("adam_w_mode", True)) if isinstance(params, Mapping) else True
