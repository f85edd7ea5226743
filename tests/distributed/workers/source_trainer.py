"""Under torchrun: the stock Trainer with DeepSpeed runs each case for three steps and saves the last two.

Usage: source_trainer.py DIRECTORY CASE... — per case: ``run/checkpoint-N`` and ``weights.pt``, the masters at the end.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from layout_hf_cases import trainer
from merge_cases import leave


def main(directory: Path, cases: list[str]) -> None:
    for case in cases:
        running = trainer(case, directory / case / "run", 0)
        running.args.max_steps = 3
        running.train()
        weights = {
            name: safe_get_full_fp32_param(parameter).detach().clone()
            for name, parameter in running.model_wrapped.module.named_parameters()
        }
        if dist.get_rank() == 0:
            torch.save(weights, directory / case / "weights.pt")
            shutil.rmtree(directory / case / "run" / "checkpoint-1")
        dist.barrier()
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
