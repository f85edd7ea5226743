"""Attach, resume and step a checkpointer at a Trainer's events.

A step is reported not when it ends but when the next step (or epoch) begins: by then the Trainer has logged and
evaluated it, and a resume continues after all that. The state does not change in between. The place in the data is
fixed before there is an optimizer, from the prediction of :mod:`monitor.huggingface.resume`; if the resume ends up at
another step, nothing is trained. All runs in every rank's training thread, in the same order: it has collectives."""

import gc
import itertools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler, ExportableState

from monitor.api import attach_counted
from monitor.checkpointer import Checkpointer
from monitor.config.load import Config, ConfigSource, load_config
from monitor.huggingface import resume
from monitor.huggingface.trainer_state import TRAINER, TrainerProgress
from monitor.run_state import Objects, capture_rng, joined, restore_rng
from store.errors import ConfigError, SaveError, StoreError, UsageError
from store.location import store_place
from store.names import SaveId, group_by_key

_callbacks: "weakref.WeakSet[CheckpointCallback]" = weakref.WeakSet()
_numbers = itertools.count()


class CheckpointCallback(TrainerCallback):  # type: ignore[misc]
    """Saves and resumes a Trainer: ``Trainer(..., callbacks=[monitor.CheckpointCallback("driftpoint.yaml")])``.

    ``config`` and ``state`` are as for :func:`monitor.attach`. The Trainer's state, schedule and scaler are saved."""

    def __init__(self, config: ConfigSource = None, *, state: Objects = ()) -> None:
        self.config = load_config(config)
        if self.config.resume.data == "on":
            raise ConfigError(
                "resume.data: on is not supported under the Trainer, whose place in the data follows from the step: "
                "remove it"
            )
        if self.config.journal.enabled:
            raise ConfigError("journal: the Trainer fixes its place in the data before steps are replayed: turn it off")
        self.checkpointer: Checkpointer | None = None  # set while training; closed when training ends
        self.preempted = False
        """Whether training ended because of a preemption signal, under ``preemption: {exit: false}``."""
        self._extra = state
        self._args: Any = None
        self._model: Any = None
        self._plan: resume.ResumePlan | None = None
        self._progress: TrainerProgress | None = None
        self._generators: Mapping[str, Any] | None = None
        self._pending = False
        self._failed_save: SaveError | None = None
        _callbacks.add(self)
        self.number = next(_numbers)  # later callbacks have greater numbers

    def resume_path(self) -> str | None:
        """Return the folder for ``trainer.train(resume_from_checkpoint=...)``; None if there is nothing to resume."""
        if self._args is None:
            raise UsageError(
                "resume_path() was called before there is a Trainer with this callback: create it with "
                "Trainer(callbacks=[...]) first; add_callback() comes too late"
            )
        self._drop_plan()
        self._plan = resume.plan_resume(self, self.config, self._args, self._model, state=self._extra)
        return None if self._plan is None else str(self._plan.folder)

    def on_init_end(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        self._args, self._model = args, model

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        model: Any,
        optimizer: Any,
        lr_scheduler: Any,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        for one in _callbacks_of_store(self.config):
            one.close(clean=False)  # left by a train() that failed
        scaler = getattr(optimizer, "scaler", None)
        length = resume.training_length(args, state, train_dataloader)
        callbacks = _callbacks_of_trainer(self, optimizer)
        sampler = getattr(train_dataloader, "synchronized_generator", None)
        self._progress = TrainerProgress(state, lr_scheduler, scaler, length, args.process_index, sampler=sampler)
        self._progress.exported = lambda: _exported_states(callbacks)
        target = (model, optimizer)
        if args.deepspeed_plugin is not None:
            from monitor.huggingface.deepspeed_engine import engine_of

            target = engine_of(model, optimizer)
        progress, self.preempted = self._progress, False
        self.checkpointer = attach_counted(
            target, self.config, joined({TRAINER: progress}, self._extra), lambda: int(progress.state.global_step)
        )
        try:
            self._resume(self.checkpointer, progress, state)
        except BaseException:
            self.close(clean=False)
            raise
        finally:
            self._drop_plan()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, *, train_dataloader: Any = None, **_: Any) -> None:
        """Report the last step, before the epoch's data is touched."""
        self._report_step(state, at_epoch=True)
        if self._progress is not None:
            self._begin_epoch(self._progress)
            if self._progress.loaded is not None and state.epoch >= 1:
                _reseed_workers(train_dataloader)
        self._stop(control)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the last step; the batches of the next one are already drawn."""
        self._report_step(state, at_epoch=False)
        if self._progress is not None:
            self._begin_step(self._progress)
        self._stop(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._pending = True
        if self._progress is not None:
            self._progress.at_epoch = float(state.epoch).is_integer()

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any = None, **_: Any) -> None:
        """Save the end of the training at its summary, before the best model is loaded over the last one.

        The interval does not matter here: otherwise the steps since the newest commit would be saved nowhere."""
        if logs and "train_runtime" in logs:
            self._report_step(state, at_epoch=self._progress is not None and self._progress.at_epoch)
            if self.checkpointer is not None:
                try:
                    self.checkpointer.commit_last_step()
                except SaveError as error:  # raised when the Trainer has loaded the best model
                    self._failed_save = error
                self.checkpointer.copied()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Release the store. Raises SaveError if the last step is not committed."""
        self.close(clean=True)
        self._drop_plan()
        failed, self._failed_save = self._failed_save, None
        if failed is not None:
            raise failed

    def _stop(self, control: Any) -> None:
        # The Trainer checks the flag when the step that has begun is over.
        if self.checkpointer is not None and self.checkpointer.preempted:
            self.preempted = control.should_training_stop = True

    def close(self, *, clean: bool) -> None:
        """Close the checkpointer, if there is one. ``clean``: whether the training ended without an error."""
        checkpointer, self.checkpointer = self.checkpointer, None
        self._pending, self._generators = False, None
        if checkpointer is not None:
            checkpointer.finish(clean=clean)

    def _resume(self, checkpointer: Checkpointer, progress: TrainerProgress, state: Any) -> None:
        planned = (state.stateful_callbacks or {}).pop(resume.PLAN, None)
        if planned is None and checkpointer.holds_commits:
            raise UsageError(
                f"the store {self.config.store_path} holds commits, but the Trainer does not resume from them: call "
                "trainer.train(resume_from_checkpoint=monitor.resume_path(...)), or set another `store:`"
            )
        if planned is not None:  # if the training is complete, the stub folder has a step beyond all epochs
            state.global_step = SaveId.parse(planned["attributes"]["save"]).step
        step = checkpointer.resume(memory=planned is not None and bool(planned["attributes"]["memory"]))
        if step != state.global_step:
            self._record_prediction_error(checkpointer, planned)
            raise StoreError(
                f"step {state.global_step} was predicted, which fixed the Trainer's place in the data, but only step "
                f"{step} can be resumed (the log names the damage). Nothing was trained: start the job again, and it "
                f"will resume from step {step}"
            )
        if checkpointer.rank == 0 and planned is not None:
            resume.remove_override(self.config)
        if progress.loaded is not None:
            self._generators = capture_rng()

    def _record_prediction_error(self, checkpointer: Checkpointer, planned: Mapping[str, Any] | None) -> None:
        resumed = checkpointer.resumed
        if checkpointer.rank == 0 and planned is not None and resumed is not None:
            commit, save = resumed.resolution.manifest, resumed.resume_point.save
            groups = {version.save: version.group for version in resumed.resolution.versions.values()}
            group = groups.get(save) or commit.groups[save.name]
            predicted = planned["attributes"]["save"]
            found = {"store_id": commit.store_id, "foreseen": predicted, "onward": save.name, "group": group}
            resume.write_override(self.config, resume.PredictionOverride(**found))

    def _begin_epoch(self, progress: TrainerProgress) -> None:
        """Restore the generators that the resumed epoch began with, so that its data is drawn in the same order.

        Epochs may begin more than once before a step does, if all batches of an iterable are skipped."""
        if self._generators is not None and progress.loaded is not None:
            before = self._generators if progress.loaded["at_epoch"] else progress.loaded.get("epoch_began")
            if before is not None:
                restore_rng(before)
            progress.restore_sampler()
        progress.begin_epoch(capture_rng())

    def _begin_step(self, progress: TrainerProgress) -> None:
        """Restore the generators of the commit, after the Trainer drew from them to skip to its place in the data."""
        if self._generators is not None and progress.loaded is not None:
            if not progress.loaded["at_epoch"]:
                restore_rng(self._generators)
            self._generators = None
        progress.at_epoch = False

    def _report_step(self, state: Any, *, at_epoch: bool) -> None:
        if self._pending and self.checkpointer is not None and self._progress is not None:
            self._pending = False
            self._progress.state, self._progress.at_epoch = state, at_epoch
            self.checkpointer.step()

    def _drop_plan(self) -> None:
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.end.close()


