"""Small jobs of one process with the journal, which die without a save, and ways to damage their records."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import monitor

STEPS = 12


class Job:
    """A small job whose data comes from torch's global generator, with dropout, a buffer and a schedule."""

    def __init__(self, seed: int = 1, kind: Any = torch.optim.AdamW, **hyper: Any) -> None:
        torch.manual_seed(seed)
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2)) for _ in range(4)]
        self.model = nn.Sequential(*blocks)
        self.optimizer = kind(self.model.parameters(), **{"lr": 1e-2, **hyper})
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)

    def attach(self, store: Path, **settings: Any) -> monitor.Checkpointer:
        settings = {"store": str(store), "every": 4, "journal": {"enabled": True}, **settings}
        settings.setdefault("metrics", {"enabled": False})
        return monitor.attach((self.model, self.optimizer), settings, state=[self.schedule])

    def train_one_step(self) -> float:
        x = torch.randn(5, 6)
        loss = (self.model(x) - x.roll(1, 1)).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    def run(
        self,
        ckpt: monitor.Checkpointer,
        last: int,
        before: Callable[[int], None] = lambda _: None,
        after: Callable[[int], None] = lambda _: None,
    ) -> dict[int, float]:
        """Train up to step ``last`` and die. before, after: called around ``ckpt.step()`` of a step."""
        losses = {}
        for step in range(ckpt.resume(), last):
            losses[step] = self.train_one_step()
            before(step + 1)
            ckpt.step()
            ckpt.flush()
            after(step + 1)
        ckpt.finish(clean=False)
        return losses

    def state(self) -> Mapping[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()["state"]}


def straight(**job: Any) -> tuple[dict[int, float], Mapping[str, Any]]:
    """The losses and the end of a run without Driftpoint."""
    run = Job(**job)
    return {step: run.train_one_step() for step in range(STEPS)}, run.state()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def records(store: Path) -> list[Path]:
    return sorted((store / "journal/segments").iterdir())


def damage(path: Path) -> None:
    """Flip a bit in the middle of the largest tensor's bytes."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_gradient(record: Path) -> None:
    """Flip a bit of the first gradient."""
    part, path = json.loads((record / "rank-00000.json").read_bytes())["body"], record / "rank-00000.safetensors"
    entry = next(entry for entry in part["entries"] if entry["slot"] == "grad")
    data = bytearray(path.read_bytes())
    data[part["header_bytes"] + entry["offset"]] ^= 1
    path.write_bytes(data)


def damage_run_state(save: Path) -> None:
    """Flip a bit of the first tensor of a save's run state."""
    part, path = json.loads((save / "rank-00000.json").read_bytes())["body"], save / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[part["header_bytes"] + part["run_tensors"][0]["offset"]] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "gradient flipped": damage_gradient,
    "flipped": lambda one: damage(one / "rank-00000.safetensors"),
    "torn": lambda one: (one / "rank-00000.safetensors").write_bytes(b"torn"),
    "part lost": lambda one: (one / "rank-00000.json").unlink(),
    "part flipped": lambda one: damage(one / "rank-00000.json"),
    "swapped": lambda one: (one / "rank-00000.safetensors").write_bytes(
        (one.parent / "00000005-000001/rank-00000.safetensors").read_bytes()
    ),
    "gone": lambda one: one.rename(one.parent.parent / "elsewhere"),
}


def keep(job: Job, kept: dict[int, Any]) -> Callable[[int], None]:
    """Return what copies the state of each step."""

    def after(step: int) -> None:
        kept[step] = copy.deepcopy(job.state())

    return after
