"""Under torchrun, nothing of driftpoint needed: trains the sources of this world size and saves them with DeepSpeed.

Usage: matrix_train.py DIRECTORY — per source ``SOURCE/own``, ``SOURCE/state.pt`` (the whole state, collected from the
engine) and ``SOURCE/losses-RANK.json`` (of the five steps that follow).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from layout_state import collect
from matrix_cases import LAST, SAVED, SOURCES, build
from merge_cases import leave, train


def main(directory: Path) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    for source in SOURCES:
        if source.world != dist.get_world_size():
            continue
        folder = directory / source.name
        built = build(source, 0)
        train(built, range(SAVED))
        built.save_checkpoint(str(folder / "own"))
        state = collect(built)
        if dist.get_rank() == 0:
            torch.save(state, folder / "state.pt")
        losses = train(built, range(SAVED, LAST))
        (folder / f"losses-{dist.get_rank()}.json").write_text(json.dumps(losses))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
