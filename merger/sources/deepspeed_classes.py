"""Stand-ins for the classes of DeepSpeed that its checkpoints are pickled with.

They hold what was pickled and do nothing, so that reading a checkpoint runs no code of DeepSpeed's and does not
need it installed. A stand-in's name in messages is DeepSpeed's own.
"""

from __future__ import annotations

from typing import Any


class Kept:
    """An object as its attributes."""


class LossScaler(Kept):
    """``deepspeed.runtime.fp16.loss_scaler.LossScaler``."""


class DynamicLossScaler(Kept):
    """``deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler``."""


class FragmentAddress(Kept):
    """``deepspeed.utils.tensor_fragment.fragment_address``: ``numel`` and ``start``."""


class Stage(int):
    """``deepspeed.runtime.zero.config.ZeroStageEnum``."""


STAND_INS: dict[str, type] = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": LossScaler,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": DynamicLossScaler,
    "deepspeed.utils.tensor_fragment.fragment_address": FragmentAddress,
    "deepspeed.runtime.zero.config.ZeroStageEnum": Stage,
}


def attributes(kept: Kept) -> dict[str, Any]:
    """What was pickled with an object."""
    return dict(vars(kept))
