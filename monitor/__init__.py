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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monitor.attaching import attach
    from monitor.checkpointer import Checkpointer
    from monitor.config import Config
    from monitor.report import Preempted, StepReport

__all__ = ["Checkpointer", "Config", "Preempted", "StepReport", "attach"]

# No name may be that of its own module: importing that would put the module in the name's place.
_PLACES = {
    "Checkpointer": "checkpointer",
    "Config": "config",
    "Preempted": "report",
    "StepReport": "report",
    "attach": "attaching",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
