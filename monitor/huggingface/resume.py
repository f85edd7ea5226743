"""Predict the resume, and write the stub folder that ``trainer.train(resume_from_checkpoint=...)`` resumes from.

The Trainer reads its step, its place in the data and its logs from ``trainer_state.json`` before it creates an
optimizer. So the resume step is predicted as a resume would find it, in-memory snapshots included, from records and run
states, but without tensors: damaged payload, or a model that does not match, is not noticed. The callback resumes when
training begins, compares the steps, and trains nothing if they differ; the actual step is then written to a file beside
the store, so that the next attempt predicts it. The folder holds no tensors: Driftpoint loads them, each byte once.
Every process has its own folder in the temporary directory, so no disk need be shared. Training thread; collective."""

import json
import logging
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from transformers import Trainer, TrainerCallback

from monitor.config.load import Config
from monitor.distributed import Group, current_group, run_on_all_ranks, run_on_rank0
from monitor.huggingface import patch_method
from monitor.huggingface.trainer_state import TRAINER, TrainerProgress, TrainingLength, require_trainer_progress
from monitor.memory.recovery import find_newest_snapshot
from monitor.resume.resume import memory_or_store
from monitor.resume.select import ResumePoint, read_run_state, resolve_commit, select_commit, select_run_state
from monitor.run_state import Objects, RunState, UserState, joined
from monitor.save.store_session import open_existing_store
from store.catalog import Catalog
from store.errors import UsageError
from store.location import beside, store_place
from store.memory.layout import Tier
from store.names import SaveId
from store.resolve import RejectedVersion
from store.schema import Digest, GroupRecord, Record, SaveName

_log = logging.getLogger("driftpoint")

PLAN = "driftpoint"  # key in the Trainer's ``stateful_callbacks`` by which a callback recognizes a stub folder

_EMPTY_FILE = "nothing.safetensors"


class PredictionOverride(Record, frozen=True, kw_only=True):
    """A wrong prediction and the actual resume point. The field names are the keys of a JSON file."""

    store_id: Digest
    foreseen: SaveName  # save whose run state was predicted
    onward: SaveName  # save whose run state was resumed
    group: GroupRecord  # of ``onward``


def read_override(config: Config, store_id: str) -> PredictionOverride | None:
    """Return the override of this store, None if there is none. Rank 0."""
    try:
        override = msgspec.json.decode(_path(config).read_bytes(), type=PredictionOverride)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, msgspec.DecodeError) as error:
        _log.warning("%s cannot be read and is ignored: %r", _path(config), error)
        return None
    return override if override.store_id == store_id else None


def write_override(config: Config, override: PredictionOverride) -> None:
    """Write an override for the next attempt; log a warning if that fails. Rank 0."""
    try:
        _path(config).write_bytes(msgspec.json.encode(override))
    except OSError as error:
        _log.warning("%s cannot be written, so the next attempt may predict a wrong step: %s", _path(config), error)


def remove_override(config: Config) -> None:
    """Remove the override after a correct prediction. Rank 0."""
    try:
        _path(config).unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s is outdated and cannot be removed: %s", _path(config), error)


def _path(config: Config) -> Path:
    return beside(store_place(config.store_path), ".resume.json")


@dataclass(frozen=True)
class ResumePrediction:
    """The expected result of a resume."""

    save: SaveId  # save whose run state will be loaded; the job continues from its step
    user: list[Any] | None  # this rank's state of each object in `state=`; None if the commit, an import, has none
    memory: bool  # In-memory snapshots were considered. If False, the resume must not use them


def predict_resume(config: Config, group: Group, user: UserState) -> ResumePrediction | None:
    """Predict what a job with these settings will resume; None if the store is empty. Changes nothing. Collective.

    user: the objects in ``state=``. Raises the errors of :meth:`monitor.Checkpointer.resume`."""
    catalog = open_existing_store(config.store_path, group, config.s3.options())
    if catalog is None:
        return None
    snapshot = None
    if config.memory.enabled:
        snapshot = find_newest_snapshot(Tier(Path(config.memory.path), catalog.store_id), catalog, None, group)
    point = memory_or_store(lambda view: _predict_resume_point(view, config, group, user), catalog, snapshot)
    if point is None:
        return None
    overridden = _apply_override(point.save, catalog, config, group)
    return overridden or ResumePrediction(point.save, _states(point.state), snapshot is not None)


def _states(state: RunState) -> list[Any] | None:
    return None if state.user is None else [one.state for one in state.user]


def _apply_override(predicted: SaveId, catalog: Catalog, config: Config, group: Group) -> ResumePrediction | None:
    override = run_on_rank0(group, partial(read_override, config, catalog.store_id))
    if override is None or override.foreseen != predicted.name:
        return None
    save = SaveId.parse(override.onward)
    found = read_run_state(catalog, save, override.group, group)
    return None if found.state is None else ResumePrediction(save, _states(found.state), False)


def _predict_resume_point(catalog: Catalog, config: Config, group: Group, user: UserState) -> ResumePoint | None:
    bad: frozenset[RejectedVersion] = frozenset()
    while True:
        name, _, _ = run_on_rank0(group, partial(select_commit, catalog, bad))
        if name is None:
            return None
        catalog.forget()
        resolution = run_on_all_ranks(group, partial(resolve_commit, catalog, SaveId.parse(name), bad))
        point = select_run_state(catalog, resolution, resolution.slots(), group, user=user, settings=config.resume)
        if not isinstance(point, RejectedVersion):
            return point
        bad |= {point}


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
        group.leave()
        return None
    saved = None if prediction.user is None else require_trainer_progress(next(iter(prediction.user), None))
    predicted = trainer_state(prediction, saved, args, group)
    group.leave()
    with ExitStack() as end:
        folder = Path(tempfile.mkdtemp(prefix="driftpoint-trainer-"))
        end.callback(shutil.rmtree, folder, ignore_errors=True)
        (folder / "trainer_state.json").write_text(json.dumps(predicted, indent=2))
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
    epochs = args.max_steps / updates if args.max_steps > 0 else args.num_train_epochs
    return TrainingLength(float(epochs), int(state.max_steps), int(state.num_train_epochs) * updates)


def trainer_state(
    prediction: ResumePrediction, saved: Mapping[str, Any] | None, args: Any, group: Group
) -> dict[str, Any]:
    """Return the Trainer's state as rank 0 stored it. An imported commit has only the step. Collective."""
    step = prediction.save.step
    if saved is None:
        steps = {name: getattr(args, name) for name in ("logging_steps", "eval_steps", "save_steps")}
        known = {name: int(value) for name, value in steps.items() if value is not None and value >= 1}  # else a share
        state: dict[str, Any] = {"global_step": step, "train_batch_size": args.train_batch_size, **known}
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
        whole = step >= length.steps and args.num_train_epochs <= length.epochs
        done = step >= args.max_steps if args.max_steps > 0 else whole
        if done:
            # With the last step itself the Trainer would train on if the last epoch was not to be a complete one.
            state["global_step"] = max(step, length.beyond)
    attributes = {"save": prediction.save.name, "memory": prediction.memory}
    callbacks = dict(state.get("stateful_callbacks") or {})
    return {**state, "stateful_callbacks": {**callbacks, PLAN: {"args": {}, "attributes": attributes}}}


def _refuse_other_trainers(folder: Path, callback: TrainerCallback) -> Callable[[], None]:
    """Let only a Trainer with ``callback`` load ``folder``. Return a function that ends this.

    Another one would train the script's initial weights from the resumed step on. Other folders load as usual."""
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
