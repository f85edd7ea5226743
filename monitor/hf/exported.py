"""The state of a Trainer's other callbacks, those that it would put into its own checkpoints (``ExportableState``).

The Trainer tells a callback nothing of the others, so what holds them is looked for among the live objects. Whether
they are given their state at a resume is the Trainer's affair: ``restore_callback_states_from_checkpoint``. Training
thread.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

from transformers.trainer_callback import CallbackHandler, ExportableState, TrainerCallback


def callbacks_beside(callback: TrainerCallback, optimizer: Any) -> list[TrainerCallback]:
    """Those of the Trainer that trains with ``optimizer`` and calls this ``callback``: its own list, which may change.
    Empty where something else calls it."""
    for one in gc.get_objects():
        if type(one) is CallbackHandler and one.optimizer is optimizer and any(it is callback for it in one.callbacks):
            found: list[TrainerCallback] = one.callbacks
            return found
    return []


def exported_by(callbacks: Iterable[TrainerCallback]) -> dict[str, Any]:
    """By the name of their class, as in ``trainer_state.json``: a list where there are several of one class."""
    found: dict[str, list[Any]] = {}
    for callback in callbacks:
        if isinstance(callback, ExportableState):
            found.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: states[0] if len(states) == 1 else states for name, states in found.items()}
