"""Two ranks on one model, of which one has state that no save can hold, or that does not come back, or is not alike.

Usage: self_check_ranks.py SPEC.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from faults_ranks import Scenario
from resume_jobs import Results, leave, rank, start_group
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import monitor
from monitor.save.self_check import SelfChecker
from store.names import SaveId
from store.schema import digest
from tests.support.internals import abandon, saver_of, wait_for_snapshot


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


class Replicated:
    """Two layers in DistributedDataParallel, which synchronizes the second alone if the first is ``frozen`` then."""

    def __init__(self, s: Scenario, frozen: bool, state: Mapping[str, Any] = MappingProxyType({}), **more: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 2))
        self.model[0].requires_grad_(not frozen)
        wrapped = self.wrapped()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        settings = {"store": str(s.store), "every": 1, "metrics": {"enabled": False}, **more}
        self.ckpt = monitor.attach((wrapped, self.optimizer), settings, state=state)
        self.resumed = self.ckpt.resume()
        self._wrapped, self.batches = wrapped, torch.Generator().manual_seed(10 + rank())

    def wrapped(self) -> nn.Module:
        return DistributedDataParallel(self.model)

    def update(
        self,
        *,
        skip: bool = False,
        last_layer: bool = True,
        local: bool = False,
        inner: bool = False,
        evaluate: bool = False,
    ) -> None:
        called = self.model if inner else self._wrapped
        with self._wrapped.no_sync() if local else nullcontext():
            called(torch.randn(5, 6, generator=self.batches)).square().sum().backward()
        if evaluate:
            with torch.no_grad():
                self._wrapped(torch.ones(1, 6))
        if not last_layer:
            self.model[1].zero_grad()
        if not skip:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self) -> None:
        self.ckpt.step()
        self.ckpt.flush()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.update()
            self.save()

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def own(self, value: Any, name: str = "lr") -> None:
        """Give this rank another hyperparameter."""
        self.optimizer.param_groups[0][name] = value

    def end(self, s: Scenario) -> None:
        """Record what each commit says, and what a resume of the last one says."""
        self.ckpt.close()
        dist.barrier()
        for save in reversed(s.catalog().saves()):
            s.tell("manifest", step=save.step, differs=list(s.catalog().manifest(save).differs))
        other = Replicated(s, frozen=False)
        assert other.ckpt.certificate is not None
        s.tell("resumed", exact=other.ckpt.certificate.exact, problems=list(other.ckpt.certificate.problems))
        other.ckpt.close(save=False)


class Sharded(Replicated):
    """The same, by FSDP2."""

    def wrapped(self) -> nn.Module:
        mesh = init_device_mesh("cpu", (2,))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        return fully_shard(self.model, mesh=mesh)

    def weights(self) -> list[torch.Tensor]:
        return [parameter.to_local().detach().clone() for parameter in self.model.parameters()]


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


def _average(job: Replicated) -> None:
    for parameter in job.model.parameters():
        for tensor in (parameter.data, *(job.optimizer.state[parameter][slot] for slot in ("exp_avg", "exp_avg_sq"))):
            dist.all_reduce(tensor)
            tensor.div_(2)


def averaged(s: Scenario) -> None:
    """Local SGD, which saves at steps that average."""
    job = Replicated(s, frozen=False, every=3)
    for step in range(1, 7):
        job.update(local=True)
        if step % 3 == 0:
            _average(job)
        job.save()
    job.end(s)


def averaged_later(s: Scenario) -> None:
    """The same, which saves between them."""
    job = Replicated(s, frozen=False, every=2)
    for step in range(1, 7):
        job.update(local=step > 2)
        if step % 3 == 0:
            _average(job)
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


def averaged_in_memory(s: Scenario) -> None:
    """Versions between two averages are not resumed: each holds a rank's own weights. Nor are records."""
    for in_memory in (True, False):
        inner = s.within(f"{in_memory}")
        job, weights = Replicated(inner, frozen=False, every=4, **_kept(inner, in_memory)), {}
        for step in range(1, 8):
            job.update(local=True)
            if step % 2 == 0:
                _average(job)
            weights[step] = job.weights()
            job.save()
            if in_memory:
                wait_for_snapshot(job.ckpt)
        there = weights[6 if in_memory else 4]
        _back(s, job, there, other=inner, in_memory=in_memory, name=f"{in_memory}")


