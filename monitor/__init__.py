"""Driftpoint inside the training process.

import monitor

ckpt = monitor.attach(engine, "driftpoint.yaml", state=[scheduler, loader])
for step in range(ckpt.resume(), total_steps):
    ...
    engine.step()
    ckpt.step()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monitor.attach import attach
from monitor.checkpointer import Checkpointer
from monitor.config import Config
from monitor.report import Preempted, StepReport

if TYPE_CHECKING:
    from monitor.hf.callback import CheckpointCallback
    from monitor.hf.resuming import resume_path

__all__ = ["CheckpointCallback", "Checkpointer", "Config", "Preempted", "StepReport", "attach", "resume_path"]


def __getattr__(name: str) -> Any:
    """What is Hugging Face's is imported when it is asked for: transformers need not be there."""
    if name == "resume_path":
        from monitor.hf.resuming import resume_path

        return resume_path
    if name == "CheckpointCallback":
        try:
            from monitor.hf.callback import CheckpointCallback
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] not in ("transformers", "accelerate"):
                raise
            raise ImportError(
                "monitor.CheckpointCallback needs transformers and accelerate: `pip install 'driftpoint[hf]'`"
            ) from error
        return CheckpointCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
