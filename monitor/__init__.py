"""Driftpoint inside the training process.

import monitor

ckpt = monitor.attach(engine, "driftpoint.yaml", state=[scheduler, loader])
for step in range(ckpt.resume(), total_steps):
    ...
    engine.step()
    ckpt.step()

Names are imported when they are first used, so that importing this costs nothing: the command line reads settings
without torch, and data-loader workers that import the script do not pay for what they never call.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monitor.api import attach
    from monitor.checkpointer import Checkpointer
    from monitor.config.load import Config
    from monitor.huggingface.callback import CheckpointCallback, resume_path
    from monitor.types import Preempted, StepReport

__all__ = ["CheckpointCallback", "Checkpointer", "Config", "Preempted", "StepReport", "attach", "resume_path"]

# No name may be that of its own module: importing that would put the module in the name's place.
_PLACES = {
    "CheckpointCallback": "huggingface.callback",
    "Checkpointer": "checkpointer",
    "Config": "config.load",
    "Preempted": "types",
    "StepReport": "types",
    "attach": "api",
    "resume_path": "huggingface.callback",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(_imported(_PLACES[name]), name)
    globals()[name] = found
    return found


def _imported(place: str) -> ModuleType:
    try:
        return import_module(f"{__name__}.{place}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("transformers", "accelerate"):
            raise
        raise ImportError(
            "monitor.CheckpointCallback needs transformers and accelerate: `pip install 'driftpoint[hf]'`"
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
