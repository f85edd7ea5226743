"""Under torchrun on two ranks, without driftpoint: what stock DeepSpeed makes of universal checkpoints by itself.

Usage: layout_traps.py SPEC — in its directory, ``traps.pt``: by (source, stage) the state as loaded with
``engine.load_checkpoint`` and nothing else, and the steps after training on; ``small-RANK.json``: the error of a rank
that holds nothing of a param group.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import barred
import deepspeed
import torch
import torch.distributed as dist
from layout_cases import LAST, SAVED, SOURCES, engine_of, settings
from layout_state import collect
from merge_cases import train

LOADED = (("fp32-zero2-on2", 2), ("fp32-zero2-on2", 3), ("bf16-round-robin-zero2-on2", 2))


def load(source: str, stage: int, directory: Path) -> dict[str, object]:
    family = SOURCES[source].family
    built = engine_of(family, 1, {**settings(family, stage), "checkpoint": {"load_universal": True}})
    before = {name: buffer.clone() for name, buffer in built.module.named_buffers()}
    built.load_checkpoint(str(directory / source / "universal"))
    loaded = collect(built)
    train(built, range(SAVED, LAST))
    return {"before": before, "loaded": loaded, "steps": collect(built)["steps"]}


def main(directory: Path) -> None:
    barred.require_barred()
    deepspeed.init_distributed(dist_backend="gloo")
    found = {(source, stage): load(source, stage, directory) for source, stage in LOADED}
    if dist.get_rank() == 0:
        torch.save(found, directory / "traps.pt")
    dist.barrier()
    try:
        load("adapters-zero2-on2", 2, directory)
        error = "none"
    except (IndexError, RuntimeError) as failure:  # RuntimeError: the other rank, which waits for this one
        error = type(failure).__name__
    (directory / f"small-{dist.get_rank()}.json").write_text(json.dumps(error))
    os._exit(0)


if __name__ == "__main__":
    main(Path(json.loads(Path(sys.argv[1]).read_text())["directory"]))
