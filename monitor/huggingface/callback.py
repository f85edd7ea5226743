"""CheckpointCallback.

The state of a Trainer's other callbacks, those that it would put into its own checkpoints (``ExportableState``).

The Trainer tells a callback nothing of the others, so what holds them is looked for among the live objects. Whether
they are given their state at a resume is the Trainer's affair: ``restore_callback_states_from_checkpoint``. Training
thread.

What a Trainer is given: it attaches, resumes and steps a checkpointer at the Trainer's events.

A step is looked at not when it ends but when the next one (or the next epoch) begins: by then the Trainer has logged,
evaluated and judged it, and a resume goes on behind all that. The state stands still until then. Where the Trainer goes
on in its data is decided before there is an optimizer, from what :mod:`monitor.huggingface.resume` foresees; where
that is not
what was resumed, nothing is trained.

All of it happens in the training thread of every rank, in the same order: there are collectives in it.
"""

from __future__ import annotations

import gc
import itertools
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler, ExportableState

from monitor.api import attach_counted
from monitor.checkpointer import Checkpointer
from monitor.config.load import Config, load_config
from monitor.huggingface.resume import PLAN, ResumePlan, length_of, plan_resume
from monitor.huggingface.trainer_state import TrainerProgress
from monitor.resume.predict import PredictionOverride, remove_override, write_override
from monitor.run_state import capture_rng, restore_rng
from monitor.types import StepReport
from store.errors import ConfigError, StoreError, UnsupportedError, UsageError
from store.location import store_place
from store.names import SaveId


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


_callbacks: weakref.WeakSet[CheckpointCallback] = weakref.WeakSet()
_numbers = itertools.count()


