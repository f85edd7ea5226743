"""resume_path(): stub folder for the Trainer.

The folder that stands for a checkpoint of the Trainer's: where it goes on, and nothing to load.

The Trainer takes its step, its place in the data and its logs from ``trainer_state.json`` before it makes an optimizer,
and then loads what else it finds. It finds no tensor: Driftpoint brings them when training begins, each byte read once.
Every process has a folder of its own, in the machine's temporary directory: no disk need be shared.

What ``trainer.train(resume_from_checkpoint=...)`` is given: a folder that says where the Trainer goes on.

The Trainer fixes its place in the data before it makes an optimizer, so the step has to be known before anything can be
resumed. It is foreseen from the store's records (:mod:`monitor.resume.predict`); the callback resumes when training
begins,
compares, and trains nothing where the two differ. Training thread; collective.

Keeps a Trainer that knows nothing of a callback from going on from its folder, in which there are no weights.

Else it would train from the weights that the script has made, and call the step what it had been told. From
``resume_path`` until training begins; any other folder goes through. Training thread.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from transformers import Trainer, TrainerCallback

from monitor.config.load import Config
from monitor.distributed import Group, current_group
from monitor.huggingface.trainer_state import Length, require_ours
from monitor.resume.predict import ResumePrediction, predict_resume
from store.errors import UsageError
from store.location import store_place

if TYPE_CHECKING:
    from monitor.huggingface.deepspeed_engine import Unloaded


_NOTHING = "nothing.safetensors"


class Folder:
    """Made at once; :meth:`remove` it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="driftpoint-trainer-"))

    def write_state(self, state: Mapping[str, Any]) -> None:
        """``trainer_state.json``."""
        (self.path / "trainer_state.json").write_text(json.dumps(dict(state), indent=2))

    def write_weights(self, names: Iterable[str]) -> None:
        """An index in which every tensor is in a file that holds none: nothing is missing, and nothing is read."""
        save_file({}, self.path / _NOTHING)
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, _NOTHING)}
        (self.path / "model.safetensors.index.json").write_text(json.dumps(index))

    def write_no_weights(self) -> None:
        """A model file without tensors, where an index would be passed over (PEFT)."""
        save_file({}, self.path / "model.safetensors")

    def write_engine(self, scheduler: Mapping[str, Any] | None) -> None:
        """What the Trainer looks for under DeepSpeed. scheduler: state of one that is not the engine's."""
        (self.path / "global_step0").mkdir()
        if scheduler is not None:
            torch.save(dict(scheduler), self.path / "scheduler.pt")

    def remove(self) -> None:
        """Gone; what cannot be removed is left to whoever clears temporary files."""
        shutil.rmtree(self.path, ignore_errors=True)


_log = logging.getLogger("driftpoint")

PLAN = "driftpoint"
"""Key among the Trainer's ``stateful_callbacks``, by which a callback knows a folder of ours."""


@dataclass(frozen=True)
class ResumePlan:
    """folder: what the Trainer is given. guard: keeps others from it. unloaded: keeps DeepSpeed from loading it. quiet:
    a hook of the model's that keeps the Trainer from warning of what the folder has not."""

    folder: Folder
    guard: ResumeGuard
    unloaded: Unloaded | None
    quiet: Any = None

    def end(self) -> None:
        """The Trainer needs it no more."""
        self.folder.remove()
        self.guard.end()
        if self.unloaded is not None:
            self.unloaded.end()
        if self.quiet is not None:
            self.quiet.remove()


def plan_resume(callback: TrainerCallback, config: Config, args: Any, model: Any, *, objects: int) -> ResumePlan | None:
    """Foresee, and write the folder. args, model: the Trainer's. objects: in the checkpointer's ``state=[...]``."""

    group = current_group()
    foreseen = predict_resume(config, group, objects)
    if foreseen is None:
        return None
    saved = None if foreseen.user is None else require_ours(next(iter(foreseen.user), None))
    folder = Folder()
    folder.write_state(_trainer_state(foreseen, saved, args, group))
    quiet = None
    if type(model).__module__.startswith("peft."):
        folder.write_no_weights()
        quiet = model.register_load_state_dict_post_hook(_misses_nothing)
    else:
        folder.write_weights(model.state_dict())
    unloaded: Unloaded | None = None
    if args.deepspeed_plugin is not None:
        from monitor.huggingface.deepspeed_engine import Unloaded

        folder.write_engine(None if saved is None else saved["lr_scheduler"])
        unloaded = Unloaded(folder.path)
    return ResumePlan(folder, ResumeGuard(folder.path, callback), unloaded, quiet)


def _misses_nothing(model: Any, keys: Any) -> None:
    """What the Trainer loads of our folder misses every tensor, which is as it is meant to be."""
    if len(keys.missing_keys) >= len(model.state_dict()):
        keys.missing_keys.clear()


def length_of(args: Any, state: Any, loader: Any) -> Length:
    """Of the training that begins. args, state, loader: the Trainer's."""
    try:
        batches = len(loader)
    except TypeError:  # nobody knows; the Trainer takes all steps for one epoch, and begins as many as it takes
        return Length(float(args.num_train_epochs), int(state.max_steps), sys.maxsize * max(1, int(state.max_steps)))
    updates = max(1, math.ceil(batches / args.gradient_accumulation_steps))
    return Length(float(args.num_train_epochs), int(state.max_steps), int(state.num_train_epochs) * updates)


def _trainer_state(foreseen: ResumePrediction, saved: Any, args: Any, group: Group) -> dict[str, Any]:
    """As rank 0 stored it. A commit that was imported says the step and no more."""
    step = foreseen.save.step
    if saved is None:
        state: dict[str, Any] = {"global_step": step, **_as_asked_for(args)}
    else:
        state = json.loads(group.broadcast(saved["trainer"]))
        length = Length(**saved["length"])
        if group.rank == 0 and length.beyond >= sys.maxsize and state["epoch"] >= 1 and not saved["at_epoch"]:
            _tell_later_pass(int(state["epoch"]) + 1, step)
        if _done(
            step, length, args
        ):  # the Trainer would take another step, if the last epoch was not to be a whole one
            state["global_step"] = max(step, length.beyond)
    told = {"save": foreseen.save.name, "memory": foreseen.memory}
    callbacks = dict(state.get("stateful_callbacks") or {})
    return {**state, "stateful_callbacks": {**callbacks, PLAN: {"args": {}, "attributes": told}}}


def _tell_later_pass(number: int, step: int) -> None:
    _log.warning(
        "pass %d over the data was under way at step %d, and of data without a length the Trainer does not know how "
        "much of a later pass is done: that pass begins anew",
        number,
        step,
    )


def _as_asked_for(args: Any) -> dict[str, Any]:
    """What the Trainer's state says of its arguments, where no state was stored."""
    steps = {name: getattr(args, name) for name in ("logging_steps", "eval_steps", "save_steps")}
    known = {name: int(value) for name, value in steps.items() if value is not None and value >= 1}  # else a share
    return {"train_batch_size": args.train_batch_size, **known}


def _done(step: int, length: Length, args: Any) -> bool:
    if args.max_steps > 0:
        return bool(step >= args.max_steps)
    return bool(step >= length.steps and args.num_train_epochs <= length.epochs)


def _place(config: Config) -> Path:
    return store_place(config.store)


class ResumeGuard:
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