def _reseed_workers(loader: Any) -> None:
    """Seed persistent workers without the global generators.

    They are seeded when a job's first epoch begins. In a resumed job that is a later epoch, at whose beginning the
    uninterrupted job did not draw from the generators."""
    inner = getattr(loader, "base_dataloader", loader)
    if getattr(inner, "persistent_workers", False) and inner.generator is None:
        inner.generator = torch.Generator()
        inner.generator.seed()


def _callbacks_of_trainer(callback: TrainerCallback, optimizer: Any) -> list[TrainerCallback]:
    """Return the live list of callbacks of the Trainer that calls ``callback`` and trains with ``optimizer``.

    The Trainer does not pass it to callbacks, so live objects are searched. Empty if no Trainer calls ``callback``."""
    for one in gc.get_objects():
        if type(one) is CallbackHandler and one.optimizer is optimizer and any(it is callback for it in one.callbacks):
            callbacks: list[TrainerCallback] = one.callbacks
            return callbacks
    return []


def _exported_states(callbacks: Iterable[TrainerCallback]) -> dict[str, Any]:
    """Return the states of exportable callbacks by class name, as in ``trainer_state.json``: a list for several.

    The Trainer restores them at a resume only under ``restore_callback_states_from_checkpoint``."""
    states = group_by_key((type(one).__name__, one.state()) for one in callbacks if isinstance(one, ExportableState))
    return {name: one[0] if len(one) == 1 else one for name, one in states.items()}


def resume_path(config: ConfigSource = None) -> str | None:
    """Return the folder for ``trainer.train(resume_from_checkpoint=...)``; None if there is nothing to resume.

    Call it on every rank, after creating a Trainer with a :class:`CheckpointCallback` of the same store. Raise
    UsageError if there is none, because no weights would be loaded; otherwise the errors of
    :meth:`monitor.Checkpointer.resume`."""
    settings = load_config(config)
    callbacks = _callbacks_of_store(settings)
    if not callbacks:
        raise UsageError(
            f"there is no CheckpointCallback of the store {store_place(settings.store_path)}, and the folder alone "
            "holds no weights: first give the Trainer callbacks=[monitor.CheckpointCallback(...)] with the same "
            "configuration"
        )
    return max(callbacks, key=lambda callback: callback.number).resume_path()


def _callbacks_of_store(config: Config) -> list[CheckpointCallback]:
    place = store_place(config.store_path)
    return [callback for callback in _callbacks if store_place(callback.config.store_path) == place]
