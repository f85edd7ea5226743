"""Parameters, buffers and moments in channels-last memory: one order in the store, each job's own in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monitor
from merger.merge import merge
from store.catalog import open_catalog
from store.storage.local import LocalFiles


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.frozen = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 1)
        self.frozen.requires_grad_(False)
        self.register_buffer("mean", torch.randn(1, 4, 2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9)
        return self.frozen(self.conv(x)) + self.mean


class Job:
    def __init__(self, store: Path, seed: int, memory_format: Any, **settings: Any) -> None:
        torch.manual_seed(seed)
        self.model = Convolution().to(memory_format=memory_format)  # type: ignore[call-overload]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        config = {"store": str(store), "every": 1, "metrics": {"enabled": False}, **settings}
        self.ckpt = monitor.attach((self.model, self.optimizer), config)

    def step(self) -> None:
        self.model(torch.randn(3, 2, 4, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ckpt.step()
        self.ckpt.flush()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state.get(parameter, {})
            found |= {f"{name}/{key}": value.clone() for key, value in state.items()}
        return found


LAST, PLAIN = torch.channels_last, torch.contiguous_format
THRESHOLD = {"policy": {"name": "threshold", "threshold": 0.0}}


@pytest.mark.parametrize(
    ("first", "second", "settings"),
    [
        (LAST, LAST, {}),
        (LAST, PLAIN, {}),
        (PLAIN, LAST, {}),
        (LAST, LAST, {"staging": "lazy"}),
        (LAST, LAST, THRESHOLD),
    ],
)
def test_every_format_resumes_in_every_format(tmp_path: Path, first: Any, second: Any, settings: Any) -> None:
    one = Job(tmp_path / "store", 0, first, **settings)
    assert one.model.conv.weight.is_contiguous() is (first is PLAIN)
    for _ in range(3):
        one.step()
    saved = one.tensors()
    one.ckpt.close()
    two = Job(tmp_path / "store", 1, second, **settings)
    assert two.ckpt.resume() == 3
    assert two.ckpt.certificate is not None and two.ckpt.certificate.exact
    found = two.tensors()
    assert found.keys() == saved.keys() and all(torch.equal(saved[name], found[name]) for name in saved)
    moment = two.optimizer.state[two.model.conv.weight]["exp_avg"]
    assert moment.stride() == two.model.conv.weight.stride()
    two.step()
    two.ckpt.close()
    catalog = open_catalog(LocalFiles(tmp_path / "store"))
    assert not catalog.manifest(catalog.saves()[0]).differs


def test_a_merge_writes_the_logical_order(tmp_path: Path) -> None:
    one = Job(tmp_path / "store", 0, torch.channels_last)
    one.step()
    one.ckpt.close()
    out = merge(tmp_path / "store", tmp_path / "out").out
    model = torch.load(out / "model.pt")
    assert all(torch.equal(model[name], tensor) for name, tensor in one.model.state_dict().items())
