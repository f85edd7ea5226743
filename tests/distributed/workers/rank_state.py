"""Two ranks with batch statistics and extra state of their own save, and resume into fresh models.

Usage: rank_state.py SPEC.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from resume_jobs import Results, leave, rank, start_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import monitor
from tests.support.forged import forge_part, saves_of
from tests.support.internals import memory_of, wait_for_snapshot


class Observed(nn.Module):
    """A layer with batch statistics, a table that is alike on all ranks, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.seen = 0.0
        self.register_buffer("table", torch.ones(30_000))  # larger than what is hashed on the host

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += float(x.sum())
        return self.norm(self.layer(x)) * self.norm.running_var.mean()

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Job:
    def __init__(self, store: Path, *, broadcast: bool, memory: Path | None) -> None:
        torch.manual_seed(3)
        self.model = Observed()
        alone = not dist.is_initialized()
        self.wrapped = self.model if alone else DistributedDataParallel(self.model, broadcast_buffers=broadcast)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        settings: dict[str, Any] = {"store": str(store), "every": 2, "metrics": {"enabled": False}}
        if memory is not None:
            settings |= {"every": 100, "memory": {"enabled": True, "path": str(memory), "every": 1}}
        self.ckpt = monitor.attach((self.wrapped, self.optimizer), settings)

    def train(self, steps: int, *, rollouts: bool = False, seed: int = 10) -> None:
        generator = torch.Generator().manual_seed(seed + rank())
        for _ in range(steps):
            self.wrapped(torch.randn(5, 3, generator=generator)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if rollouts:
                with torch.no_grad():
                    self.wrapped(torch.randn(5, 3, generator=generator))
            self.ckpt.step()
            self.ckpt.flush()
            if memory_of(self.ckpt) is not None:
                wait_for_snapshot(self.ckpt)

    def state(self) -> dict[str, Any]:
        buffers = {name: buffer.double().sum().item() for name, buffer in self.model.named_buffers()}
        return {**buffers, "seen": self.model.seen}

    def weights(self) -> list[float]:
        return [one.double().sum().item() for one in self.model.parameters()]


def scenario(name: str, folder: Path, results: Results, *, broadcast: bool, memory: Path | None = None) -> None:
    store = folder / name
    job = Job(store, broadcast=broadcast, memory=memory)
    job.ckpt.resume()
    job.train(4)
    results.tell("saved", scenario=name, state=job.state())
    job.ckpt.finish(clean=memory is None)
    resumed(name, store, results, broadcast=broadcast, memory=memory)


def resumed(name: str, store: Path, results: Results, *, broadcast: bool, memory: Path | None = None) -> None:
    if dist.is_initialized():
        dist.barrier()
    job = Job(store, broadcast=broadcast, memory=memory)
    step = job.ckpt.resume()
    certificate = job.ckpt.certificate
    exact = certificate is not None and certificate.exact
    in_memory = job.ckpt.resumed is not None and job.ckpt.resumed.memory is not None
    results.tell("resumed", scenario=name, step=step, exact=exact, memory=in_memory, state=job.state())
    job.ckpt.close()


def rollouts(store: Path, results: Results) -> None:
    """A forward without gradients: DistributedDataParallel leaves out the broadcast before the next."""
    job = Job(store, broadcast=True, memory=None)
    job.ckpt.resume()
    job.train(4, rollouts=True)
    results.tell("saved", scenario="rollouts", state=job.state())
    job.ckpt.flush()
    job.train(2, rollouts=True, seed=20)
    results.tell("trained", scenario="rollouts", state=job.state(), weights=job.weights())
    job.ckpt.close()
    dist.barrier()
    job = Job(store, broadcast=True, memory=None)
    assert job.ckpt.resume(step=4) == 4 and job.ckpt.certificate is not None
    exact = job.ckpt.certificate.exact
    results.tell("resumed", scenario="rollouts", step=4, exact=exact, memory=False, state=job.state())
    job.train(2, rollouts=True, seed=20)
    results.tell("trained again", scenario="rollouts", state=job.state(), weights=job.weights())
    job.ckpt.close()


def main(spec: Mapping[str, Any]) -> None:
    folder, results = Path(spec["directory"]), Results(spec["results"])
    if "alone" in spec:
        resumed("alone", Path(spec["alone"]), results, broadcast=False)
        return
    start_group(zero=False)
    scenario("local", folder, results, broadcast=False)
    scenario("memory", folder, results, broadcast=False, memory=Path(spec["memory"]))
    scenario("broadcast", folder, results, broadcast=True)
    rollouts(folder / "rollouts", results)
    scenario("wrong", folder, results, broadcast=False)
    dist.barrier()
    if rank() == 0:
        store = folder / "wrong"
        forge_part(store, saves_of(store)[-1], lambda part: part["run_state"].update(rng=[]), rank=1)
    resumed("wrong on rank 1", folder / "wrong", results, broadcast=False)
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
