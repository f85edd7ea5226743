"""What ``trainer.train(resume_from_checkpoint=...)`` is given: a folder that says where the Trainer goes on.

The Trainer fixes its place in the data before it makes an optimizer, so the step has to be known before anything can be
resumed. It is foreseen from the store's records (:mod:`monitor.foresight`); the callback resumes when training begins,
compares, and trains nothing where the two differ. Training thread; collective.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monitor.config import Config, load_config
from monitor.foresight import Foreseen, foresee
from monitor.group import Group, current_group
from monitor.hf.folder import Folder
from monitor.hf.progress import Length, require_ours
from store.errors import UsageError
from store.place import store_place

if TYPE_CHECKING:
    from monitor.hf.callback import CheckpointCallback
    from monitor.hf.deepspeed_engine import Unloaded
    from monitor.hf.guard import Guard

_log = logging.getLogger("driftpoint")

PLAN = "driftpoint"
"""Key among the Trainer's ``stateful_callbacks``, by which a callback knows a folder of ours."""

_callbacks: weakref.WeakSet[CheckpointCallback] = weakref.WeakSet()
_numbers = itertools.count()


@dataclass(frozen=True)
class Planned:
    """folder: what the Trainer is given. guard: keeps others from it. unloaded: keeps DeepSpeed from loading it. quiet:
    a hook of the model's that keeps the Trainer from warning of what the folder has not."""

    folder: Folder
    guard: Guard
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


def resume_path(config: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None) -> str | None:
    """What to give ``trainer.train(resume_from_checkpoint=...)``; None where there is nothing to resume.

    Called on every rank, when there is a Trainer with a :class:`CheckpointCallback` of the same store: UsageError where
    there is none, since it would train on from weights that nobody loads. Else it raises as
    :meth:`monitor.Checkpointer.resume` does.
    """
    settings = load_config(config)
    found = same_store(settings)
    if not found:
        raise UsageError(
            f"no CheckpointCallback of the store {_place(settings)} is there, and the folder alone holds no weights: "
            "give the Trainer callbacks=[monitor.CheckpointCallback(...)] with the same configuration first"
        )
    return max(found, key=lambda callback: callback.number).resume_path()


def same_store(config: Config) -> list[CheckpointCallback]:
    """Every callback of this process that saves to the store of these settings."""
    return [callback for callback in _callbacks if _place(callback.config) == _place(config)]


def register(callback: CheckpointCallback) -> int:
    """Have :func:`resume_path` find it. Returns a number that later ones exceed."""
    _callbacks.add(callback)
    return next(_numbers)


def plan(callback: CheckpointCallback, args: Any, model: Any, *, objects: int) -> Planned | None:
    """Foresee, and write the folder. args, model: the Trainer's. objects: in the checkpointer's ``state=[...]``."""
    from monitor.hf.guard import Guard  # of transformers, which the caller has

    config = callback.config
    group = current_group()
    foreseen = foresee(config, group, objects)
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
        from monitor.hf.deepspeed_engine import Unloaded

        folder.write_engine(None if saved is None else saved["lr_scheduler"])
        unloaded = Unloaded(folder.path)
    return Planned(folder, Guard(folder.path, callback), unloaded, quiet)


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


def _trainer_state(foreseen: Foreseen, saved: Any, args: Any, group: Group) -> dict[str, Any]:
    """As rank 0 stored it. A commit that was imported says the step and no more."""
    step = foreseen.save.step
    if saved is None:
        state: dict[str, Any] = {"global_step": step, **_as_asked_for(args)}
    else:
        state = json.loads(group.from_first(saved["trainer"]))
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
