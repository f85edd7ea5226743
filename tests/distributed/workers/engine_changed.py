"""Engines of every ZeRO stage that change in mid-run: what each rank is told, and what is saved.

Usage: engine_changed.py SPEC.json
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from adapter_model import batches, engine
from resume_jobs import ZERO, Results, leave, rank, start_group
from torch import nn

import monitor
from store.catalog import open_catalog
from store.storage.local import LocalFiles
from tests.support.fingerprint import differing, fingerprint
from tests.support.internals import job_of

Undo = Callable[[], None]


def another_group(built: Any) -> Undo:
    """In the optimizer that ZeRO wraps, behind its back."""
    groups = built.basic_optimizer.param_groups
    built.basic_optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    return lambda: groups.__delitem__(-1)


def another_module_on_one_rank(built: Any) -> Undo:
    if rank() == 1:
        built.module.add_module("adapter", nn.Linear(2, 2).requires_grad_(False))
    return lambda: delattr(built.module, "adapter") if rank() == 1 else None


def a_module_in_place_of_one(built: Any) -> Undo:
    """ZeRO keeps the parameters of the one before."""
    before = built.module.blocks[0].norm
    built.module.blocks[0].norm = nn.LayerNorm(13).to(next(built.module.parameters()).dtype)

    def undo() -> None:
        built.module.blocks[0].norm = before

    return undo


def another_optimizer(built: Any) -> Undo:
    before = built.optimizer
    built.optimizer = copy.copy(before)

    def undo() -> None:
        built.optimizer = before

    return undo


def another_optimizer_inside(built: Any) -> Undo:
    before = built.optimizer.optimizer
    built.optimizer.optimizer = copy.copy(before)

    def undo() -> None:
        built.optimizer.optimizer = before

    return undo


CHANGES = {0: [another_group, another_module_on_one_rank, another_optimizer]}
CHANGES |= {
    stage: [another_group, another_module_on_one_rank, a_module_in_place_of_one, another_optimizer,
            another_optimizer_inside]
    for stage in (1, 2, 3)
}  # fmt: skip
PRECISION = {0: "fp32", 1: "fp32", 2: "bf16", 3: "bf16"}


def scenario(stage: int, change: Callable[[Any], Undo], results: Results, directory: Path) -> None:
    name = change.__name__
    settings = {"store": str(directory / f"{stage}-{name}"), "every": 1, "metrics": {"enabled": False}}
    built = engine(0, stage, PRECISION[stage], **ZERO)
    ckpt = monitor.attach(built, settings)
    ckpt.resume()
    done = 0

    def steps(count: int, swapped: Callable[[Any], Undo] | None = None) -> None:
        nonlocal done
        for _ in range(count):
            for tokens in batches(done, rank()):
                built.backward(built(tokens))
                built.step()
            done += 1
            undo = swapped(built) if swapped else None
            report = ckpt.step()
            if undo:
                undo()
            assert report is not None
            results.tell(
                "step", stage=stage, change=name, step=report.step, skipped=report.skipped, problem=report.problem
            )
            ckpt.flush()
            dist.barrier()

    steps(2)
    if stage == 3 or change in (another_optimizer, another_optimizer_inside):
        steps(2, swapped=change)  # ZeRO itself does not train with these
    else:
        undo = change(built)
        steps(2)
        undo()
    steps(1)
    ckpt.close(save=False)
    dist.barrier()
    commits = [save.step for save in reversed(open_catalog(LocalFiles(settings["store"])).saves())]
    counted = ckpt.metrics.registry.get_sample_value("driftpoint_saves_skipped_total", {"reason": "unsupported"})
    state = held(ckpt)
    another = engine(1, stage, PRECISION[stage], **ZERO)
    other = monitor.attach(another, settings)
    results.tell(
        "end", stage=stage, change=name, commits=commits, counted=counted, resumed=other.resume(),
        differing=differing(state, held(other))[:5],
    )  # fmt: skip
    if change is another_group:  # once for each stage
        tokens = batches(done, rank())[0]
        another.backward(another(tokens))
        assert other.step() is None  # before engine.step()
    other.close()
    dist.barrier()


def held(ckpt: monitor.Checkpointer) -> dict[str, Any]:
    return {str(piece.fragment): fingerprint(piece.tensor) for piece in job_of(ckpt).adapter.held()}


def main(spec: Mapping[str, Any]) -> None:
    start_group(zero=True)
    results = Results(spec["results"])
    for stage, changes in CHANGES.items():
        for change in changes:
            scenario(stage, change, results, Path(spec["directory"]))
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
