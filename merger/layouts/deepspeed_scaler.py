"""DeepSpeed's loss scalers: objects in its optimizer files, plain values in a run state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

from store.errors import MergeError


def loss_scaler(state: Mapping[str, Any], dtype: str) -> LossScaler | DynamicLossScaler:
    """The scaler as it was. MergeError for one that DeepSpeed's files cannot hold.

    dtype: ``bf16``, ``fp16`` or ``fp32``.
    """
    saved = state["loss_scaler"]
    if saved is None and dtype != "fp16":
        return LossScaler(scale=1.0)  # where the engine that was saved had none, and one is asked for
    kind = None if saved is None else saved["class"]
    plain = {} if saved is None else {key: value for key, value in saved.items() if key != "class"}
    if kind == "LossScaler":
        scaler = LossScaler(scale=plain["cur_scale"])
    elif kind == "DynamicLossScaler":
        scaler = DynamicLossScaler(
            plain["cur_scale"],
            plain["scale_window"],
            plain["min_scale"],
            plain["delayed_shift"],
            plain["consecutive_hysteresis"],
        )
    else:
        raise MergeError(f"the run used the loss scaler {kind!r}; DeepSpeed's files can hold its own two only")
    vars(scaler).update(plain)
    return scaler
