"""An optimizer skips a parameter without a gradient, and moves one whose gradient is zeros."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import monitor
from monitor.adapters import adapter_for


class Branches:
    """Two branches of which a step may use one, momentum and weight decay, and a checkpointer."""

    def __init__(self, store: Path, *, set_to_none: bool, zeroed: str) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"left": nn.Linear(3, 2), "right": nn.Linear(3, 2)})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        self.ckpt = monitor.attach(
            (self.model, self.optimizer), {"store": str(store), "every": 1, "metrics": {"enabled": False}}
        )
        self.set_to_none, self.zeroed = set_to_none, zeroed

    def steps(self, first: int, *branches: str) -> None:
        for step, names in enumerate(branches, first):
            if self.zeroed == "before":
                self.optimizer.zero_grad(set_to_none=self.set_to_none)
            self.backward(step, names)
            self.optimizer.step()
            if self.zeroed == "after":
                self.optimizer.zero_grad(set_to_none=self.set_to_none)
            self.ckpt.step()
            self.ckpt.flush()

    def backward(self, step: int, names: str) -> None:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        sum(self.model[name](x).square().mean() for name in names.split()).backward()

    def weights(self) -> torch.Tensor:
        return torch.cat([one.detach().reshape(-1) for one in self.model.parameters()])


@pytest.mark.parametrize(("set_to_none", "zeroed"), [(False, "after"), (True, "after"), (True, "before")])
def test_the_next_step_uses_one_branch(tmp_path: Path, set_to_none: bool, zeroed: str) -> None:
    whole = Branches(tmp_path / "whole", set_to_none=set_to_none, zeroed=zeroed)
    whole.steps(0, "left right", "left right", "left", "right", "left")
    whole.ckpt.close()
    job = Branches(tmp_path / "store", set_to_none=set_to_none, zeroed=zeroed)
    job.steps(0, "left right", "left right")
    job.ckpt.close()
    job = Branches(tmp_path / "store", set_to_none=set_to_none, zeroed=zeroed)
    assert job.ckpt.resume() == 2 and job.ckpt.certificate is not None and job.ckpt.certificate.exact
    job.steps(2, "left", "right", "left")
    assert torch.equal(job.weights(), whole.weights())
    job.ckpt.close()


def test_gradients_that_are_zeros_but_for_one_large_tensor_are_not_those_of_zero_grad() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(40, 40))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for one in model.parameters():
        one.grad = torch.zeros_like(one)
    adapter = adapter_for((model, optimizer))
    assert len(adapter.run_state()["zero_gradients"]) == 6
    gradient = model[2].weight.grad
    assert gradient is not None
    gradient[17, 17] = 1e-30
    assert adapter.run_state()["zero_gradients"] == []


def test_gradients_of_the_step_that_is_given_up_do_not_add_to_the_next(tmp_path: Path) -> None:
    whole = Branches(tmp_path / "whole", set_to_none=True, zeroed="after")
    whole.steps(0, "left right", "left right", "left")
    whole.ckpt.close()
    job = Branches(tmp_path / "store", set_to_none=True, zeroed="after")
    job.steps(0, "left right", "left right")
    job.backward(7, "left right")
    assert job.ckpt.resume() == 2
    job.steps(2, "left")
    assert torch.equal(job.weights(), whole.weights())
    job.ckpt.close()
