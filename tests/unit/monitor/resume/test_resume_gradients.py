"""Gradients of a step that is given up do not add to those of the next, and stay in the memory that they have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import monitor


class Flat:
    """A model whose gradients lie in one buffer, as where a script reduces them by itself, or in none."""

    def __init__(self, store: Path, *, flat: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.set_to_none = not flat
        self.buffer = torch.zeros(sum(one.numel() for one in self.model.parameters()))
        if flat:
            places = self.buffer.split([one.numel() for one in self.model.parameters()])
            for one, place in zip(self.model.parameters(), places, strict=True):
                one.grad = place.view_as(one)
        self.ckpt = monitor.attach(
            (self.model, self.optimizer), {"store": str(store), "every": 1, "metrics": {"enabled": False}}
        )

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.backward(step)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=self.set_to_none)
            self.ckpt.step()
            self.ckpt.flush()

    def backward(self, step: int) -> None:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        self.model(x).square().mean().backward()

    def weights(self) -> torch.Tensor:
        return torch.cat([one.detach().reshape(-1) for one in self.model.parameters()])


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_step_is_given_up(tmp_path: Path, flat: bool, again: bool) -> None:
    whole = Flat(tmp_path / "whole", flat=flat)
    whole.steps(0, 4)
    whole.ckpt.close()
    job = Flat(tmp_path / "store", flat=flat)
    job.steps(0, 2)
    job.backward(7)
    if again:
        job.ckpt.close(save=False)
        job = Flat(tmp_path / "store", flat=flat)
    assert job.ckpt.resume() == 2 and job.ckpt.certificate is not None and job.ckpt.certificate.exact
    job.steps(2, 3)
    if flat:
        inside = range(job.buffer.data_ptr(), job.buffer.data_ptr() + job.buffer.nbytes)
        assert all(one.grad is not None and one.grad.data_ptr() in inside for one in job.model.parameters())
    job.steps(3, 4)
    assert torch.equal(job.weights(), whole.weights())
    job.ckpt.close()
