"""Callbacks for the Trainers that tests train."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

import monitor


class Flushing(TrainerCallback):
    """Each decision finds the save before it committed."""

    def __init__(self, ours: monitor.CheckpointCallback) -> None:
        self.ours = ours

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.ours.checkpointer is not None:
            self.ours.checkpointer.flush()
