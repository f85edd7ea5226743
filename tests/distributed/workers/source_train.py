"""Under torchrun: trains each case with stock DeepSpeed, saves it with ``engine.save_checkpoint``, notes the truth.

Usage: source_train.py DIRECTORY CASE... — per case: ``saved`` (tags ``global_step2`` and ``global_step3``) and
``truth.pt`` of the last.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from merge_cases import leave
from source_cases import ADAPTERS, REFUSED, build, remember, train, truth


def run(case: str, folder: Path) -> None:
    engine = build(case)
    remember(engine)
    options: dict[str, Any] = {"client_state": {"mine": {"list": [1, 2.5, "three"]}}}
    if case in ADAPTERS:
        options["exclude_frozen_parameters"] = True
    train(engine, 2)
    engine.save_checkpoint(str(folder / "saved"), **options)
    train(engine, 1)
    engine.save_checkpoint(str(folder / "saved"), **options)
    if case in REFUSED:
        return
    found = truth(engine)
    if dist.get_rank() == 0:
        torch.save(found, folder / "truth.pt")


def main(directory: Path, cases: list[str]) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    for case in cases:
        run(case, directory / case)
        dist.barrier()
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
