"""Save and resume training state adaptively, from inside the training loop.

Example::

    import monitor

    ckpt = monitor.attach(engine, "driftpoint.yaml", state=[scheduler, loader])
    for step in range(ckpt.resume(), total_steps):
        ...
        engine.step()
        ckpt.step()

Public names are imported on first use, so ``import monitor`` is cheap and does not import torch."""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monitor.api import attach
    from monitor.checkpointer import Checkpointer
    from monitor.config.load import Config
    from monitor.huggingface.callback import CheckpointCallback, resume_path
    from monitor.resume.loop_state import LoopState
    from monitor.types import Preempted, StepReport

__all__ = ["CheckpointCallback", "Checkpointer", "Config", "LoopState", "Preempted", "StepReport"]
__all__ += ["attach", "resume_path"]

# A public name must differ from its module's name: importing the submodule would replace it.
_MODULES = {
    "CheckpointCallback": "huggingface.callback",
    "Checkpointer": "checkpointer",
    "Config": "config.load",
    "LightningCallback": "integrations.lightning",
    "LoopState": "resume.loop_state",
    "Preempted": "types",
    "StepReport": "types",
    "TorchtitanCheckpointManager": "integrations.torchtitan",
    "attach": "api",
    "resume_path": "huggingface.callback",
}
_NEEDED = dict.fromkeys(("transformers", "accelerate"), "transformers and accelerate: `pip install 'driftpoint[hf]'`")
_NEEDED |= {
    "lightning": "lightning: `pip install 'lightning>=2.6'`",
    "torchtitan": "torchtitan: `pip install torchtitan`",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ImportError as error:
        _require_own("store", "policies")
        needed = _NEEDED.get((error.name or "").partition(".")[0])
        if needed is None:
            raise
        raise ImportError(f"monitor.{name} needs {needed}") from error
    globals()[name] = value
    return value


def _require_own(*names: str) -> None:
    """Raise ImportError if a module of the user was imported in place of one of our packages."""
    for name in names:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and Path(file).resolve() != Path(__file__).resolve().parents[1] / name / "__init__.py":
            raise ImportError(
                f"{file} was imported as `{name}`, which is a package of Driftpoint: rename that file, or move it into "
                f"a package. If no module of yours imports it, `import driftpoint` in place of `import monitor`"
            )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
