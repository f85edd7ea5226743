"""Two ranks on one model, of which one has state that no save can hold, or that does not come back.

Usage: self_check_ranks.py SPEC.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from faults_ranks import Scenario
from resume_jobs import Results, leave, rank, start_group

from store.names import SaveId


class Tagged(torch.Tensor):
    """A tensor that is more than its elements."""


def subclass_on_one_rank(s: Scenario) -> None:
    """Training ends at the first decision, on both ranks."""
    job = s.job()
    job.update()
    if rank() == 1:
        state = job.optimizer.state[job.model.head.weight]
        state["exp_avg"] = state["exp_avg"].as_subclass(Tagged)
    s.refused(job.ckpt.step)
    s.end(job)


def left_over_on_one_rank(s: Scenario) -> None:
    """Every commit says so, and so does a resume, on both ranks."""
    job = s.job()
    if rank() == 1:
        whole = job.optimizer.state_dict
        job.optimizer.state_dict = lambda: {**whole(), "average": torch.ones(3)}  # type: ignore[method-assign]
    s.steps(job, 2)
    s.end(job)
    for step in (1, 2):
        s.tell("manifest", step=step, differs=list(s.catalog().manifest(SaveId(step, 1)).differs))
    other = s.job()
    other.ckpt.resume()
    assert other.ckpt.certificate is not None
    s.tell("resumed", exact=other.ckpt.certificate.exact, problems=list(other.ckpt.certificate.problems))
    other.ckpt.close()


def main(spec: Mapping[str, Any]) -> None:
    start_group(zero=False)
    results = Results(spec["results"])
    for scenario in (subclass_on_one_rank, left_over_on_one_rank):
        scenario(Scenario(scenario.__name__, Path(spec["directory"]), results))
        dist.barrier()
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
