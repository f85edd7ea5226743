"""Capture and restore the state of a DeepSpeed engine besides its tensors: counters, loss scaler, scheduler."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from store.errors import ModelMismatchError

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def engine_state(engine: Any) -> dict[str, Any]:
    """Return the engine's own run state: ``counters``, ``loss_scaler``, ``lr_scheduler``."""
    counters = {name: int(getattr(engine, name)) for name in _COUNTERS}
    counters["gradient_accumulation_steps"] = int(engine.gradient_accumulation_steps())
    scheduler = engine.lr_scheduler
    return {
        "counters": counters,
        "loss_scaler": scaler_state(engine.optimizer),
        "lr_scheduler": None if scheduler is None else copy.deepcopy(scheduler.state_dict()),
    }


def check_engine_state(engine: Any, state: Mapping[str, Any]) -> None:
    """Raise the errors that :func:`load_engine_state` would raise. Changes nothing."""
    _counters(engine, state)
    _scaler_updates(engine.optimizer, state.get("loss_scaler"))


def load_engine_state(engine: Any, state: Mapping[str, Any]) -> None:
    """Load a run state, except the scheduler. Without saved counters they are derived from the optimizer's ``step``."""
    values = _scaler_updates(engine.optimizer, state.get("loss_scaler"))
    for name, value in _counters(engine, state).items():
        setattr(engine, name, value)
    scaler = _live_scaler(engine.optimizer)
    if values and isinstance(scaler, torch.amp.GradScaler):
        scaler.load_state_dict(dict(values))
    else:
        for name, value in values.items():
            setattr(scaler, name, value)


def _counters(engine: Any, state: Mapping[str, Any]) -> dict[str, int]:
    saved = state.get("counters") or _counters_from_steps(engine, state)
    missing = sorted({*_COUNTERS, "gradient_accumulation_steps"} - saved.keys())
    if missing:
        raise ModelMismatchError(
            f"the saved counters lack {', '.join(missing)}: resume with the DeepSpeed version that saved them"
        )
    counters = {name: int(saved[name]) for name in _COUNTERS}
    # Partly accumulated gradients are not saved: the window restarts, and boundaries must stay boundaries.
    windows = counters["micro_steps"] // int(saved["gradient_accumulation_steps"])
    return {**counters, "micro_steps": windows * int(engine.gradient_accumulation_steps())}


def _counters_from_steps(engine: Any, state: Mapping[str, Any]) -> dict[str, int]:
    steps = max((int(scalars.get("step", 0)) for scalars in state["scalars"].values()), default=0)
    accumulation = int(engine.gradient_accumulation_steps())
    return {
        "global_steps": steps,
        "global_samples": steps * int(engine.train_batch_size()),
        "skipped_steps": 0,
        "micro_steps": steps * accumulation,
        "gradient_accumulation_steps": accumulation,
    }


def scaler_state(optimizer: Any) -> dict[str, Any] | None:
    """Return the state of the loss scaler, if there is one."""
    scaler = _live_scaler(optimizer)
    if scaler is None:
        return None
    values = scaler.state_dict() if isinstance(scaler, torch.amp.GradScaler) else vars(scaler)
    plain = {key: value for key, value in values.items() if isinstance(value, bool | int | float)}
    return {"class": type(scaler).__name__, **plain}


def _live_scaler(optimizer: Any) -> Any:
    autocast = getattr(optimizer, "torch_autocast_gradscaler", None)
    return getattr(optimizer, "loss_scaler", None) if autocast is None else autocast


def _scaler_updates(optimizer: Any, saved: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the saved values that the live scaler takes. A scaler of another class starts with its configuration."""
    scaler = _live_scaler(optimizer)
    keys: Sequence[str] = _SCALER_STATE if getattr(scaler, "dynamic", False) else ()
    if isinstance(scaler, torch.amp.GradScaler):
        keys = [*scaler.state_dict()]  # none if it is disabled
    if saved is None or scaler is None or type(scaler).__name__ != saved["class"]:
        return {}
    missing = [key for key in keys if key not in saved]
    if missing:
        raise ModelMismatchError(
            f"the saved state of the loss scaler {saved['class']} lacks {', '.join(missing)}: it was saved by a scaler "
            "with other settings; configure it as in the run that was saved"
        )
    return {key: saved[key] for key in keys}
