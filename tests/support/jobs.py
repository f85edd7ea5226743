"""A small job in this process: a model with blocks, AdamW, and a checkpointer on a store of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import monitor
from store.catalog import open_catalog
from store.names import Unit
from store.storage.local import LocalFiles
from tests.support.hooked import HookedFiles
from tests.support.internals import hook_files

LAYERS = ("embed", "blocks.0", "blocks.1", "blocks.2", "head")


class Model(nn.Module):
    """Five layers of different sizes."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1)) for _ in range(3)])
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


class Job:
    """Model, optimizer and checkpointer. ``state``: given to attach besides.

    Where a process group is up, the model is replicated by DistributedDataParallel."""

    def __init__(
        self, store: Path | dict[str, Any], state: list[Any] | None = None, width: int = 8, **settings: Any
    ) -> None:
        self.model = Model(width)
        self.trained = DistributedDataParallel(self.model) if torch.distributed.is_initialized() else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        values: Mapping[str, Any] = {
            "store": store if isinstance(store, dict) else str(store),
            "every": 1,
            "metrics": {"enabled": False},
            **settings,
        }
        self.ckpt = monitor.attach((self.trained, self.optimizer), values, state=state or [])

    def update(self) -> None:
        """One optimizer step."""
        loss = self.trained(torch.randn(4, 3)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def step(self, flush: bool = True) -> monitor.StepReport | None:
        """One optimizer step and a decision; ``flush``: until its save is done."""
        self.update()
        report = self.ckpt.step()
        if flush:
            self.ckpt.flush()
        return report

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of all parameters and moments, by name and slot."""
        found = {f"{name}/fp32": p.detach().clone() for name, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state.get(parameter, {})
            found |= {f"{name}/{slot}": state[slot].clone() for slot in ("exp_avg", "exp_avg_sq") if slot in state}
        return found

    def hook(self) -> HookedFiles:
        """From now on the checkpointer's writes go through hooks."""
        return hook_files(self.ckpt)

    @property
    def registry(self) -> CollectorRegistry:
        """Of the metrics."""
        return self.ckpt.metrics.registry

    def metric(self, name: str, **labels: str) -> float:
        """A sample's value; 0 where there is none yet."""
        return self.registry.get_sample_value(name, labels) or 0.0


@contextmanager
def job(store: Path | dict[str, Any], **settings: Any) -> Iterator[Job]:
    """A job whose checkpointer is closed at the end of the block."""
    made = Job(store, **settings)
    try:
        yield made
    finally:
        made.ckpt.close(save=False)


def committed_steps(store: Path) -> list[int]:
    """Steps of the commits in a store, ascending."""
    return sorted(save.step for save in open_catalog(LocalFiles(store)).saves())


def flip_bit(store: Path, unit: Unit, save: str) -> None:
    """Change a stored byte of a unit in a save of one rank."""
    catalog = open_catalog(LocalFiles(store))
    found = next(one for one in catalog.saves() if one.name == save)
    part = catalog.group(found, catalog.manifest(found).groups[save]).parts[0]
    entry = next(entry for entry in part.entries if entry.unit == unit)
    path = store / "segments" / save / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[part.header_bytes + entry.offset] ^= 1
    path.write_bytes(data)


def skip_reason(report: monitor.StepReport | None) -> str | None:
    """Why a decision began no save. Fails if no decision was due."""
    assert report is not None
    return report.skipped


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Equal to the last bit."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
