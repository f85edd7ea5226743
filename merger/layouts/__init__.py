"""Select the layout for a target and the framework that was training."""

import pkgutil
from collections.abc import Mapping
from functools import partial
from typing import Any

from merger.checkpoint import Checkpoint
from merger.layouts.base import Layout, Target
from store.errors import UnsupportedError, UsageError

_PLACES = {
    "deepspeed": "deepspeed:deepspeed_layout",
    "universal": "deepspeed_universal:universal_layout",
    "hf": "huggingface:hf_layout",
    "dcp": "torch_dcp:dcp_layout",
    "trainer": "trainer:trainer_layout",
    "torch": "torch_dcp:torch_layout",
}
"""Module and function of each layout, imported when it is used: some need DeepSpeed."""

_LAYOUTS_OF: Mapping[str, tuple[str, ...]] = {
    "zero_stage": ("deepspeed", "trainer"),
    "world_size": ("deepspeed", "trainer"),
    "dtype": ("hf",),
    "shard_bytes": ("hf", "dcp"),
    "files": ("hf", "trainer"),
}
"""Layouts that use a setting of a target."""

_NATIVE = {"deepspeed": "deepspeed", "torch": "torch", "fsdp2": "dcp", "dtensor": "dcp"}  # what each loads natively
_OPTIONS = {"shard_bytes": "--shard-size"}  # command-line option of a setting, if it is not the setting's name


def layout_for(checkpoint: Checkpoint, target: Target) -> Layout:
    """Return the layout. UnsupportedError if there is none; UsageError for settings that it does not use."""
    name, beside = target.layout, checkpoint.files
    if name == "native":  # a Trainer's folder for a Trainer's source
        of_trainer = target.files is None and beside is not None and (beside / "trainer_state.json").is_file()
        name = "trainer" if of_trainer else _native(checkpoint)
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
    if name == "trainer":
        return partial(_imported(name), _imported("deepspeed") if _native(checkpoint) == "deepspeed" else None)
    layout: Layout = _imported(name)
    return layout


def _native(checkpoint: Checkpoint) -> str:
    if (layout := _NATIVE.get(checkpoint.framework)) is None:
        supported = ", ".join(map(repr, _NATIVE))
        raise UnsupportedError(f"framework {checkpoint.framework!r} has no layout; supported are {supported}")
    return layout


def _imported(name: str) -> Any:
    """Import a layout. UnsupportedError if DeepSpeed is missing; the others need torch alone."""
    try:
        return pkgutil.resolve_name(f"merger.layouts.{_PLACES[name]}")
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"{error.name} is not installed, and DeepSpeed's files need its classes: run "
            "`pip install 'driftpoint[deepspeed]'`"
        ) from error
