"""Under torchrun: two runs that are merged by recipe, each saved at two steps into a store and with DeepSpeed itself.

Usage: recipe_train.py DIRECTORY — per run: ``store``, ``own`` (tags ``global_step2`` and ``global_step4``) and
``states.pt`` (whole tensors at both steps).
"""

from __future__ import annotations

import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from merge_cases import EARLIER, SAVED, build, leave, train, whole_state
from merge_store import StoreWriter

from monitor.adapters import adapter_for

RUNS = {"zero1-bf16": 0, "zero3-bf16-sub-groups": 5}
"""Case, and the seed of its weights: the runs have nothing in common but the model."""


def run(case: str, seed: int, folder: Path) -> None:
    built = build(case, seed)
    store = StoreWriter(folder / "store", adapter_for(built))
    states = {}
    for steps in (range(EARLIER), range(EARLIER, SAVED)):
        train(built, steps)
        states[steps.stop] = whole_state(built)
        store.save(steps.stop)
        built.save_checkpoint(str(folder / "own"))
    if dist.get_rank() == 0:
        torch.save(states, folder / "states.pt")


def main(directory: Path) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    for case, seed in RUNS.items():
        if dist.get_rank() == 0:
            (directory / case).mkdir()
        dist.barrier()
        run(case, seed, directory / case)
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
