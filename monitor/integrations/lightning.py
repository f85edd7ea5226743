"""Attach, resume and step a checkpointer at the events of a Lightning Trainer.

No hook lies between the end of a step (with its validation and schedules) and the fetch of the next batch. So two
methods of the epoch loop are wrapped: ``advance`` begins with that fetch, ``on_run_start`` makes an epoch's iterator. A
resume makes it again, under the generators of its first making, and drops the batches already used. Collective."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from monitor.api import attach_counted
from monitor.checkpointer import Checkpointer
from monitor.config.load import ConfigSource, load_config
from monitor.run_state import Objects, capture_rng, joined, restore_rng
from store.errors import ConfigError, ModelMismatchError, StoreError, UnsupportedError

# Of Lightning's checkpoint: what Driftpoint saves by itself, and what the script constructs with.
_LEFT_OUT = {"state_dict", "optimizer_states", "hyper_parameters", "hparams_name", "hparams_type"}
_LEFT_OUT |= {"datamodule_hyper_parameters", "datamodule_hparams_name"}


class LightningCallback(Callback):  # type: ignore[misc]
    """Saves and resumes a Trainer: ``Trainer(callbacks=[monitor.LightningCallback("driftpoint.yaml")])``.

    ``config`` and ``state`` are as for :func:`monitor.attach`. ``fit()`` resumes by itself. Beside weights, optimizer
    and generators it saves loops, schedules, precision, callbacks, data module, and the place in the data."""

    def __init__(self, config: ConfigSource = None, *, state: Objects = ()) -> None:
        self.config = load_config(config)
        if self.config.resume.data == "on" or not self.config.preemption.exit:
            raise ConfigError("Lightning does not support resume.data: on, nor preemption.exit: false: remove them")
        self.checkpointer: Checkpointer | None = None  # set while training; closed when training ends
        self._extra, self._reported = state, 0  # the last step that was reported

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach and resume."""
        _require_supported(trainer, pl_module)
        self._progress = progress = TrainerProgress(trainer)
        target, steps = (trainer.strategy.model, trainer.optimizers[0]), lambda: int(trainer.global_step)
        self.checkpointer = attach_counted(target, self.config, joined({"lightning": progress}, self._extra), steps)
        self._reported = self.checkpointer.resume()  # if it fails, Lightning calls on_exception
        if self._reported != trainer.global_step:
            raise StoreError(f"step {self._reported} was resumed, and the Trainer is at step {trainer.global_step}")
        progress.begin()
        loop = trainer.fit_loop.epoch_loop
        loop.advance = partial(self._advance, trainer, partial(type(loop).advance, loop))
        loop.on_run_start = partial(progress.begin_epoch, partial(type(loop).on_run_start, loop))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the generators, which Lightning drew from to make the first iterator."""
        if self._progress.resumed is not None:
            restore_rng(self._progress.resumed)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Commit the last step. Raises SaveError if it is not committed."""
        self._report(trainer)
        if self.checkpointer is not None:
            self.checkpointer.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Release the store; first make the last save, if Lightning ends a preempted job between two steps."""
        try:
            if isinstance(exception, SIGTERMException):
                self._report(trainer)
        finally:
            self._close(clean=False)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Unwrap the loop, and release the store if nothing was left to train."""
        for name in ("advance", "on_run_start"):
            vars(trainer.fit_loop.epoch_loop).pop(name, None)
        self._close(clean=True)

    def _advance(self, trainer: Trainer, advance: Callable[[Any], None], fetcher: Any) -> None:
        self._report(trainer)
        self._progress.batch_began = capture_rng() if fetcher.length is None else {}
        advance(fetcher)

    def _report(self, trainer: Trainer) -> None:
        if self.checkpointer is not None and trainer.global_step != self._reported:
            self._reported = trainer.global_step
            self.checkpointer.step()

    def _close(self, *, clean: bool) -> None:
        if self.checkpointer is not None:  # without effect on one that is closed
            self.checkpointer.finish(clean=clean)
            self.checkpointer = None


