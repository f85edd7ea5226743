"""The DeepSpeed engine behind a Trainer's model, and the engine's own load, for which there is nothing to load.

The Trainer tells its callbacks the bare model and makes the engine itself, so the engine is looked for among the live
objects. And under DeepSpeed it insists on ``engine.load_checkpoint`` of the folder that it resumes from: for the one
folder that holds nothing, that call is answered here, from ``resume_path`` until training begins; any other goes
through. Training thread.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from store.errors import UnsupportedError


def engine_of(model: Any, optimizer: Any) -> Any:
    """The engine that trains ``model`` with ``optimizer``, as the Trainer has it. UnsupportedError where none does."""
    inner = getattr(optimizer, "optimizer", optimizer)
    for one in gc.get_objects():
        # Not getattr: an engine passes unknown names on to its module.
        known = one.__dict__ if issubclass(type(one), DeepSpeedEngine) else {}
        if known.get("module") is model and any(known.get("optimizer") is it for it in (inner, optimizer)):
            return one
    raise UnsupportedError(
        "no DeepSpeed engine trains the Trainer's model, though DeepSpeed is on: leave it to the Trainer to call "
        "deepspeed.initialize"
    )


class Unloaded:
    """While it is there, engines load nothing from ``folder`` and say that they did."""

    def __init__(self, folder: Path) -> None:
        original = DeepSpeedEngine.load_checkpoint

        def load_checkpoint(engine: Any, load_dir: Any, *args: Any, **kwargs: Any) -> Any:
            if str(load_dir) == str(folder):
                return str(folder), {}
            return original(engine, load_dir, *args, **kwargs)

        self._original, self._ours = original, load_checkpoint
        DeepSpeedEngine.load_checkpoint = load_checkpoint

    def end(self) -> None:
        """As it was, unless somebody has put something else in its place since."""
        if DeepSpeedEngine.load_checkpoint is self._ours:
            DeepSpeedEngine.load_checkpoint = self._original
