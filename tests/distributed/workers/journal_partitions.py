"""One link of a chain with the journal: resume with this partition, compare with what the link before left, train on
past the last save, go back one step if asked to, and die without a save.

Usage: journal_partitions.py SPEC.json
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from resume_jobs import Results, build, leave, rank, start_group
from resume_reshard import differences, whole

import monitor


def main(spec: Mapping[str, Any]) -> None:
    start_group(zero=spec["case"]["kind"] == "zero")
    results, left = Results(spec["results"]), Path(spec["directory"]) / "state.pt"
    if spec["case"]["kind"] == "zero":
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: True  # torch computes in fp16 on every CPU
    trainee = build(spec["case"], seed=spec["seed"])
    store = str(Path(spec["directory"]) / "store")
    settings = {"store": store, "every": spec["every"], "journal": {"enabled": True}, "metrics": {"enabled": False}}
    ckpt = monitor.attach(trainee.target, settings, state=trainee.state[-1:])  # an engine has the scheduler itself
    first, kept = ckpt.resume(), dict[int, dict[str, torch.Tensor]]()
    if left.exists():
        assert ckpt.certificate is not None
        before, now = torch.load(left, weights_only=True), whole(trainee)
        results.tell(
            "resumed",
            step=first,
            exact=ckpt.certificate.exact,
            sources=sorted({unit.source for unit in ckpt.certificate.units if unit.moving}),
            problems=ckpt.certificate.problems,
            same_names=before.keys() == now.keys(),
            error=max(error(before[name], now[name]) for name in before),
        )
    for step in range(first + 1, first + spec["steps"] + 1):
        trainee.step()
        ckpt.step()
        ckpt.flush()
        kept[step] = whole(trainee)
    if "back" in spec:
        step = ckpt.resume(step=spec["back"])
        assert ckpt.certificate is not None
        found = differences(kept[spec["back"]], whole(trainee))
        results.tell("back", step=step, exact=ckpt.certificate.exact, differences=found)
        trainee.step()
        ckpt.step()
        ckpt.flush()
    state = whole(trainee)
    if rank() == 0:
        torch.save(state, left)
    ckpt.finish(clean=False)
    leave()


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, in units of the largest value."""
    scale = one.abs().max().item() if one.numel() else 0.0
    gap = (one.double() - other.double()).abs().max().item() if one.numel() else 0.0
    return gap / scale if scale and math.isfinite(gap) else math.inf if gap else 0.0


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
