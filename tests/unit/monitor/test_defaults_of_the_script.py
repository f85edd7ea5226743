"""A script with another default device or dtype: what the checkpointer makes is where, and of what, it has to be.

The meta device stands for one that is not the host: what is made there has no values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import monitor
from tests.support.jobs import Model
from tests.support.kept import memory

SETTINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "eager": {"staging": "eager"},
    "encoded": {"encoding": {"exp_avg": "int8-block"}, "encode": "staging"},
    "packed": {"encoding": "compact", "packing": 1, "differences": True},
    "by drift": {"policy": {"name": "threshold", "threshold": 0.001}},
    "journal": {"journal": {"enabled": True}, "every": 3},
    "memory": {"every": 3},
    "waves": {"staging": {"max_bytes": 20_000_000}},
}


def other_device() -> torch.device:
    return torch.device("meta")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_job_saves_and_resumes(tmp_path: Path, name: str) -> None:
    store = tmp_path / "store"
    settings = {"every": 1, "store": str(store), "metrics": {"enabled": False}, **SETTINGS[name]}
    if name == "memory":
        settings["memory"] = memory(store)
    model, optimizer, ckpt = attached(settings, 0)
    for _ in range(5):
        train(model, optimizer)
        with other_device():
            report = ckpt.step()
            assert report is None or report.skipped is None
            ckpt.flush()
    with other_device():
        ckpt.close()
    again, its_optimizer, ckpt = attached(settings, 5)
    train(again, its_optimizer)
    with other_device():
        ckpt.close()
    train(model, optimizer)
    bound = 0.0 if "encoding" not in SETTINGS[name] else 0.02
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_job_with_another_default_dtype_saves_and_resumes(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    store = tmp_path / "store"
    settings = {"every": 1, "store": str(store), "metrics": {"enabled": False}, **SETTINGS[name]}
    if name == "memory":
        settings["memory"] = memory(store)
    held = []
    for start in (0, 5):
        torch.manual_seed(start)
        model = Model(7).eval()  # odd sizes
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.set_default_dtype(dtype)
        try:
            ckpt = monitor.attach((model, optimizer), settings)
            assert ckpt.resume() == start
            for _ in range(5 if start == 0 else 0):
                train(model, optimizer)
                report = ckpt.step()
                assert report is None or report.skipped is None
                ckpt.flush()
            ckpt.close(save=name != "journal")
        finally:
            torch.set_default_dtype(torch.float32)
        held.append(list(model.parameters()))
    bound = 0.0 if "encoding" not in SETTINGS[name] else 0.02
    for one, other in zip(*held, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=bound)


def attached(settings: dict[str, Any], step: int) -> tuple[Model, torch.optim.Optimizer, monitor.Checkpointer]:
    torch.manual_seed(step)
    model = Model().eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with other_device():
        ckpt = monitor.attach((model, optimizer), settings)
        assert ckpt.resume() == step
    return model, optimizer, ckpt


def train(model: Model, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 3, dtype=torch.float32)).square().mean().backward()
    for parameter in model.parameters():
        parameter.grad.copy_(parameter.grad.bfloat16())  # as the journal records in two bytes
    optimizer.step()
