"""Under torchrun, where nothing of driftpoint can be imported: a stock Trainer resumes from what was merged.

Usage: layout_hf_resume.py DIRECTORY SPECS — SPECS: JSON list of {case, folder, out, micro}; writes ``OUT-RANK.json``
(losses and the Trainer's log) and ``OUT-logits.pt`` (before the first step).
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import barred
import deepspeed
import torch
import torch.distributed as dist
from layout_hf_cases import logits_of, trainer
from merge_cases import leave
from transformers import TrainerCallback


class Looking(TrainerCallback):  # type: ignore[misc]
    """Keeps the logits of the model as it was loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """The state has been loaded by now."""
        logits = logits_of(model)
        if dist.get_rank() == 0:
            torch.save(logits, self.path)


def run(directory: Path, spec: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as output:
        running = trainer(spec["case"], Path(output), 1, spec["micro"])
        running.args.save_strategy = "no"
        running.add_callback(Looking(directory / f"{spec['out']}-logits.pt"))
        running.train(resume_from_checkpoint=str(directory / spec["folder"]))
    told = {"losses": running.losses, "log": running.state.log_history, "step": running.state.global_step}
    (directory / f"{spec['out']}-{dist.get_rank()}.json").write_text(json.dumps(told))


def main(directory: Path, specs: list[dict[str, Any]]) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    for spec in specs:
        run(directory, spec)
    barred.require_barred()
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
