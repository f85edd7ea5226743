"""Under torchrun, where nothing of driftpoint can be imported: stock DeepSpeed loads what was merged, and goes on.

Usage: merge_load.py DIRECTORY CASE... — per case: reads ``merged`` and ``merged-composite``; writes ``after-RANK.json``
(losses, client state), ``after-7`` (DeepSpeed's checkpoint) and ``composite.pt`` (whole tensors as loaded).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import barred
import deepspeed
import torch
import torch.distributed as dist
from merge_cases import COMPOSITES, LAST, SAVED, build, leave, train, whole_state


def run(case: str, folder: Path) -> None:
    built = build(case, 1)
    path, client = built.load_checkpoint(str(folder / "merged"))
    assert path is not None and built.global_steps == SAVED
    own = client["driftpoint"]["ranks"][dist.get_rank()]
    losses = train(built, range(SAVED, LAST))
    built.save_checkpoint(str(folder / f"after-{LAST}"))
    told = {
        "losses": losses,
        "save": client["driftpoint"]["save"],
        "rank": own["user"][1]["rank"],
        "matrix": own["user"][0]["matrix"].tolist(),
        "rng": type(own["rng"]["torch"]).__name__,
    }
    (folder / f"after-{dist.get_rank()}.json").write_text(json.dumps(told))


def run_composite(case: str, folder: Path) -> None:
    built = build(case, 2)
    assert built.load_checkpoint(str(folder / "merged-composite"))[0] is not None
    found = whole_state(built)
    train(built, range(SAVED, SAVED + 1))
    if dist.get_rank() == 0:
        torch.save(found, folder / "composite.pt")


def main(directory: Path, cases: Sequence[str]) -> None:
    barred.require_barred()
    deepspeed.init_distributed(dist_backend="gloo")
    for case in cases:
        run(case, directory / case)
    for case in cases:
        if case in COMPOSITES:
            run_composite(case, directory / case)
    barred.require_barred()
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
