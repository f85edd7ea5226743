"""Choosing the layout for what the user asks and for what was training."""

from __future__ import annotations

from merger.checkpoint import Checkpoint
from merger.layouts.base import Layout
from merger.target import Target
from store.errors import UnsupportedError


def layout_for(checkpoint: Checkpoint, target: Target) -> Layout:
    """UnsupportedError, naming what there is, where there is no layout for it."""
    name = target.layout
    if name == "native":
        name = _native(checkpoint)
    if name == "torch":
        from merger.layouts.plain import PlainLayout

        return PlainLayout()
    if name == "hf":
        from merger.layouts.hf import HfLayout

        return HfLayout()
    if name == "dcp":
        from merger.layouts.dcp import DcpLayout

        return DcpLayout()
    if name == "trainer":
        from merger.layouts.trainer import TrainerLayout

        return TrainerLayout(_deepspeed_layout() if _native(checkpoint) == "deepspeed" else None)
    return _deepspeed_layout(universal=name == "universal")


def _native(checkpoint: Checkpoint) -> str:
    if checkpoint.framework in ("deepspeed", "torch"):
        return checkpoint.framework
    raise UnsupportedError(
        f"the store was written by framework {checkpoint.framework!r}, for which there is no layout; there is one for "
        "'deepspeed' and one for 'torch'"
    )


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
