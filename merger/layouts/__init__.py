"""Select the layout for a target and the framework that was training."""

from collections.abc import Mapping
from functools import partial

from merger.checkpoint import Checkpoint
from merger.layouts.base import Layout, Target
from store.errors import UnsupportedError, UsageError

_LAYOUTS_OF: Mapping[str, tuple[str, ...]] = {
    "zero_stage": ("deepspeed", "trainer"),
    "world_size": ("deepspeed", "trainer"),
    "dtype": ("hf",),
    "shard_bytes": ("hf", "dcp"),
    "files": ("hf", "trainer"),
}
"""Layouts that use a setting of a target."""

_NATIVE = {"deepspeed": "deepspeed", "torch": "torch", "fsdp2": "dcp"}  # layout that each framework loads natively
_OPTIONS = {"shard_bytes": "--shard-size"}  # command-line option of a setting, if it is not the setting's name


def layout_for(checkpoint: Checkpoint, target: Target) -> Layout:
    """Return the layout. UnsupportedError if there is none; UsageError for settings that it does not use."""
    name, beside = target.layout, checkpoint.files
    if name == "native":  # a Trainer's folder for a Trainer's source
        of_trainer = target.files is None and beside is not None and (beside / "trainer_state.json").is_file()
        name = "trainer" if of_trainer else _native(checkpoint)
    _require_used(checkpoint, target, name)
    if name == "torch":
        from merger.layouts.torch_state_dict import torch_layout

        return torch_layout
    if name == "hf":
        from merger.layouts.huggingface import hf_layout

        return hf_layout
    if name == "dcp":
        from merger.layouts.torch_dcp import dcp_layout

        return dcp_layout
    if name == "trainer":
        from merger.layouts.trainer import trainer_layout

        return partial(trainer_layout, _deepspeed_layout() if _native(checkpoint) == "deepspeed" else None)
    return _deepspeed_layout(universal=name == "universal")


def _require_used(checkpoint: Checkpoint, target: Target, name: str) -> None:
    """Raise UsageError for settings that the layout would ignore."""
    unused = []
    for setting, layouts in _LAYOUTS_OF.items():
        if getattr(target, setting) is None:
            continue
        of_deepspeed = setting == "zero_stage" and checkpoint.framework != "deepspeed"
        users = tuple(one for one in layouts if one != "trainer" or not of_deepspeed)
        if name not in users:
            option = _OPTIONS.get(setting, f"--{setting.replace('_', '-')}")
            layout_text = repr(name) if target.layout == name else f"{name!r}, the default here"
            plural = "s" if len(users) > 1 else ""
            unused.append(f"{option} is for layout{plural} {' and '.join(users)}, not for {layout_text}: leave it out")
    if unused:
        raise UsageError("; ".join(unused))


def _native(checkpoint: Checkpoint) -> str:
    layout = _NATIVE.get(checkpoint.framework)
    if layout is None:
        raise UnsupportedError(
            f"framework {checkpoint.framework!r} has no layout; supported are {', '.join(map(repr, _NATIVE))}"
        )
    return layout


def _deepspeed_layout(*, universal: bool = False) -> Layout:
    try:
        from merger.layouts.deepspeed import deepspeed_layout
        from merger.layouts.deepspeed_universal import universal_layout
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"{error.name} is not installed, and DeepSpeed's files need its classes: run "
            "`pip install 'driftpoint[deepspeed]'`"
        ) from error
    return universal_layout if universal else deepspeed_layout
