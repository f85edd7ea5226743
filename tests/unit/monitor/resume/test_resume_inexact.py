"""A commit of a state that was resumed inexactly, before any training, is not exact either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import monitor


def job(folder: Path, **settings: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, monitor.Checkpointer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    common: dict[str, Any] = {"store": str(folder / "s"), "every": 1, "metrics": {"enabled": False}}
    return model, optimizer, monitor.attach((model, optimizer), {**common, **settings})


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ckpt: monitor.Checkpointer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        ckpt.step()
        ckpt.flush()


def exact(ckpt: monitor.Checkpointer) -> bool:
    assert ckpt.certificate is not None
    return ckpt.certificate.exact


LOSSY = {"encoding": "compact"}
IN_TURN = {"policy": {"name": "parity"}}


@pytest.mark.parametrize("settings", [LOSSY, IN_TURN], ids=["rounded", "of several steps"])
@pytest.mark.parametrize("trains", [False, True])
def test_only_training_makes_an_exact_commit_of_what_was_not(
    tmp_path: Path, settings: dict[str, Any], trains: bool
) -> None:
    *trained, ckpt = job(tmp_path, **settings)
    ckpt.resume()
    train(*trained, ckpt, 6)
    ckpt.close(save=False)
    *trained, ckpt = job(tmp_path)  # everything, raw
    ckpt.resume()
    assert not exact(ckpt)
    if trains:
        train(*trained, ckpt, 1)
    else:
        ckpt.step()  # whose update a gradient scaler skipped
        ckpt.flush()
    ckpt.save(wait=True)
    ckpt.close()
    *_, ckpt = job(tmp_path)
    ckpt.resume()
    assert exact(ckpt) is trains
    ckpt.close(save=False)


@pytest.mark.parametrize("rounded", [False, True])
def test_the_last_step_out_of_memory_is_as_exact_as_it_was_there(tmp_path: Path, rounded: bool) -> None:
    memory = {"enabled": True, "path": str(tmp_path), "every": 1, "encoding": "compact" if rounded else "raw"}
    *trained, ckpt = job(tmp_path, every=100, memory=memory)
    ckpt.resume()
    ckpt.save(wait=True)
    train(*trained, ckpt, 3)
    ckpt.close(save=False)
    *trained, ckpt = job(tmp_path, every=100, memory=memory)
    step = ckpt.resume()
    assert ckpt.resumed is not None and ckpt.resumed.memory is not None
    assert exact(ckpt) is not rounded
    ckpt.close()  # commits that step
    *_, ckpt = job(tmp_path)
    assert ckpt.resume() == step
    assert ckpt.resumed is not None and ckpt.resumed.memory is None
    assert exact(ckpt) is not rounded
    ckpt.close(save=False)


def test_what_is_trained_after_such_a_commit_is_exact_in_memory_too(tmp_path: Path) -> None:
    *trained, ckpt = job(tmp_path, **LOSSY)
    ckpt.resume()
    train(*trained, ckpt, 3)
    ckpt.close(save=False)
    memory = {"enabled": True, "path": str(tmp_path), "every": 1}
    *trained, ckpt = job(tmp_path, every=100, memory=memory)
    ckpt.resume()
    ckpt.save(wait=True)
    train(*trained, ckpt, 3)
    ckpt.close(save=False)
    *_, ckpt = job(tmp_path, every=100, memory=memory)
    ckpt.resume()
    assert ckpt.resumed is not None and ckpt.resumed.memory is not None
    assert exact(ckpt)
    ckpt.close(save=False)
