"""Two ranks on one model, of which one has state that no save can hold, or that does not come back, or is not alike.

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
from replicated_jobs import Replicated, average
from resume_jobs import Results, leave, rank, start_group
from self_check_kept import KEPT
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

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


def synchronized(s: Scenario) -> None:
    job = Replicated(s, frozen=False)
    job.steps(2)
    job.end(s)


def unfrozen(s: Scenario) -> None:
    """Each rank trains the first layer on its own batches from the first step on."""
    job = Replicated(s, frozen=True)
    job.model[0].requires_grad_(True)
    job.steps(2)
    job.end(s)


def unfrozen_later(s: Scenario) -> None:
    """Each rank trains the first layer on its own batches once its weights were saved."""
    job = Replicated(s, frozen=True)
    job.steps(1)
    job.model[0].requires_grad_(True)
    job.steps(2)
    job.end(s)


def other_moments(s: Scenario) -> None:
    """One moment of one parameter is another one on rank 1."""
    job = Replicated(s, frozen=False)
    job.update()
    job.optimizer.state[job.model[1].weight]["exp_avg_sq"][0, 0] *= 1 + rank()
    job.ckpt.step()
    job.end(s)


def other_rates(s: Scenario) -> None:
    """From its third step on, each rank steps at a rate of its own."""
    job = Replicated(s, frozen=False)
    job.steps(2)
    job.own(0.01 / (1 + rank()))
    job.steps(2)
    job.end(s)


def other_rate_of_one_step(s: Scenario) -> None:
    """As ReduceLROnPlateau does with each rank's own loss, where one rank finds its plateau a step later."""
    job = Replicated(s, frozen=False)
    job.steps(1)
    job.own(0.01 / (1 + rank()))
    job.update()
    job.own(0.005)
    job.save()
    job.steps(1)
    job.end(s)


def other_rate_of_the_next_step(s: Scenario) -> None:
    """The weights are alike, and a save holds one rank's rate."""
    job = Replicated(s, frozen=False)
    job.update()
    job.own(torch.tensor(0.01 / (1 + rank())))
    job.save()
    job.own(0.01)
    job.steps(1)
    job.end(s)


def other_decay(s: Scenario) -> None:
    """For one step, which leaves the weights apart."""
    job = Replicated(s, frozen=False)
    job.update()
    job.own(rank(), "weight_decay")
    job.save()
    job.update()
    job.own(0.0, "weight_decay")
    job.save()
    job.end(s)


def gone_back(s: Scenario) -> None:
    """Ranks that came apart are alike after a resume in the same processes."""
    job = Replicated(s, frozen=False)
    job.steps(1)
    job.own(0.01 / (1 + rank()))
    job.steps(1)
    assert job.ckpt.resume(step=1) == 1
    job.steps(1)
    job.end(s)


def averaged(s: Scenario) -> None:
    """Local SGD, which saves at steps that average."""
    job = Replicated(s, frozen=False, every=3)
    for step in range(1, 7):
        job.update(local=True)
        if step % 3 == 0:
            average(job)
        job.save()
    job.end(s)


def averaged_later(s: Scenario) -> None:
    """The same, which saves between them."""
    job = Replicated(s, frozen=False, every=2)
    for step in range(1, 7):
        job.update(local=step > 2)
        if step % 3 == 0:
            average(job)
        job.save()
    job.end(s)


def averaged_by_a_hook(s: Scenario) -> None:
    """Each rank takes its own gradients, as torch's hook for local SGD lets it."""
    job = Replicated(s, frozen=False)
    job.steps(1)
    job._wrapped.register_comm_hook(None, noop_hook)
    job.steps(1)
    job.end(s)


def past_the_wrapper(s: Scenario) -> None:
    """The script calls the model itself, so nothing averages."""
    job = Replicated(s, frozen=False)
    job.steps(1)
    job.update(inner=True)
    job.save()
    job.end(s)


def skipped_in_turn(s: Scenario) -> None:
    """Each rank leaves one update out, not in the same step, as where a loss is not finite."""
    job = Replicated(s, frozen=False, every=3)
    for step in range(1, 7):
        job.update(skip=step == 4 + rank())
        job.save()
    job.end(s)


SCENARIOS = (
    subclass_on_one_rank,
    left_over_on_one_rank,
    synchronized,
    unfrozen,
    unfrozen_later,
    other_moments,
    other_rates,
    other_rate_of_one_step,
    other_rate_of_the_next_step,
    other_decay,
    gone_back,
    averaged,
    averaged_later,
    averaged_by_a_hook,
    past_the_wrapper,
    skipped_in_turn,
    *KEPT,
)


def main(spec: Mapping[str, Any]) -> None:
    start_group(zero=False)
    results = Results(spec["results"])
    for scenario in SCENARIOS:
        scenario(Scenario(scenario.__name__, Path(spec["directory"]), results))
        dist.barrier()
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
