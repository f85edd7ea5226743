"""Jobs of two ranks that train one model, and where the next processes resume them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from faults_ranks import Scenario
from resume_jobs import rank
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import monitor
from store.schema import digest
from tests.support.internals import abandon


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


def average(job: Replicated) -> None:
    for parameter in job.model.parameters():
        for tensor in (parameter.data, *(job.optimizer.state[parameter][slot] for slot in ("exp_avg", "exp_avg_sq"))):
            dist.all_reduce(tensor)
            tensor.div_(2)


def kept(s: Scenario, in_memory: bool) -> dict[str, Any]:
    shared = s.store.parent / "shm"
    shared.mkdir(parents=True, exist_ok=True)
    return (
        {"memory": {"enabled": True, "every": 1, "path": str(shared)}} if in_memory else {"journal": {"enabled": True}}
    )


def tell_back(
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
    back = Replicated(other, frozen=False, every=3, **more, **kept(other, in_memory))
    assert back.ckpt.certificate is not None
    alike = all(map(torch.equal, weights, back.weights()))
    s.tell("back", name=name, step=back.resumed, exact=back.ckpt.certificate.exact, alike=alike)
    back.ckpt.close(save=False)
    dist.barrier()


def digest_of(tensors: list[torch.Tensor]) -> str:
    return digest(torch.cat([one.flatten() for one in tensors]).numpy().tobytes())
