"""The folder that stands for a checkpoint of the Trainer's: where it goes on, and nothing to load.

The Trainer takes its step, its place in the data and its logs from ``trainer_state.json`` before it makes an optimizer,
and then loads what else it finds. It finds no tensor: Driftpoint brings them when training begins, each byte read once.
Every process has a folder of its own, in the machine's temporary directory: no disk need be shared.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

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
