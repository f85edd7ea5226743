"""Two ranks whose trace is recorded: under DistributedDataParallel, ZeRO-2 and ZeRO-3, and with a trace that cannot be
written. What the ranks hold at every step is kept: under DistributedDataParallel, where all hold the same, rank 0's.

Usage: trace_run.py SPEC.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from resume_jobs import Results, build, leave, rank, start_group

import monitor
from store.names import BUFFER, FROZEN
from tests.support.internals import history_bytes, job_of, tracer_of
from tests.support.jobs import Job

STEPS = 8
State = dict[str, torch.Tensor]


def ddp(store: Path, settings: Mapping[str, Any], results: Results) -> None:
    """Rank 1 is set to another trace than rank 0, which must not matter."""
    torch.manual_seed(3)
    if rank() == 1:
        settings = {**settings, "trace": {"enabled": False, "anchors": 2}}
    job = Job(store, width=96, **settings)
    _trained(job.ckpt, job.update, lambda: job.weights() if rank() == 0 else {}, store, results)


def zero(stage: int) -> Callable[[Path, Mapping[str, Any], Results], None]:
    def run(store: Path, settings: Mapping[str, Any], results: Results) -> None:
        case = {"kind": "zero", "stage": stage, "precision": "bf16", "width": 64}
        trainee = build(case, seed=1)
        ckpt = monitor.attach(
            trainee.target, {"store": str(store), "every": 1, "metrics": {"enabled": False}, **settings}
        )
        _trained(ckpt, trainee.step, lambda: _pieces(ckpt), store, results)

    return run


def _pieces(ckpt: Any) -> State:
    """What this rank holds of everything that an optimizer updates."""
    return {
        f"{piece.fragment.fqn}/{piece.fragment.slot}/{rank()}-{piece.fragment.start}": piece.tensor.clone()
        for piece in job_of(ckpt).adapter.owned()
        if piece.fragment.slot not in (FROZEN, BUFFER)
    }


def _trained(ckpt: Any, step: Callable[[], Any], state: Callable[[], State], store: Path, results: Results) -> None:
    ckpt.resume()
    states = {}
    for _ in range(STEPS):
        step()
        report = ckpt.step()
        assert report is not None
        states[report.step] = state()
        ckpt.flush()
        dist.barrier()
    memory = history_bytes(tracer_of(ckpt)._history)
    ckpt.close(save=False)
    torch.save(states, store.with_name(f"{store.name}.{rank()}.pt"))
    results.tell("done", name=store.name, layers=ckpt.layers, skipped=report.skipped, memory=memory)


RUNS = {"ddp": ddp, "unwritable": ddp, "zero2": zero(2), "zero3": zero(3)}


def main(spec: Mapping[str, Any]) -> None:
    results = Results(spec["results"])
    start_group(zero=True)
    for name, settings in spec["runs"].items():
        RUNS[name](Path(spec["directory"]) / name, settings, results)
        dist.barrier()
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
