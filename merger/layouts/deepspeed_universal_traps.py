"""What DeepSpeed's loaders of universal checkpoints leave out or get wrong: found in a checkpoint, said in notes.

Checked with DeepSpeed 0.19.8 (``runtime/base_optimizer.py`` and ``runtime/zero/stage3.py``). The lines that load the
checkpoint make good what can be made good after loading; what cannot is said with another way out. It plans no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from merger.checkpoint import Checkpoint
from merger.layouts.deepspeed_config import zero_section
from merger.layouts.deepspeed_facts import EngineFacts
from merger.layouts.deepspeed_retarget import ALIGNMENT
from merger.layouts.deepspeed_steps import STEP, common_step, layers_named, same_value
from store.text import counted, listed

Groups = Sequence[Sequence[str]]

MODEL_FILE = "mp_rank_00_model_states.pt"

_ADAM = ("exp_avg", "exp_avg_sq")
_LOAD_HYPER = (
    "from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler",
    "from deepspeed.runtime.zero.config import ZeroStageEnum",
    "with torch.serialization.safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum]):",
    "    kept = torch.load(saved + '/zero/optimizer_state.pt', weights_only=True)['param_groups']",
)
"""Reads the hyperparameters, and of all objects only the three kinds that are in this file."""

_RANKS = 4096
"""World sizes beyond which a param group without elements on some rank is not looked for."""


def load_lines(checkpoint: Checkpoint, groups: Groups, tag: str) -> tuple[str, ...]:
    """Python that loads the checkpoint completely, at any stage; ``{out}`` stands for the directory."""
    lines = [f"saved = {{out!r}} + '/{tag}'"]
    if _left_alone(checkpoint, groups):
        read = f"torch.load(saved + '/{MODEL_FILE}', weights_only=True)['module']"
        lines.append(f"model.load_state_dict({read})  # before initialize")
    lines.append(f'engine.load_checkpoint({{out!r}}, tag={tag!r})  # with "checkpoint": {{{{"load_universal": true}}}}')
    if _hyper_differs(checkpoint):
        lines.extend(_LOAD_HYPER)
        lines.append("for group, own in zip(engine.optimizer.optimizer.param_groups, kept, strict=True):")
        lines.append("    group.update({{key: value for key, value in own.items() if key != 'params'}})")
    if _step_is_a_tensor(checkpoint, groups):
        lines.append("for state in engine.optimizer.optimizer.state.values():")
        lines.append("    state['step'] = state['step'].clone()")
    return tuple(lines)


def notes_on_loading(checkpoint: Checkpoint, facts: EngineFacts, groups: Groups, tag: str) -> tuple[str, ...]:
    """What to know before loading, each with its way out."""
    found = (
        _note_on_what_is_left_alone(checkpoint, groups, tag),
        _note_on_round_robin(facts),
        _note_on_small_groups(checkpoint, groups),
        _note_on_hyper(checkpoint),
        _note_on_the_shared_step(checkpoint, groups),
        _note_on_other_steps(checkpoint, groups),
        _note_on_other_optimizers(checkpoint, groups),
    )
    return tuple(note for note in found if note)


def _left_alone(checkpoint: Checkpoint, groups: Groups) -> list[str]:
    """Tensors that no param group holds: the loaders touch none of them."""
    inside = set(chain.from_iterable(groups))
    return [fqn for fqn in checkpoint.tensors if fqn not in inside and checkpoint.numel(fqn)]


def _note_on_what_is_left_alone(checkpoint: Checkpoint, groups: Groups, tag: str) -> str | None:
    left = _left_alone(checkpoint, groups)
    if not left:
        return None
    return (
        "a universal load restores what the optimizer trains and nothing else: "
        f"{counted(len(left), 'frozen parameter or buffer', 'frozen parameters and buffers')} (in "
        f"{layers_named(checkpoint, left)}) {'stays' if len(left) == 1 else 'stay'} as the model was built. Before "
        f"deepspeed.initialize run model.load_state_dict(torch.load('.../{tag}/{MODEL_FILE}', "
        "weights_only=True)['module'])"
    )


def _note_on_round_robin(facts: EngineFacts) -> str | None:
    zero = zero_section(facts.ds_config)
    if not zero.get("round_robin_gradients") or zero.get("parameter_alignment"):
        return None
    return (
        "the run had round_robin_gradients on: DeepSpeed 0.19's ZeRO-1/2 loads a universal checkpoint into the wrong "
        "places then, without an error. Load it with round_robin_gradients off (or at stage 3), or write layout "
        "'deepspeed' at the stage and world size you need"
    )


def _note_on_small_groups(checkpoint: Checkpoint, groups: Groups) -> str | None:
    numels = [sum(checkpoint.numel(fqn) for fqn in params) for params in groups]
    limits = [(ranks, i) for i, numel in enumerate(numels) if (ranks := _ranks_that_hold(numel)) is not None]
    if not limits:
        return None
    ranks, group = min(limits)
    return (
        f"param group {group} has only {counted(numels[group], 'element')}: on more than {counted(ranks, 'rank')} one "
        "of them holds nothing of it, and DeepSpeed's ZeRO-1/2 stops with an IndexError there. Join the group to "
        "another, load at stage 3, or write layout 'deepspeed'"
    )


def _ranks_that_hold(numel: int) -> int | None:
    """The most ranks up to which all hold a part of a flat group; None where that is more than anybody has."""
    for ranks in range(1, _RANKS):
        size = -(-numel // (ALIGNMENT * (ranks + 1))) * ALIGNMENT
        if size * ranks >= numel:
            return ranks
    return None


def _hyper_differs(checkpoint: Checkpoint) -> list[str]:
    """Hyperparameters that are not those of the first param group everywhere."""
    hypers = [group["hyper"] for group in checkpoint.framework_state["param_groups"]]
    keys = dict.fromkeys(key for hyper in hypers for key in hyper)
    return [key for key in keys if not all(_same(hypers[0].get(key), hyper.get(key)) for hyper in hypers[1:])]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return one is other or (one is not None and other is not None and same_value(one, other))


def _note_on_hyper(checkpoint: Checkpoint) -> str | None:
    differing = _hyper_differs(checkpoint)
    if not differing:
        return None
    return (
        f"the param groups differ in {', '.join(differing)}, and DeepSpeed's ZeRO-3 gives every group those of the "
        "first when it loads a universal checkpoint. Set them afterwards from zero/optimizer_state.pt, as the lines "
        "that load it do, or write layout 'deepspeed' at the stage and world size you need"
    )


def _step_is_a_tensor(checkpoint: Checkpoint, groups: Groups) -> bool:
    return isinstance(common_step(checkpoint, chain.from_iterable(groups)), torch.Tensor)


def _note_on_the_shared_step(checkpoint: Checkpoint, groups: Groups) -> str | None:
    if not _step_is_a_tensor(checkpoint, groups):
        return None
    return (
        "DeepSpeed's ZeRO-3 puts one and the same step tensor into every sub-group when it loads a universal "
        "checkpoint, and with several param groups or sub-groups each of them then counts it up. Give each its own "
        "afterwards, as the lines that load it do, or write layout 'deepspeed'"
    )


def _note_on_other_steps(checkpoint: Checkpoint, groups: Groups) -> str | None:
    steps = [common_step(checkpoint, params) for params in groups]
    if len({float(step) for step in steps if step is not None}) < 2:
        return None
    common = float(common_step(checkpoint, chain.from_iterable(groups)))
    told = listed(("none" if step is None else f"{float(step):g}" for step in steps), 6)
    return (
        f"the param groups are at different optimizer steps ({told}), and DeepSpeed's ZeRO-3 takes {common:g} for "
        "all when it loads a universal checkpoint; write layout 'deepspeed' to keep them"
    )


def _note_on_other_optimizers(checkpoint: Checkpoint, groups: Groups) -> str | None:
    kept = {slot for params in groups for fqn in params for slot in checkpoint.slots(fqn)}
    if common_step(checkpoint, chain.from_iterable(groups)) is not None:
        kept.add(STEP)
    if kept == {*_ADAM, STEP}:
        return None
    return (
        f"the optimizer keeps {', '.join(sorted(kept)) or 'nothing'}, and DeepSpeed's ZeRO-3 loads universal "
        "checkpoints of Adam's kind "
        f"only ({', '.join(_ADAM)}, {STEP}); load it at stage 1 or 2, or write layout 'deepspeed'"
    )
