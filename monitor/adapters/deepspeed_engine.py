"""What a DeepSpeed engine keeps besides tensors: counters, scheduler, loss scaler; and facts about itself.

The same for every ZeRO stage; it does not know how any of them lays out its tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from monitor.adapters.inventory import Inventory
from store.errors import ModelMismatchError, UnsupportedError
from store.record import as_json

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_AUTOCAST_STATE = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def engine_state(engine: Any) -> dict[str, Any]:
    """The engine's own run state: ``counters``, ``loss_scaler``, ``lr_scheduler``."""
    counters = {name: int(getattr(engine, name)) for name in _COUNTERS}
    counters["gradient_accumulation_steps"] = int(engine.gradient_accumulation_steps())
    scheduler = engine.lr_scheduler
    return {
        "counters": counters,
        "loss_scaler": _scaler_state(engine.optimizer),
        "lr_scheduler": None if scheduler is None else copy.deepcopy(scheduler.state_dict()),
    }


def require_same_engine(engine: Any, module: Any, optimizer: Any) -> None:
    """UnsupportedError where the engine has another module or optimizer than when it was attached."""
    for what, live, attached in (("module", engine.module, module), ("optimizer", engine.optimizer, optimizer)):
        if live is not attached:
            raise UnsupportedError(
                f"the engine's {what} is another object ({type(live).__name__}) than when it was attached "
                f"({type(attached).__name__}): close() and attach the engine anew"
            )


def engine_objects(engine: Any) -> dict[str, Any]:
    """The scheduler, which may be anybody's: see :meth:`monitor.adapters.base.Adapter.objects`."""
    return {} if engine.lr_scheduler is None else {"lr_scheduler": engine.lr_scheduler}


def check_engine_state(engine: Any, state: Mapping[str, Any]) -> None:
    """Raise whatever :func:`load_engine_state` would raise. Changes nothing."""
    _counters(engine, state)
    _scaler_values(engine.optimizer, state.get("loss_scaler"))


def load_engine_state(engine: Any, state: Mapping[str, Any]) -> None:
    """The inverse of :func:`engine_state` but for the scheduler. State that no engine saved has its counters derived
    from ``step``."""
    values = _scaler_values(engine.optimizer, state.get("loss_scaler"))
    for name, value in _counters(engine, state).items():
        setattr(engine, name, value)
    _load_scaler(engine.optimizer, values)


def _counters(engine: Any, state: Mapping[str, Any]) -> dict[str, int]:
    saved = state.get("counters") or _counters_from_steps(engine, state)
    missing = sorted({*_COUNTERS, "gradient_accumulation_steps"} - saved.keys())
    if missing:
        raise ModelMismatchError(f"the saved counters lack {', '.join(missing)}: they are not those of this DeepSpeed")
    counters = {name: int(saved[name]) for name in _COUNTERS}
    # Gradients accumulated in part are not saved: the window starts anew, and boundaries must stay boundaries.
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


def _scaler_state(optimizer: Any) -> dict[str, Any] | None:
    autocast = getattr(optimizer, "torch_autocast_gradscaler", None)
    if autocast is not None:
        return {"class": type(autocast).__name__, **autocast.state_dict()}
    scaler = getattr(optimizer, "loss_scaler", None)
    if scaler is None:
        return None
    plain = {key: value for key, value in vars(scaler).items() if isinstance(value, bool | int | float)}
    return {"class": type(scaler).__name__, **plain}


def _live_scaler(optimizer: Any) -> tuple[Any, tuple[str, ...]]:
    """The loss scaler, and the keys of its state that move; none where it is static."""
    autocast = getattr(optimizer, "torch_autocast_gradscaler", None)
    if autocast is not None:
        return autocast, _AUTOCAST_STATE if autocast.is_enabled() else ()
    scaler = getattr(optimizer, "loss_scaler", None)
    return scaler, _SCALER_STATE if getattr(scaler, "dynamic", False) else ()


def _scaler_values(optimizer: Any, saved: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the live scaler takes of the saved one's state. Another precision scales in its own way, and starts with
    its own configuration."""
    scaler, keys = _live_scaler(optimizer)
    if saved is None or scaler is None or type(scaler).__name__ != saved["class"]:
        return {}
    missing = [key for key in keys if key not in saved]
    if missing:
        raise ModelMismatchError(
            f"the saved state of the loss scaler {saved['class']} lacks {', '.join(missing)}: it was saved by a scaler "
            "with other settings; configure it as in the run that wrote the state"
        )
    return {key: saved[key] for key in keys}


def _load_scaler(optimizer: Any, values: Mapping[str, Any]) -> None:
    scaler, _ = _live_scaler(optimizer)
    if values and isinstance(scaler, torch.amp.GradScaler):
        scaler.load_state_dict(dict(values))
    else:
        for name, value in values.items():
            setattr(scaler, name, value)


def engine_facts(engine: Any, inventory: Inventory) -> dict[str, Any]:
    """What a writer of DeepSpeed's own files needs from the engine, whatever the stage. JSON values."""
    optimizer = engine.optimizer
    return {
        "framework": "deepspeed",
        "ds_version": str(deepspeed.__version__),
        "zero_stage": int(engine.zero_optimization_stage()),
        "world_size": dist.get_world_size(),
        "mp_world_size": int(engine.mp_world_size),
        "dtype": _precision(engine),
        "ds_config": as_json(engine._config._param_dict),
        "zero_optimizer": type(optimizer).__name__,
        "optimizer": type(engine.basic_optimizer).__name__,
        "loss_scaler": _scaler_state(optimizer),
        "dynamic_loss_scale": bool(getattr(optimizer, "dynamic_loss_scale", False)),
        "clip_grad": float(getattr(optimizer, "clip_grad", 0.0)),
        "elastic_checkpoint": bool(getattr(optimizer, "elastic_checkpoint", False)),
        "state_dict_names": inventory.state_dict_names(),
        # As DeepSpeed has it: whatever the optimizer wrappers do not take in, parameters without elements too.
        "frozen": [
            fqn
            for fqn, parameter in inventory.parameters().items()
            if not parameter.requires_grad or not getattr(parameter, "ds_numel", parameter.numel())
        ],
        "buffer_names": list(engine._get_buffer_names()),
        "shared_params": {alias: fqn for fqn, names in inventory.aliases().items() for alias in names},
    }


def _precision(engine: Any) -> str:
    if engine.bfloat16_enabled():
        return "bf16"
    return "fp16" if engine.fp16_enabled() else "fp32"