def evaluated_before_each_step(s: Scenario) -> None:
    """A forward without gradients costs no version in memory, and no record."""
    for in_memory in (True, False):
        inner = s.within(f"{in_memory}")
        job = Replicated(inner, frozen=False, every=4, **_kept(inner, in_memory))
        for _ in range(7):
            job.update(evaluate=True)
            job.save()
            if in_memory:
                wait_for_snapshot(job.ckpt)
        _back(s, job, job.weights(), other=inner, in_memory=in_memory, name=f"{in_memory}")


def in_memory(s: Scenario) -> None:
    """Of versions in memory, none is resumed from ranks that had come apart."""
    _until_they_came_apart(s, in_memory=True)


def in_the_journal(s: Scenario) -> None:
    """Nor does the journal lead there."""
    _until_they_came_apart(s, in_memory=False)


def _until_they_came_apart(s: Scenario, *, in_memory: bool) -> None:
    others = {
        "lr": 0.01 / (1 + rank()),
        "weight_decay": 0.01 + 0.3 * rank(),
        "betas": (np.float64(0.9 - 0.3 * rank()), 0.999),
    }
    for name, value in others.items():
        inner = s.within(name)
        job = Replicated(inner, frozen=False, every=3, **_kept(inner, in_memory))
        for step in range(1, 6):
            if step == 5:
                weights = job.weights()
                job.own(value, name)
            job.steps(1)
            if in_memory:
                wait_for_snapshot(job.ckpt)
        _back(s, job, weights, other=inner, in_memory=in_memory, name=name)


def alike_at_every_step(s: Scenario) -> None:
    """One rank's schedule runs a line earlier: a decision sees it, and no step is taken with it."""
    for name, settings in {"checked": {}, "not checked": {"self_check": False}}.items():
        for in_memory in (True, False):
            inner = s.within(f"{name} {in_memory}")
            job = Replicated(inner, frozen=False, every=4, **settings, **_kept(inner, in_memory))
            for step in range(1, 11):
                job.update()
                if step == 4:
                    job.own(0.01 / (1 + rank()))
                job.save()
                job.own(0.01)
                if in_memory:
                    wait_for_snapshot(job.ckpt)
            _back(s, job, job.weights(), other=inner, in_memory=in_memory, name=f"{name}, {in_memory}")


def gone_back_in_memory(s: Scenario) -> None:
    """A resume in the same processes makes the ranks alike: versions in memory are used again."""
    job = Replicated(s, frozen=False, every=3, **_kept(s, in_memory=True))
    job.steps(3)
    job.own(0.01 / (1 + rank()))
    job.steps(1)
    job.own(0.01)
    assert job.ckpt.resume() == 3
    for _ in range(2):
        job.steps(1)
        wait_for_snapshot(job.ckpt)
    _back(s, job, job.weights(), other=s, in_memory=True, name="lr")


def apart_in_memory(s: Scenario) -> None:
    """Versions in memory of ranks that a save found to differ are resumed, and are not exact."""
    job = Replicated(s, frozen=False, every=4, **_kept(s, in_memory=True))
    job.model[0].bias.data += rank()
    for step in range(1, 8):
        job.own(0.01 / (1 + rank()) if step == 5 else 0.01)
        job.steps(1)
        wait_for_snapshot(job.ckpt)
    _back(s, job, job.weights(), other=s, in_memory=True, name="lr")


def not_compared(s: Scenario) -> None:
    """Without the self-check nothing tells whether ranks are alike once a step was taken apart."""
    job = Replicated(s, frozen=False, every=4, self_check=False, **_kept(s, in_memory=True))
    for step in range(1, 12):
        job.own(0.01 / (1 + rank()) if step == 6 else 0.01)
        job.steps(1)
        wait_for_snapshot(job.ckpt)
    _back(s, job, job.weights(), other=s, in_memory=True, name="lr", self_check=False)


def skipped_in_turn(s: Scenario) -> None:
    """Each rank leaves one update out, not in the same step, as where a loss is not finite."""
    job = Replicated(s, frozen=False, every=3)
    for step in range(1, 7):
        job.update(skip=step == 4 + rank())
        job.save()
    job.end(s)