class CheckpointCallback(TrainerCallback):  # type: ignore[misc]
    """``Trainer(..., callbacks=[monitor.CheckpointCallback("driftpoint.yaml")])``.

    config, state: as for :func:`monitor.attach`; the Trainer's own state, its schedule and its scaler are included.
    """

    def __init__(
        self, config: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None, *, state: Sequence[Any] = ()
    ) -> None:
        self.config = load_config(config)
        if self.config.resume.data == "on":
            raise ConfigError(
                "resume.data: on is not possible under the Trainer, whose place in the data is its step: remove it"
            )
        self.checkpointer: Checkpointer | None = None
        """From the beginning of training on; closed when training ends, and None from then on."""
        self.preempted = False
        """Whether training ended because the end of the job was announced, under ``preemption: {exit: false}``."""
        self._extra = list(state)
        self._args: Any = None
        self._model: Any = None
        self._planned: ResumePlan | None = None
        self._progress: TrainerProgress | None = None
        self._generators: Mapping[str, Any] | None = None
        self._pending = False
        self.number = register(self)

    def resume_path(self) -> str | None:
        """What to give ``trainer.train(resume_from_checkpoint=...)``: see :func:`monitor.resume_path`."""
        if self._args is None:
            raise UsageError("resume_path() was called before there is a Trainer: build it with this callback first")
        self._forget_plan()
        self._planned = plan_resume(self, self.config, self._args, self._model, objects=1 + len(self._extra))
        return None if self._planned is None else str(self._planned.folder.path)

    def on_init_end(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        """There is a Trainer."""
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
        """Everything is made: attach, and bring in what there is."""
        for one in same_store(self.config):
            one.close(clean=False)  # of a train() that an error ended
        scaler = getattr(optimizer, "scaler", None)
        length = length_of(args, state, train_dataloader)
        beside = callbacks_beside(self, optimizer)
        self._progress = TrainerProgress(state, lr_scheduler, scaler, length, args.process_index)
        self._progress.exported = lambda: exported_by(beside)
        target = _engine(model, optimizer) if args.deepspeed_plugin is not None else (model, optimizer)
        progress, self.preempted = self._progress, False
        self.checkpointer = attach_counted(
            target, self.config, [progress, *self._extra], lambda: int(progress.state.global_step)
        )
        try:
            self._resume(self.checkpointer, progress, state)
        except BaseException:
            self.close(clean=False)
            raise
        finally:
            self._forget_plan()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, *, train_dataloader: Any = None, **_: Any) -> None:
        """Before the epoch's data is touched."""
        self._look(state, at_epoch=True)
        if self._progress is not None:
            self._begin_epoch(self._progress)
            if self._progress.loaded is not None and state.epoch >= 1:
                _seed_apart(train_dataloader)
        self._stop(control)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The batches of the next step are there."""
        self._look(state, at_epoch=False)
        if self._progress is not None:
            self._begin_step(self._progress)
        self._stop(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step was taken."""
        self._pending = True
        if self._progress is not None:
            self._progress.at_epoch = float(state.epoch).is_integer()

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any = None, **_: Any) -> None:
        """The summary of the training comes before the best model is loaded over the last one. The end is saved, too,
        whatever the interval: else a finished job would have what was trained since its newest commit nowhere."""
        if logs and "train_runtime" in logs:
            trained = self._pending
            report = self._look(state, at_epoch=True)
            saved = report is not None and (report.saved or report.preempted)
            if trained and not saved and self.checkpointer is not None and not self.checkpointer.preempted:
                self.checkpointer.save(wait=True)
            if self.checkpointer is not None:
                self.checkpointer.copied()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for the save under way, and let go of the store."""
        self.close(clean=True)
        self._forget_plan()

    def _stop(self, control: Any) -> None:
        """The Trainer looks when the step that has begun is over."""
        if self.checkpointer is not None and self.checkpointer.preempted:
            self.preempted = control.should_training_stop = True

    def close(self, *, clean: bool) -> None:
        """Close the checkpointer, if there is one. clean: the job ends as it was meant to."""
        checkpointer, self.checkpointer = self.checkpointer, None
        self._pending, self._generators = False, None
        if checkpointer is not None:
            checkpointer.finish(clean=clean)

    def _resume(self, checkpointer: Checkpointer, progress: TrainerProgress, state: Any) -> None:
        planned = (state.stateful_callbacks or {}).pop(PLAN, None)
        if planned is None and checkpointer.holds_commits:
            raise UsageError(
                f"the store {self.config.store} holds commits, and the Trainer does not go on from them: call "
                "trainer.train(resume_from_checkpoint=monitor.resume_path(...)), or name another `store:`"
            )
        if planned is not None:  # where nothing is left to do the Trainer was told a step beyond all epochs
            state.global_step = SaveId.parse(planned["attributes"]["save"]).step
        step = checkpointer.resume(memory=planned is not None and bool(planned["attributes"]["memory"]))
        if step != state.global_step:
            self._tell_otherwise(checkpointer, planned)
            raise StoreError(
                f"step {state.global_step} was foreseen, from which the Trainer's place in the data follows, and what "
                f"can be resumed is step {step} (see the log for what is damaged). Nothing was trained: start the job "
                "anew, it will expect that"
            )
        if checkpointer.rank == 0 and planned is not None:
            remove_override(self.config)
        if progress.loaded is not None:
            self._generators = capture_rng()

    def _tell_otherwise(self, checkpointer: Checkpointer, planned: Mapping[str, Any] | None) -> None:
        found = checkpointer.resumed
        if checkpointer.rank == 0 and planned is not None and found is not None:
            commit, onward = found.resolution.manifest, found.resume_point.save
            groups = {version.save: version.group for version in found.resolution.versions.values()}
            group = groups.get(onward) or commit.groups[onward.name]
            correction = PredictionOverride(
                commit.store_id, planned["attributes"]["save"], onward.name, group.model_dump()
            )
            write_override(self.config, correction)

    def _begin_epoch(self, progress: TrainerProgress) -> None:
        """The epoch that is gone on with begins as it did then, so that the same order is drawn for its data. Epochs
        may begin more than once until a step does, where all of them that an iterable had are skipped."""
        if self._generators is not None and progress.loaded is not None:
            before = self._generators if progress.loaded.at_epoch else progress.loaded.epoch_began
            if before is not None:
                restore_rng(before)
        progress.at_epoch, progress.epoch_began = True, capture_rng()

    def _begin_step(self, progress: TrainerProgress) -> None:
        """The generators, where they were when the commit was made: what the Trainer drew to get there was drawn
        before."""
        if self._generators is not None and progress.loaded is not None:
            if not progress.loaded.at_epoch:
                restore_rng(self._generators)
            self._generators = None
        progress.at_epoch = False

    def _look(self, state: Any, *, at_epoch: bool) -> StepReport | None:
        if not self._pending or self.checkpointer is None or self._progress is None:
            return None
        self._pending = False
        self._progress.state, self._progress.at_epoch = state, at_epoch
        return self.checkpointer.step()

    def _forget_plan(self) -> None:
        planned, self._planned = self._planned, None
        if planned is not None:
            planned.end()


def _seed_apart(loader: Any) -> None:
    """Workers that persist are seeded when a job's first epoch begins. In a job that goes on in a later one that must
    not move the generators, as it did not there."""
    inner = getattr(loader, "base_dataloader", loader)
    if getattr(inner, "persistent_workers", False) and inner.generator is None:
        inner.generator = torch.Generator()
        inner.generator.seed()


def _engine(model: Any, optimizer: Any) -> Any:
    try:
        from monitor.huggingface.deepspeed_engine import engine_of
    except ImportError as error:
        raise UnsupportedError("DeepSpeed is on and not installed: `pip install 'driftpoint[deepspeed]'`") from error
    return engine_of(model, optimizer)


def resume_path(config: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None) -> str | None:
    """What to give ``trainer.train(resume_from_checkpoint=...)``; None where there is nothing to resume.

    Called on every rank, when there is a Trainer with a :class:`CheckpointCallback` of the same store: UsageError where
    there is none, since it would train on from weights that nobody loads. Else it raises as
    :meth:`monitor.Checkpointer.resume` does.
    """
    settings = load_config(config)
    found = same_store(settings)
    if not found:
        place = store_place(settings.store)
        raise UsageError(
            f"no CheckpointCallback of the store {place} is there, and the folder alone holds no weights: "
            "give the Trainer callbacks=[monitor.CheckpointCallback(...)] with the same configuration first"
        )
    return max(found, key=lambda callback: callback.number).resume_path()


def same_store(config: Config) -> list[CheckpointCallback]:
    """Every callback of this process that saves to the store of these settings."""
    return [callback for callback in _callbacks if store_place(callback.config.store) == store_place(config.store)]


def register(callback: CheckpointCallback) -> int:
    """Have :func:`resume_path` find it. Returns a number that later ones exceed."""
    _callbacks.add(callback)
    return next(_numbers)
