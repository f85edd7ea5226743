"""Find the DeepSpeed engine behind a Trainer's model, and answer the engine's load of the Trainer's stub folder.

Training thread."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from monitor.huggingface import patch_method
from store.errors import UnsupportedError


def engine_of(model: Any, optimizer: Any) -> Any:
    """Return the engine that trains ``model`` with ``optimizer``. Raise UnsupportedError if there is none.

    The Trainer creates the engine itself and passes the bare model to its callbacks, so live objects are searched."""
    inner = getattr(optimizer, "optimizer", optimizer)
    for candidate in gc.get_objects():
        # Not getattr: an engine passes unknown names on to its module.
        fields = candidate.__dict__ if issubclass(type(candidate), DeepSpeedEngine) else {}
        if fields.get("module") is model and any(fields.get("optimizer") is one for one in (inner, optimizer)):
            return candidate
    raise UnsupportedError(
        "DeepSpeed is on, but no engine trains the Trainer's model: let the Trainer call deepspeed.initialize itself"
    )


def skip_engine_load(folder: Path) -> Callable[[], None]:
    """Make ``engine.load_checkpoint(folder)`` succeed without loading. Return a function that ends this.

    Under DeepSpeed the Trainer insists on that call for the folder that it resumes from, and the stub folder holds no
    state. Other folders are loaded as usual."""
    original = DeepSpeedEngine.load_checkpoint

    def load_checkpoint(engine: Any, load_dir: Any, *args: Any, **kwargs: Any) -> Any:
        return (str(folder), {}) if str(load_dir) == str(folder) else original(engine, load_dir, *args, **kwargs)

    return patch_method(DeepSpeedEngine, load_checkpoint)
