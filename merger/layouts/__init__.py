"""layout_for().

Choosing the layout for what the user asks and for what was training.
"""

from __future__ import annotations

from collections.abc import Mapping

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
"""The layouts that a setting of a target means something to."""

_NATIVE = {"deepspeed": "deepspeed", "torch": "torch", "fsdp2": "dcp"}
"""The layout that each framework loads by itself."""

_OPTIONS = {"shard_bytes": "--shard-size"}
"""How a setting is typed, where that is not its own name."""


def layout_for(checkpoint: Checkpoint, target: Target) -> Layout:
    """UnsupportedError, naming what there is, where there is no layout for it; UsageError where the target asks for
    something that the layout has no use for."""
    name = target.layout
    if name == "native":
        name = _native(checkpoint)
    _require_used(checkpoint, target, name)
    if name == "torch":
        from merger.layouts.torch_state_dict import StateDictLayout

        return StateDictLayout()
    if name == "hf":
        from merger.layouts.huggingface import HuggingFaceLayout

        return HuggingFaceLayout()
    if name == "dcp":
        from merger.layouts.torch_dcp import DcpLayout

        return DcpLayout()
    if name == "trainer":
        from merger.layouts.trainer import TrainerLayout

        return TrainerLayout(_deepspeed_layout() if _native(checkpoint) == "deepspeed" else None)
    return _deepspeed_layout(universal=name == "universal")


def _require_used(checkpoint: Checkpoint, target: Target, name: str) -> None:
    """What is asked for and would be left aside without a word."""
    useless = []
    for setting, layouts in _LAYOUTS_OF.items():
        if getattr(target, setting) is None:
            continue
        of_deepspeed = setting == "zero_stage" and checkpoint.framework != "deepspeed"
        meant = tuple(one for one in layouts if one != "trainer" or not of_deepspeed)
        if name not in meant:
            option = _OPTIONS.get(setting, f"--{setting.replace('_', '-')}")
            what = repr(name) if target.layout == name else f"{name!r}, the native one here"
            several = "s" if len(meant) > 1 else ""
            useless.append(f"{option} is for layout{several} {' and '.join(meant)}, and this is {what}: leave it out")
    if useless:
        raise UsageError("; ".join(useless))


def _native(checkpoint: Checkpoint) -> str:
    layout = _NATIVE.get(checkpoint.framework)
    if layout is None:
        raise UnsupportedError(
            f"the store was written by framework {checkpoint.framework!r}, for which there is no layout; there is one "
            f"for {', '.join(map(repr, _NATIVE))}"
        )
    return layout


def _deepspeed_layout(*, universal: bool = False) -> Layout:
    try:
        from merger.layouts.deepspeed import DeepSpeedLayout
        from merger.layouts.deepspeed_universal import UniversalLayout
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"DeepSpeed's files need its classes, and {error.name} is not installed: run "
            "`pip install 'driftpoint[deepspeed]'`"
        ) from error
    return UniversalLayout() if universal else DeepSpeedLayout()
