"""Save and resume torchtitan's Trainer: a checkpoint manager that its config can name.

The Trainer calls ``load`` before its data iterator exists, and ``save`` after every step, on every rank."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchtitan.components.checkpointer import BaseCheckpointManager

from monitor.api import attach_counted
from monitor.checkpointer import Checkpointer
from store.errors import ConfigError, UnsupportedError

_KNOWN = {"enable", "folder", "interval"}
# no effect: the last save holds everything
_KNOWN |= {"last_save_model_only", "export_dtype", "initial_load_model_only"}


class TorchtitanCheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """``Trainer.Config(checkpoint=TorchtitanCheckpointManager.Config(enable=True, driftpoint="driftpoint.yaml"))``."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """Other settings of torchtitan's checkpoints are refused if they are set, not ignored."""

        driftpoint: str | None = None
        """Driftpoint's YAML. None: its defaults, a save every ``interval`` steps, and the store in ``folder``."""

    def __init__(self, config: Config, *, base_folder: str = "", **built: Any) -> None:
        """built: what the Trainer made: model_parts, optimizers, lr_schedulers, dataloader, states."""
        self.enable, self.save_future = config.enable, None
        self.checkpointer: Checkpointer | None = None  # set by load(), until close()
        if not self.enable:
            return
        default = BaseCheckpointManager.Config()
        for name in sorted({field.name for field in fields(default)} - _KNOWN):
            if getattr(config, name) != getattr(default, name):
                raise ConfigError(f"checkpoint.{name} has no meaning for Driftpoint: remove it; see docs/torchtitan.md")
        if len(built["model_parts"]) != 1:
            raise UnsupportedError(f"a pipeline schedule with {len(built['model_parts'])} stages on a rank")
        self._settings = config.driftpoint or {"store": str(Path(base_folder, config.folder)), "every": config.interval}
        self._target = (built["model_parts"][0], list(built["optimizers"].optimizers))
        objects = {**built["states"], "dataloader": built["dataloader"], "lr_scheduler": built["lr_schedulers"]}
        self._objects = {name: one for name, one in objects.items() if one is not None}

    def _load(self, step: int = -1) -> bool:
        if step != -1:
            raise UnsupportedError(f"checkpoint.load_step={step}: Driftpoint resumes its newest commit; set -1")
        trainer, loader = self._objects["train_state"], self._objects.get("dataloader")
        self.checkpointer = attach_counted(self._target, self._settings, self._objects, lambda: int(trainer.step))
        resumed = self.checkpointer.resume() > 0
        if resumed and isinstance(loader, DataLoader) and loader.generator is None:
            loader.generator = torch.Generator()  # the iterator, made next, would draw a seed from the restored one
        return resumed

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self.checkpointer is None:
            raise UnsupportedError("save() before load(): seed checkpoints are not supported")
        report = self.checkpointer.step()
        return self.checkpointer.commit_last_step() if last_step else report is not None and report.skipped is None

    def _maybe_wait_for_staging(self) -> None:
        """Return: the optimizers wait by themselves for copies under way, and ``save_future`` is never set."""

    _wait_for_saving = _maybe_wait_for_staging

    def _close(self) -> None:
        if self.checkpointer is not None:
            self.checkpointer.close()