class TrainerProgress:
    """The progress of one ``fit()`` on one rank, as an object in ``state=``."""

    def __init__(self, trainer: Trainer) -> None:
        self.resumed: Mapping[str, Any] | None = None  # generators of the resumed step, until an epoch begins
        self._trainer = trainer
        self._loaded: Mapping[str, Any] = {}  # the generators below, as saved
        self._fit_began: Mapping[str, Any] = {}  # before the loaders were made
        self._epoch_began: Mapping[str, Any] = {}  # before the epoch's first batch, with the loaders' own
        self.batch_began: Mapping[str, Any] = {}  # before the last fetch, which was one ahead: loaders have no length

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        saved = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        saved["loops"] = {"fit_loop": saved["loops"]["fit_loop"]}
        saved["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)  # the iterator is made again
        return {
            "ranks": trainer.world_size,
            "checkpoint": {key: one for key, one in saved.items() if key not in _LEFT_OUT},
            "accumulate": trainer.accumulate_grad_batches,
            "metrics": dict(trainer._logger_connector._callback_metrics),
            "began": {"fit": self._fit_began, "epoch": self._epoch_began, "batch": self.batch_began},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Raise ModelMismatchError if another number of ranks saved it, since each has its own place in the data."""
        trainer = self._trainer
        if saved["ranks"] != trainer.world_size:
            raise ModelMismatchError(f"the store is of a Trainer that had {saved['ranks']} ranks: start as many")
        connector, loop, checkpoint = trainer._checkpoint_connector, trainer.fit_loop, dict(saved["checkpoint"])
        connector._loaded_checkpoint = checkpoint
        trainer.lightning_module.on_load_checkpoint(checkpoint)
        for part in ("datamodule", "callbacks", "precision_plugin_state", "loops", "lr_schedulers"):
            getattr(connector, f"restore_{part}")()
        connector._loaded_checkpoint = {}
        if loop.epoch_progress.current.processed == loop.epoch_progress.current.ready:  # between two epochs
            loop._restarting = loop.epoch_loop.restarting = False
        trainer.accumulate_grad_batches = saved["accumulate"]
        trainer._logger_connector._callback_metrics.update(saved["metrics"])
        self._loaded = saved["began"]

    def begin(self) -> None:
        """Let the loaders be made under the generators that they were first made under."""
        if self._loaded:
            self.resumed = capture_rng()
            restore_rng(self._loaded["fit"])
        self._fit_began = capture_rng()

    def begin_epoch(self, on_run_start: Callable[[Any], None], fetcher: Any) -> None:
        """Begin an epoch and its iterator, or the rest of the epoch that was resumed."""
        fit_loop, resumed, self.resumed = self._trainer.fit_loop, self.resumed, None
        loop, generators = fit_loop.epoch_loop, _own_generators(fetcher)
        if resumed is None or not loop.restarting:
            self._epoch_began = {"global": capture_rng(), "own": [one.get_state() for one in generators]}
            on_run_start(fetcher)
            if resumed is not None:  # Lightning uses the iterator that it made together with the loaders
                iter(fetcher)
            return
        on_run_start(fetcher)
        self._epoch_began = self._loaded["epoch"]
        restore_rng(self._epoch_began["global"])
        for generator, state in zip(generators, self._epoch_began["own"], strict=True):
            generator.set_state(state)
        fetcher.fetched = 0
        if self._trainer.current_epoch > 0:  # the first epoch's iterator is made with the loaders
            iter(fetcher)
        for left in reversed(range(loop.batch_progress.current.ready)):
            if not left and self._loaded["batch"]:
                restore_rng(self._loaded["batch"])
            next(fetcher)
        # In an epoch that Lightning takes for restarted, it skips schedules and a validation.
        fit_loop._restarting = loop.restarting = False
        loop.val_loop.reset_restart_stage()
        restore_rng(resumed)


def _own_generators(fetcher: Any) -> list[torch.Generator]:  # of the data loaders and their samplers
    loaders = fetcher.combined_loader.flattened
    samplers = [getattr(loader, name, None) for loader in loaders for name in ("sampler", "batch_sampler")]
    owners = [*loaders, *samplers, *(getattr(one, "sampler", None) for one in samplers)]
    found = [getattr(one, "generator", None) for one in owners]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _require_supported(trainer: Trainer, module: LightningModule) -> None:
    strategy = type(trainer.strategy)
    refused = {
        "manual optimization": not module.automatic_optimization,
        f"strategy {strategy.__name__}": strategy not in (SingleDeviceStrategy, DDPStrategy),
        "reload_dataloaders_every_n_epochs": trainer.reload_dataloaders_every_n_epochs > 0,
        "training_step(dataloader_iter)": is_param_in_hook_signature(module.training_step, "dataloader_iter", True),
        "fit(ckpt_path=...), which restores over it,": trainer.ckpt_path is not None,
    }
    for what in (what for what, found in refused.items() if found):
        raise UnsupportedError(f"{what} is not supported by monitor.LightningCallback: see docs/lightning.md")
