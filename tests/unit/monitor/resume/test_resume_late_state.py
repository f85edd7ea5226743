"""Optimizer state that appears after a resume, before the first decision, is saved like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monitor


class Late(nn.Module):
    """A layer whose second parameter is used from step 4 on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(4))

    def forward(self, step: int) -> torch.Tensor:
        return self.first.square().sum() + (self.second.square().sum() if step >= 4 else 0.0)


class Job:
    def __init__(self, store: Path, **settings: Any) -> None:
        self.model = nn.ModuleDict({"layer": Late()})
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        config = {"store": str(store), "every": 1, "metrics": {"enabled": False}, **settings}
        self.ckpt = monitor.attach((self.model, self.optimizer), config)
        self.resumed = self.ckpt.resume()

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.optimizer.zero_grad()
            self.model["layer"](step).backward()
            self.optimizer.step()
            self.ckpt.step()
            self.ckpt.flush()

    def values(self) -> list[torch.Tensor]:
        return [one.detach().clone() for one in self.model.parameters()]


@pytest.mark.parametrize("settings", [{}, {"policy": {"name": "parity", "k": 2}}])
@pytest.mark.parametrize("same_process", [False, True])
def test_state_that_appears_after_a_resume_is_saved(tmp_path: Path, same_process: bool, settings: Any) -> None:
    job = Job(tmp_path / "store", **settings)
    job.steps(1, 5 if same_process else 3)
    if same_process:
        assert job.ckpt.resume(step=3) == 3
    else:
        job.ckpt.close()
        job = Job(tmp_path / "store", **settings)
    job.steps(4, 6)
    values = job.values()
    job.ckpt.close()
    back = Job(tmp_path / "store", **settings)
    assert back.resumed == 6 and back.ckpt.certificate is not None and back.ckpt.certificate.exact
    assert all(map(torch.equal, values, back.values()))
    back.ckpt.close(save=False)
