"""Two ranks train models with several optimizers, save at step 3, and train on; or resume there and train on.

Usage: several_optimizers.py SPEC.json, with ``resume`` in the spec.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from resume_jobs import Results, leave, rank, start_group
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import monitor
from store.errors import UnstorableError

SAVED, LAST = 3, 8


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def muon_and_adamw(model: nn.Module, first: Any = torch.optim.Muon) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return [first(matrices, lr=0.01), torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.01)]


def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def made(scenario: str) -> tuple[Any, list[nn.Module], list[torch.optim.Optimizer]]:
    """The target of attach, its models and its optimizers."""
    if scenario == "ddp":
        model = DistributedDataParallel(net())
        optimizers = muon_and_adamw(model)
        return (model, optimizers), [model], optimizers
    if scenario == "fsdp2":
        model = net()
        fully_shard(model[0])  # type: ignore[index]
        fully_shard(model)
        optimizers = muon_and_adamw(model, momentum)
        return (model, optimizers), [model], optimizers
    if scenario == "named fsdp2":
        generator, critic = net(), net()
        for part in (generator[0], generator, critic):  # type: ignore[index]
            fully_shard(part)
    else:
        generator, critic = DistributedDataParallel(net()), DistributedDataParallel(net())
    kind = momentum if scenario == "named fsdp2" else torch.optim.Muon
    first, second = muon_and_adamw(generator, kind), momentum(critic.parameters(), 0.02)
    return {"generator": (generator, first), "critic": (critic, second)}, [generator, critic], [*first, second]


class Divided(torch.optim.SGD):
    """Keeps the momentum of each parameter on one rank, which sends the others the update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for index, p in enumerate(self.param_groups[0]["params"]):
            update = torch.zeros_like(p)
            if index % dist.get_world_size() == rank():
                update = self.state[p].setdefault("momentum_buffer", update).mul_(0.9).add_(p.grad).clone()
            dist.broadcast(update, index % dist.get_world_size())
            p.add_(update, alpha=-0.01)


def divided(folder: Path, results: Results) -> None:
    model = DistributedDataParallel(net())
    optimizer = Divided(model.parameters())
    with monitor.attach((model, optimizer), {"store": str(folder / "divided"), "every": 1}) as ckpt:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        try:
            ckpt.step()
        except UnstorableError as error:
            results.tell("divided", rank=rank(), error=str(error))
        ckpt.close(save=False)


def whole(tensor: torch.Tensor) -> list[float]:
    gathered = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach().double().flatten().tolist()


def run(scenario: str, folder: Path, results: Results, *, resume: bool) -> None:
    torch.manual_seed(7 if resume else 1)
    target, models, optimizers = made(scenario)
    config = {"store": str(folder / scenario), "every": 1, "metrics": {"enabled": False}}
    with monitor.attach(target, config) as ckpt:
        start = ckpt.resume()
        losses = []
        for step in range(start, LAST):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank()))
            for model in models:
                x = model(x)
            loss = x.square().mean()
            loss.backward()
            for index, optimizer in enumerate(optimizers):
                if index < 2 or step % 2:  # the critic trains at every other step
                    optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item().hex())
            if step < SAVED:
                ckpt.step()
                ckpt.flush()
        exact = ckpt.certificate is None or ckpt.certificate.exact
        state = [whole(value) for one in optimizers for s in one.state.values() for _, value in sorted(s.items())]
        state += [whole(parameter) for model in models for parameter in model.parameters()]
        end = json.dumps(state)
        results.tell("ran", scenario=scenario, start=start, exact=exact, losses=losses[SAVED - start :], end=end)
        ckpt.close(save=False)


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    results = Results(spec["results"])
    start_group(zero=False)
    for scenario in ("ddp", "fsdp2", "named", "named fsdp2"):
        run(scenario, Path(spec["directory"]), results, resume=spec["resume"])
    if not spec["resume"]:
        divided(Path(spec["directory"]), results)
    leave()


if __name__ == "__main__":
    main()
