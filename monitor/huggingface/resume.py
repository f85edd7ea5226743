"""Write the stub folder that ``trainer.train(resume_from_checkpoint=...)`` resumes from.

The Trainer reads its step, its place in the data and its logs from ``trainer_state.json`` before it creates an
optimizer, so the resume step is predicted from the store's records (:mod:`monitor.resume.predict`). The callback
resumes when training begins, compares the steps, and trains nothing if they differ. The folder holds no tensors:
Driftpoint loads them, each byte once. Every process has its own folder in the temporary directory, so no disk need be
shared. Training thread; collective."""

import json
import logging
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Trainer, TrainerCallback

from monitor.config.load import Config
from monitor.distributed import Group, current_group
from monitor.huggingface import patch_method
from monitor.huggingface.trainer_state import TRAINER, TrainerProgress, TrainingLength, require_trainer_progress
from monitor.resume.predict import ResumePrediction, predict_resume
from monitor.run_state import Objects, UserState, joined
from store.errors import UsageError

_log = logging.getLogger("driftpoint")

PLAN = "driftpoint"  # key in the Trainer's ``stateful_callbacks`` by which a callback recognizes a stub folder
_EMPTY_FILE = "nothing.safetensors"


@dataclass(frozen=True)
class ResumePlan:
    """A stub folder, and what holds until training begins: ``end.close()`` removes the folder and the patches."""

    folder: Path
    end: ExitStack


def plan_resume(
    callback: TrainerCallback, config: Config, args: Any, model: Any, *, state: Objects
) -> ResumePlan | None:
    """Predict the resume and write the stub folder. Return None if there is nothing to resume.

    callback: will resume. args, model: the Trainer's. state: the user's objects, without that of the Trainer."""
    group = current_group()
    # The real progress does not exist yet.
    progress = TrainerProgress(None, None, None, TrainingLength(0.0, 0, 0), group.rank)
    prediction = predict_resume(config, group, UserState(joined({TRAINER: progress}, state)))
    if prediction is None:
        return None
    saved = None if prediction.user is None else require_trainer_progress(next(iter(prediction.user), None))
    with ExitStack() as end:
        folder = Path(tempfile.mkdtemp(prefix="driftpoint-trainer-"))
        end.callback(shutil.rmtree, folder, ignore_errors=True)
        (folder / "trainer_state.json").write_text(json.dumps(trainer_state(prediction, saved, args, group), indent=2))
        if type(model).__module__.startswith("peft."):
            save_file({}, folder / "model.safetensors")  # PEFT does not read an index
            # Keeps the Trainer from warning of missing tensors.
            end.callback(model.register_load_state_dict_post_hook(_ignore_missing_keys).remove)
        else:  # an index that puts every tensor into a file without tensors: none is missing, and none is read
            save_file({}, folder / _EMPTY_FILE)
            index = {"metadata": {}, "weight_map": dict.fromkeys(model.state_dict(), _EMPTY_FILE)}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        if args.deepspeed_plugin is not None:
            from monitor.huggingface.deepspeed_engine import skip_engine_load

            (folder / "global_step0").mkdir()
            if saved is not None and saved["lr_scheduler"] is not None:  # of a scheduler outside the engine
                torch.save(dict(saved["lr_scheduler"]), folder / "scheduler.pt")
            end.callback(skip_engine_load(folder))
        end.callback(_refuse_other_trainers(folder, callback))
        return ResumePlan(folder, end.pop_all())


def _ignore_missing_keys(model: Any, keys: Any) -> None:
    """Clear the missing keys if every tensor is missing, as in a load of the stub folder."""
    if len(keys.missing_keys) >= len(model.state_dict()):
        keys.missing_keys.clear()


def training_length(args: Any, state: Any, loader: Any) -> TrainingLength:
    """Return the length of the training that begins, from the Trainer's arguments, state and data loader."""
    try:
        batches = len(loader)
    except TypeError:  # unknown; the Trainer counts all steps as one epoch, and begins as many as it takes
        steps = int(state.max_steps)
        return TrainingLength(float(args.num_train_epochs), steps, sys.maxsize * max(1, steps))
    updates = max(1, math.ceil(batches / args.gradient_accumulation_steps))
    return TrainingLength(float(args.num_train_epochs), int(state.max_steps), int(state.num_train_epochs) * updates)


def trainer_state(
    prediction: ResumePrediction, saved: Mapping[str, Any] | None, args: Any, group: Group
) -> dict[str, Any]:
    """Return the Trainer's state as rank 0 stored it. An imported commit has only the step. Collective."""
    step = prediction.save.step
    if saved is None:
        state: dict[str, Any] = {"global_step": step, **_state_from_arguments(args)}
    else:
        state = json.loads(group.broadcast(saved["trainer"]))
        length = TrainingLength(**saved["length"])
        if group.rank == 0 and length.beyond >= sys.maxsize and state["epoch"] >= 1 and not saved["at_epoch"]:
            _log.warning(
                "pass %d over the data was in progress at step %d, and for data without a length the Trainer does not "
                "know how much of a later pass is done: that pass starts again",
                int(state["epoch"]) + 1,
                step,
            )
        if _is_done(step, length, args):
            # With the last step itself the Trainer would train on if the last epoch was not to be a complete one.
            state["global_step"] = max(step, length.beyond)
    attributes = {"save": prediction.save.name, "memory": prediction.memory}
    callbacks = dict(state.get("stateful_callbacks") or {})
    return {**state, "stateful_callbacks": {**callbacks, PLAN: {"args": {}, "attributes": attributes}}}


def _state_from_arguments(args: Any) -> dict[str, Any]:
    """Return the part of the Trainer's state that follows from its arguments, where no state was stored."""
    steps = {name: getattr(args, name) for name in ("logging_steps", "eval_steps", "save_steps")}
    known = {name: int(value) for name, value in steps.items() if value is not None and value >= 1}  # else a share
    return {"train_batch_size": args.train_batch_size, **known}


def _is_done(step: int, length: TrainingLength, args: Any) -> bool:
    if args.max_steps > 0:
        return bool(step >= args.max_steps)
    return bool(step >= length.steps and args.num_train_epochs <= length.epochs)


def _refuse_other_trainers(folder: Path, callback: TrainerCallback) -> Callable[[], None]:
    """Let only a Trainer with ``callback`` load ``folder``. Return a function that ends this.

    Another one would train the script's initial weights and count from the resumed step. Other folders load as usual.
    """
    original = Trainer._load_from_checkpoint

    def _load_from_checkpoint(trainer: Any, resume_from_checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
        known = any(one is callback for one in trainer.callback_handler.callbacks)
        if str(resume_from_checkpoint) == str(folder) and not known:
            raise UsageError(
                "this Trainer does not have the CheckpointCallback whose resume_path() it was given, so its "
                "weights would not be loaded: give the Trainer callbacks=[monitor.CheckpointCallback(...)]"
            )
        return original(trainer, resume_from_checkpoint, *args, **kwargs)

    return patch_method(Trainer, _load_from_checkpoint)
