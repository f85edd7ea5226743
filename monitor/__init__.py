"""Save and resume training state adaptively, from inside the training loop.

Example::

    import monitor

    ckpt = monitor.attach(engine, "driftpoint.yaml", state=[scheduler, loader])
    for step in range(ckpt.resume(), total_steps):
        ...
        engine.step()
        ckpt.step()

Public names are imported on first use, so ``import monitor`` is cheap and does not import torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monitor.api import attach
    from monitor.checkpointer import Checkpointer
    from monitor.config.load import Config
    from monitor.huggingface.callback import CheckpointCallback, resume_path
    from monitor.types import Preempted, StepReport

__all__ = ["CheckpointCallback", "Checkpointer", "Config", "Preempted", "StepReport", "attach", "resume_path"]

# A public name must differ from its module's name: importing the submodule would replace it.
_MODULES = {
    "CheckpointCallback": "huggingface.callback",
    "Checkpointer": "checkpointer",
    "Config": "config.load",
    "Preempted": "types",
    "StepReport": "types",
    "attach": "api",
    "resume_path": "huggingface.callback",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("transformers", "accelerate"):
            raise
        raise ImportError(
            "monitor.CheckpointCallback needs transformers and accelerate: `pip install 'driftpoint[hf]'`"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
