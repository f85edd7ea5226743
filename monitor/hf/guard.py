"""Keeps a Trainer that knows nothing of a callback from going on from its folder, in which there are no weights.

Else it would train from the weights that the script has made, and call the step what it had been told. From
``resume_path`` until training begins; any other folder goes through. Training thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from store.errors import UsageError


class Guard:
    """While it is there, only a Trainer with ``callback`` loads ``folder``."""

    def __init__(self, folder: Path, callback: TrainerCallback) -> None:
        original = Trainer._load_from_checkpoint

        def _load_from_checkpoint(trainer: Any, resume_from_checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
            known = any(one is callback for one in trainer.callback_handler.callbacks)
            if str(resume_from_checkpoint) == str(folder) and not known:
                raise UsageError(
                    "this Trainer does not have the CheckpointCallback that resume_path() was asked of, so nobody "
                    "would load its weights: give the Trainer callbacks=[monitor.CheckpointCallback(...)]"
                )
            return original(trainer, resume_from_checkpoint, *args, **kwargs)

        self._original, self._ours = original, _load_from_checkpoint
        Trainer._load_from_checkpoint = _load_from_checkpoint

    def end(self) -> None:
        """As it was, unless somebody has put something else in its place since."""
        if Trainer._load_from_checkpoint is self._ours:
            Trainer._load_from_checkpoint = self._original
