"""Under torchrun, without driftpoint on the path: stock DeepSpeed loads what was merged by recipe, and trains on.

Usage: recipe_load.py DIRECTORY OUT=CASE... — per output: ``OUT.pt`` (whole tensors as loaded, counters, step counts).
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from merge_cases import build, leave, train, whole_state


def run(out: Path, case: str) -> None:
    built = build(case, 2)
    assert built.load_checkpoint(str(out))[0] is not None
    steps = {float(state["step"]) for state in built.basic_optimizer.state.values() if "step" in state}
    found: dict[str, Any] = {"tensors": whole_state(built), "global_steps": built.global_steps, "steps": steps}
    losses = train(built, range(built.global_steps, built.global_steps + 2))
    assert all(math.isfinite(float.fromhex(loss)) for loss in losses)
    if dist.get_rank() == 0:
        torch.save(found, out.parent / f"{out.name}.pt")


def main(directory: Path, outputs: list[str]) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    for output in outputs:
        out, _, case = output.partition("=")
        run(directory / out, case)
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