def skipped_beside_shards(s: Scenario) -> None:
    """One rank leaves an update out: the counts of its optimizer are its own, in commits and in memory.

    The second life has resumed such counts, and keeps them before its first save. Batches are as of the last step."""
    for life in range(3):
        job = Sharded(s, frozen=False, every=5, **_kept(s, in_memory=True))
        for step in range(job.resumed + 1, (7, 9, 14)[life]):
            job.batches.manual_seed(2 * step + rank())
            job.update(skip=step == 2 and rank() == 1)
            job.save()
            wait_for_snapshot(job.ckpt)
        counts = [int(state["step"]) for state in job.optimizer.state.values()]
        certificate = job.ckpt.certificate
        exact = certificate is None or certificate.exact
        s.tell("life", life=life, resumed=job.resumed, exact=exact, counts=counts, weights=digest_of(job.weights()))
        abandon(job.ckpt)
        dist.barrier()
    job = Sharded(s.within("undisturbed"), frozen=False, every=100)
    for step in range(1, 14):
        job.batches.manual_seed(2 * step + rank())
        job.update(skip=step == 2 and rank() == 1)
        job.ckpt.step()
    s.tell("undisturbed", weights=digest_of(job.weights()))
    job.ckpt.close(save=False)
    dist.barrier()


def digest_of(tensors: list[torch.Tensor]) -> str:
    return digest(torch.cat([one.flatten() for one in tensors]).numpy().tobytes())


class Refuses:
    """An object of the script whose state cannot be had once."""

    refuse = False

    def state_dict(self) -> dict[str, Any]:
        if self.refuse:
            raise RuntimeError("not now")
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def state_of_one_rank(s: Scenario) -> None:
    """One rank leaves out the step in which a layer gets its optimizer state."""
    job = Sharded(s, frozen=False, every=4, **_kept(s, in_memory=True))
    for step in range(1, 5):
        before = job.weights()
        job.update(skip=step == 4 and rank() == 1, last_layer=step == 4)
        job.save()
        wait_for_snapshot(job.ckpt)
    abandon(job.ckpt)
    dist.barrier()
    back = Sharded(s, frozen=False, every=4, **_kept(s, in_memory=True))
    assert back.ckpt.certificate is not None
    alike = digest_of(back.weights()) == digest_of(before)
    s.tell("back", step=back.resumed, exact=back.ckpt.certificate.exact, alike=alike)
    back.ckpt.close(save=False)
    dist.barrier()


def apart_and_not_checked(s: Scenario) -> None:
    """The save that finds the ranks apart fails on rank 0, or has no memory to look at its state."""
    for name in ("the run state", "the samples"):
        inner, other = s.within(name), Refuses()
        job = Replicated(inner, frozen=False, every=4, state={"other": other}, **_kept(inner, in_memory=True))
        checker = saver_of(job.ckpt).checker
        for step in range(1, 12):
            job.own(0.01 / (1 + rank()) if step == 6 else 0.01)
            other.refuse = step == 8 and rank() == 0 and name == "the run state"
            short = step == 8 and rank() == 0 and name == "the samples"
            checker.begin = partial(_without_memory if short else SelfChecker.begin, checker)  # type: ignore[method-assign]
            job.steps(1)
            other.refuse = False
            wait_for_snapshot(job.ckpt)
        _back(s, job, job.weights(), other=inner, in_memory=True, name=name, state={"other": other})


def _without_memory(checker: SelfChecker, save: SaveId, _: Any) -> Any:
    return SelfChecker.begin(checker, save, _out_of_memory())


def _out_of_memory() -> Iterator[Any]:
    raise MemoryError
    yield


def _kept(s: Scenario, in_memory: bool) -> dict[str, Any]:
    shared = s.store.parent / "shm"
    shared.mkdir(parents=True, exist_ok=True)
    return (
        {"memory": {"enabled": True, "every": 1, "path": str(shared)}} if in_memory else {"journal": {"enabled": True}}
    )


def _back(
    s: Scenario,
    job: Replicated,
    weights: list[torch.Tensor],
    *,
    other: Scenario,
    in_memory: bool,
    name: str,
    **more: Any,
) -> None:
    """Tell where the next processes resume, and whether it is at ``weights``."""
    if in_memory:
        abandon(job.ckpt)
    else:
        job.ckpt.close(save=False)
    dist.barrier()
    back = Replicated(other, frozen=False, every=3, **more, **_kept(other, in_memory))
    assert back.ckpt.certificate is not None
    alike = all(map(torch.equal, weights, back.weights()))
    s.tell("back", name=name, step=back.resumed, exact=back.ckpt.certificate.exact, alike=alike)
    back.ckpt.close(save=False)
    dist.barrier()


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
    averaged_in_memory,
    evaluated_before_each_step,
    in_memory,
    in_the_journal,
    alike_at_every_step,
    gone_back_in_memory,
    apart_in_memory,
    not_compared,
    skipped_in_turn,
    skipped_beside_shards,
    state_of_one_rank,
    apart_and_not_checked,
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
