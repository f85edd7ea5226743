"""What of the Trainer's own a commit holds, as one object among ``state=[...]``.

Its state (steps, epoch, history of logs, best metric), its learning-rate schedule and its gradient scaler. Every rank's
is the same but for which rank it is, so rank 0 alone stores the Trainer's state. Knows no file and no rank but its own.
Training thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from store.errors import ModelMismatchError

KIND = "transformers.Trainer"
"""Tells the state of this object from those of others."""


@dataclass(frozen=True)
class Length:
    """How long a training is. epochs: as asked for. steps: in all. beyond: a step that no epoch reaches any more."""

    epochs: float
    steps: int
    beyond: int


class Progress:
    """Of one ``train()``. state: the Trainer's live ``TrainerState``; scheduler and scaler: live, None where there is
    none. length: of this training. rank: of this process."""

    def __init__(self, state: Any, scheduler: Any, scaler: Any, length: Length, rank: int) -> None:
        self.state = state
        self.length = length
        self.at_epoch = False
        """Whether the step is looked at where an epoch begins, with its data not touched yet."""
        self.loaded: int | None = None
        """The step that was loaded; None where nothing was."""
        self._parts = {"lr_scheduler": scheduler, "scaler": scaler}
        self._rank = rank

    def state_dict(self) -> dict[str, Any]:
        """Plain data. ``trainer``: the Trainer's state as JSON text; rank 0's alone."""
        return {
            "kind": KIND,
            "step": int(self.state.global_step),
            "at_epoch": self.at_epoch,
            "length": asdict(self.length),
            "trainer": json.dumps(asdict(self.state)) if self._rank == 0 else None,
            **{name: None if item is None else item.state_dict() for name, item in self._parts.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """The schedule and the scaler; the Trainer has its own state from the folder it was given.

        ModelMismatchError where this is not what :meth:`state_dict` gave."""
        require_ours(saved)
        for name, item in self._parts.items():
            if item is not None and saved[name] is not None:
                item.load_state_dict(saved[name])
        self.loaded, self.at_epoch = int(saved["step"]), bool(saved["at_epoch"])


def require_ours(saved: Any) -> None:
    """ModelMismatchError unless this is the state of a :class:`Progress`."""
    if not isinstance(saved, Mapping) or saved.get("kind") != KIND:
        raise ModelMismatchError(
            "the store was not written by monitor.CheckpointCallback, so it does not say where the Trainer was: name "
            "another `store:`, or resume with the script that wrote it"
        )
