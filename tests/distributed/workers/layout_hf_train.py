"""Under torchrun: a Trainer runs each case to its end, while the state is saved into stores on the way.

Usage: layout_hf_train.py DIRECTORY — per case, in DIRECTORY/CASE: ``run/checkpoint-N`` (the Trainer's own), ``store``
(whole saves), ``composite`` (a partial second save), ``losses-RANK.json``, ``logits.pt`` (at step SAVED).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from layout_hf_cases import CASES, EARLIER, LATER, SAVED, logits_of, trainer
from merge_cases import leave
from merge_store import StoreWriter
from transformers import TrainerCallback

from monitor.adapters import adapter_for
from monitor.adapters.pytorch import PyTorchAdapter
from store.names import Unit


def in_the_later_save(unit: Unit) -> bool:
    """All weights, no moments."""
    return unit.slot == "fp32"


class Saving(TrainerCallback):  # type: ignore[misc]
    """Saves into the stores, as something inside of a training would."""

    def __init__(self, folder: Path, case: str) -> None:
        self.folder, self.case = folder, case
        self.running: Any = None
        self.stores: dict[str, StoreWriter] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """At the steps that the checks need."""
        step = state.global_step
        if not self.stores:
            adapter = self._adapter()
            self.stores = {name: StoreWriter(self.folder / name, adapter) for name in ("store", "composite")}
        if step == SAVED:
            self.stores["store"].save(step)
            self._keep_logits()
        if step == EARLIER:
            self.stores["composite"].save(step)
        if step == LATER:
            self.stores["composite"].save(step, in_the_later_save)

    def _adapter(self) -> Any:
        wrapped = self.running.model_wrapped
        if self.case != "ddp-fp32":
            return adapter_for(wrapped)
        return PyTorchAdapter(self.running.accelerator.unwrap_model(wrapped), self.running.optimizer.optimizer)

    def _keep_logits(self) -> None:
        logits = logits_of(self.running.model)
        if dist.get_rank() == 0:
            torch.save(logits, self.folder / "logits.pt")


def run(case: str, folder: Path) -> None:
    running = trainer(case, folder / "run", 0)
    saving = Saving(folder, case)
    saving.running = running
    running.add_callback(saving)
    running.train()
    (folder / f"losses-{dist.get_rank()}.json").write_text(json.dumps(running.losses))


def main(directory: Path) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    for case in CASES:
        if dist.get_rank() == 0:
            (directory / case).mkdir()
        dist.barrier()
        run(case, directory / case)
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
