"""One optimizer step for each flat partition, where the parameters that share it bring several.

DeepSpeed keeps one step count for a whole flat partition. The layers of a composite may have been saved with
different ones: then the step of the run whose counters and schedule go on is taken, and certificate and notes say so.
It knows no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from merger.checkpoint import Checkpoint
from merger.layouts.deepspeed_facts import EngineFacts
from merger.optimizer_steps import chosen_steps, with_steps
from store.errors import UnsupportedError
from store.text import counted, listed

STEP = "step"
_NAMED = 6
"""Layers that a note names before it only counts them."""


def flats(facts: EngineFacts) -> list[tuple[int, tuple[str, ...]]]:
    """(param group, its parameters in the order of the data) of every flat partition; none without ZeRO."""
    if facts.zero_stage == 0:
        return []
    if facts.zero_stage == 3:
        return [(one.param_group, one.params) for one in facts.sub_groups]
    return [(i, tuple(placed.fqn for placed in group.layout)) for i, group in enumerate(facts.param_groups)]


def with_common_steps(
    checkpoint: Checkpoint, shared: Iterable[tuple[int, Sequence[str]]]
) -> tuple[Checkpoint, tuple[str, ...]]:
    """The checkpoint with the same scalars for all parameters that share a flat partition, and notes on what changed;
    its certificate has the steps (:class:`merger.optimizer_steps.StepsCertificate`).

    shared: as :func:`flats` gives them. Parameters that the optimizer keeps nothing at all for stay without.
    UnsupportedError, naming it, for a scalar other than ``step`` that differs.
    """
    scalars = dict(checkpoint.framework_state["scalars"])
    notes: dict[str, None] = {}
    chosen: list[tuple[int, float, list[tuple[str, float]]]] = []
    for group, fqns in shared:
        known = [fqn for fqn in fqns if has_state(checkpoint, fqn)]
        if known:
            _require_same_but_step(checkpoint, known)
            own = {fqn: scalars[fqn][STEP] for fqn in known if STEP in scalars.get(fqn, {})}
            common = dict(scalars.get(known[0], {}))
            if own:
                common[STEP] = common_step(checkpoint, own)
                had = [(checkpoint.record(fqn).layer, float(step)) for fqn, step in own.items()]
                chosen.append((group, float(common[STEP]), had))
                if any(step != chosen[-1][1] for _, step in had):
                    notes[_note_on_steps(checkpoint, group, own, float(common[STEP]))] = None
            scalars |= dict.fromkeys(known, common)
        if known and len(known) < len(fqns):
            notes[_note_on_missing(checkpoint, group, [fqn for fqn in fqns if fqn not in set(known)])] = None
    state = {**checkpoint.framework_state, "scalars": scalars}
    certificate = with_steps(checkpoint.certificate, chosen_steps(chosen))
    return replace(checkpoint, framework_state=state, certificate=certificate), tuple(notes)


def has_state(checkpoint: Checkpoint, fqn: str) -> bool:
    """Whether the optimizer kept anything for a parameter."""
    state = checkpoint.framework_state
    return bool(state["scalars"].get(fqn) or state["slots"].get(fqn))


def common_step(checkpoint: Checkpoint, fqns: Iterable[str]) -> Any:
    """The one step for parameters that share it, as the optimizer kept it; None where none has one.

    Where they bring several, it is the newest that any of them has in the run that goes on.
    """
    fqns = list(fqns)
    scalars = checkpoint.framework_state["scalars"]
    own = [scalars[fqn][STEP] for fqn in fqns if STEP in scalars.get(fqn, {})]
    run = [checkpoint.run_steps[fqn] for fqn in fqns if fqn in checkpoint.run_steps]
    several = len({float(step) for step in own}) > 1
    return max(run if several and run else own, key=float, default=None)


def layers_named(checkpoint: Checkpoint, fqns: Iterable[str]) -> str:
    """The layers of parameters, for people."""
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
                    f"{fqns[0]} and {fqn} share a flat partition of DeepSpeed's, which has one {key!r} for both, but "
                    f"their optimizer state {key!r} differs: {_shown(first, key)} and {_shown(other, key)}; merge "
                    "them from one save, or write a layout with state by parameter, such as 'torch'"
                )


def same_value(one: Any, other: Any) -> bool:
    """Whether two scalars of an optimizer's state are equal; tensors and numbers compare by value."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    return bool(one == other)


def _shown(scalars: Mapping[str, Any], key: str) -> str:
    return str(scalars[key]) if key in scalars else "none"


def _note_on_steps(checkpoint: Checkpoint, group: int, own: Mapping[str, Any], chosen: float) -> str:
    others: dict[float, list[str]] = {}
    for fqn, step in own.items():
        if float(step) != chosen:
            others.setdefault(float(step), []).append(fqn)
    told = listed((f"{step:g} in {layers_named(checkpoint, fqns)}" for step, fqns in sorted(others.items())), 4, "; ")
    return (
        f"DeepSpeed keeps one optimizer step for parameters that share a flat partition: those of param group {group} "
        f"get the run's, {chosen:g}; it was {told}. Only Adam's bias correction depends on it"
    )


def _note_on_missing(checkpoint: Checkpoint, group: int, fqns: Sequence[str]) -> str:
    return (
        f"the optimizer had no state yet for {layers_named(checkpoint, fqns)} ({counted(len(fqns), 'parameter')} of "
        f"param group {group}): their moments start as zeros, at the step of the others, which share their flat "
        "partition"
    )
