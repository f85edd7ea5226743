"""Trainer progress as run state.

A ``TrainerState`` as JSON text, for a run state that is taken at every save, and in memory perhaps at every step.

The history of logs grows for as long as a job lives, and turning all of it into text again each time would hold
training for seconds in the end. So entries that have been there for a while are turned into text once. Knows no file.

What of the Trainer's own a commit holds, as one object among ``state=[...]``.

Its state (steps, epoch, history of logs, best metric, callbacks that it exports), its learning-rate schedule, its
gradient scaler, and the random generators as they were when the epoch began, which the order of its data may depend on.
Every rank's is the same but for the generators, so rank 0 alone stores the Trainer's state. Knows no file and no rank
but its own. Training thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from store.errors import ModelMismatchError

_UNSETTLED = 64
"""The newest entries are turned into text anew: callbacks add to them what they have measured."""


class StateText:
    """Of one training."""

    def __init__(self) -> None:
        self._history: list[Any] | None = None
        self._settled: list[str] = []

    def of(self, state: Any, exported: Mapping[str, Any]) -> str:
        """JSON. exported: states of callbacks, in place of those that the state has of the same name."""
        fields = dict(vars(state))
        history = fields.pop("log_history")
        fields["stateful_callbacks"] = {**(fields.get("stateful_callbacks") or {}), **exported}
        return f'{_text(fields)[:-1]}, "log_history": [{self._entries(history)}]}}'

    def _entries(self, history: list[Any]) -> str:
        if history is not self._history or len(history) < len(self._settled):
            self._history, self._settled = history, []
        for entry in history[len(self._settled) : -_UNSETTLED]:
            self._settled.append(_text(entry))
        return ", ".join([*self._settled, *map(_text, history[len(self._settled) :])])


def _text(value: Any) -> str:
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    """What scripts log beside numbers: arrays and tensors as numbers, anything else as it prints."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else str(value)


KIND = "transformers.Trainer"
"""Tells the state of this object from those of others."""


@dataclass(frozen=True)
class Length:
    """How long a training is. epochs: as asked for. steps: in all. beyond: a step that no epoch reaches any more."""

    epochs: float
    steps: int
    beyond: int


@dataclass(frozen=True)
class Loaded:
    """What a resume brought. at_epoch: as :attr:`TrainerProgress.at_epoch` was. epoch_began: as it was, None in older
    stores
    and where ``at_epoch``."""

    at_epoch: bool
    epoch_began: Mapping[str, Any] | None


class TrainerProgress:
    """Of one ``train()``. state: the Trainer's live ``TrainerState``; scheduler and scaler: live, None where there is
    none. length: of this training. rank: of this process."""

    def __init__(self, state: Any, scheduler: Any, scaler: Any, length: Length, rank: int) -> None:
        self.state = state
        self.length = length
        self.at_epoch = False
        """Whether the job stands between two epochs, so that the next batch is an epoch's first, and not drawn yet."""
        self.epoch_began: Mapping[str, Any] | None = None
        """The generators before the present epoch's data was touched; None before the first one."""
        self.loaded: Loaded | None = None
        """None where nothing was."""
        self.exported: Callable[[], Mapping[str, Any]] = dict
        """States of the Trainer's other callbacks, by class, as it would store them."""
        self._parts = {"lr_scheduler": scheduler, "scaler": scaler}
        self._rank = rank
        self._text = StateText()

    def state_dict(self) -> dict[str, Any]:
        """Plain data. ``trainer``: the Trainer's state as JSON text; rank 0's alone."""
        return {
            "kind": KIND,
            "step": int(self.state.global_step),
            "at_epoch": self.at_epoch,
            "epoch_began": None if self.at_epoch else self.epoch_began,
            "length": asdict(self.length),
            "trainer": self._text.of(self.state, self.exported()) if self._rank == 0 else None,
            **{name: None if item is None else item.state_dict() for name, item in self._parts.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """The schedule and the scaler; the Trainer has its own state from the folder it was given.

        ModelMismatchError where this is not what :meth:`state_dict` gave."""
        require_ours(saved)
        for name, item in self._parts.items():
            if item is not None and saved[name] is not None:
                item.load_state_dict(saved[name])
        self.loaded = Loaded(bool(saved["at_epoch"]), saved.get("epoch_began"))


def require_ours(saved: Any) -> Mapping[str, Any]:
    """The same. ModelMismatchError unless this is the state of a :class:`TrainerProgress`."""
    if not isinstance(saved, Mapping) or saved.get("kind") != KIND:
        raise ModelMismatchError(
            "the store was not written by monitor.CheckpointCallback, so it does not say where the Trainer was: name "
            "another `store:`, or resume with the script that wrote it"
        )
    return saved
