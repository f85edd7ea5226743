"""Save and restore a Trainer's progress as one object among ``state=[...]``.

It holds the Trainer's state (steps, epoch, log history, best metric, exported callbacks), its learning-rate schedule,
its gradient scaler, and the random generators at the beginning of the epoch, on which the order of its data may depend.
All but the generators are the same on every rank, so only rank 0 stores the Trainer's state. Training thread."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from store.errors import ModelMismatchError

KIND = "transformers.Trainer"  # marks the state of this object among others
_UNSETTLED = 64  # the newest entries are serialized again each time: callbacks add measurements to them


@dataclass(frozen=True)
class TrainingLength:
    """The length of a training."""

    epochs: float  # epochs asked for, or that the steps asked for take
    steps: int  # total steps
    beyond: int  # a step that no epoch reaches


TRAINER = "trainer"  # name of the Trainer's progress among the objects in ``state={...}``


class TrainerProgress:
    """The progress of one ``train()``: its live ``TrainerState``, and its scheduler and gradient scaler, if any."""

    def __init__(
        self, state: Any, scheduler: Any, scaler: Any, length: TrainingLength, rank: int, *, sampler: Any = None
    ) -> None:
        self.state = state
        self.sampler = sampler
        """The generator that Accelerate gives a sampler of several processes under ``use_seedable_sampler: false``."""
        self.length = length
        self.at_epoch = False
        """Whether the job is between two epochs, so the next batch is the first of an epoch and not drawn yet."""
        self.epoch_began: Mapping[str, Any] | None = None
        """The generators before the current epoch's data was touched; None before the first epoch."""
        self.sampler_began: Any = None  # likewise
        self.loaded: Mapping[str, Any] | None = None  # the state that a resume loaded
        self.exported: Callable[[], Mapping[str, Any]] = dict
        """States of the Trainer's other callbacks, by class, as the Trainer would store them."""
        self._parts = {"lr_scheduler": scheduler, "scaler": scaler}
        self._rank = rank
        self._text = StateText()

    def begin_epoch(self, generators: Mapping[str, Any]) -> None:
        """Take note of the generators before the data of an epoch is touched."""
        self.at_epoch, self.epoch_began = True, generators
        self.sampler_began = None if self.sampler is None else self.sampler.get_state()

    def restore_sampler(self) -> None:
        """Restore the sampler's generator as it was before the data of the resumed epoch was touched."""
        if self.sampler is not None and self.loaded is not None and self.loaded.get("sampler") is not None:
            self.sampler.set_state(self.loaded["sampler"])

    def state_dict(self) -> dict[str, Any]:
        """Return plain data. ``trainer`` is the Trainer's state as JSON text, on rank 0 only."""
        return {
            "kind": KIND,
            "step": int(self.state.global_step),
            "at_epoch": self.at_epoch,
            "epoch_began": None if self.at_epoch else self.epoch_began,
            "sampler": self.sampler.get_state() if self.sampler and self.at_epoch else self.sampler_began,
            "length": asdict(self.length),
            "trainer": self._text.serialize(self.state, self.exported()) if self._rank == 0 else None,
            **{name: None if part is None else part.state_dict() for name, part in self._parts.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load the schedule and the scaler; the Trainer reads its own state from the folder it resumes from.

        Raise ModelMismatchError if ``saved`` is not the state of a :class:`TrainerProgress`."""
        require_trainer_progress(saved)
        for name, part in self._parts.items():
            if part is not None and saved[name] is not None:
                part.load_state_dict(saved[name])
        self.loaded = saved


def require_trainer_progress(saved: Any) -> Mapping[str, Any]:
    """Return ``saved``. Raise ModelMismatchError unless it is the state of a :class:`TrainerProgress`."""
    if not isinstance(saved, Mapping) or saved.get("kind") != KIND:
        raise ModelMismatchError(
            "the store was not written by monitor.CheckpointCallback, so it has no state of a Trainer: set another "
            "`store:`, or resume with the script that wrote it"
        )
    return saved


class StateText:
    """Serializes the ``TrainerState`` of one training as JSON.

    It is serialized at every save, with snapshots in memory perhaps at every step, and the log history grows all the
    time: serializing all of it would block training for seconds in the end. So older entries are serialized once."""

    def __init__(self) -> None:
        self._history: list[Any] | None = None
        self._settled: list[str] = []

    def serialize(self, state: Any, exported: Mapping[str, Any]) -> str:
        """Return JSON. ``exported`` replaces the states of callbacks with the same names."""
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
    """Return arrays and tensors, which scripts log, as numbers, and other objects as text."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else str(value)
