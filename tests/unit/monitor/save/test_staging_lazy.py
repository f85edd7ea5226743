"""Lazy staging: what is written is the state of the decision, whenever the copies are made."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import monitor
from monitor.adapters.pytorch import PyTorchAdapter
from monitor.save.async_copy import AsyncCopy
from store.catalog import open_catalog
from store.resolve import newest_resumable
from store.storage.local import LocalFiles
from tests.support.entries import read_entry
from tests.support.internals import hold_writer


def training(store: Path, staging: str) -> tuple[torch.nn.Linear, torch.optim.Optimizer, monitor.Checkpointer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    settings = {"store": str(store), "every": 1, "staging": staging, "metrics": {"enabled": False}}
    return model, optimizer, monitor.attach((model, optimizer), settings)


def update(model: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()


def stored_weight(store: Path) -> torch.Tensor:
    catalog = open_catalog(LocalFiles(store))
    resolution, _ = newest_resumable(catalog)
    source = next(s for s in resolution.sources() if (s.entry.fqn, s.entry.slot) == ("weight", "fp32"))
    data = bytearray(source.entry.nbytes)
    read_entry(catalog.files, source.part, source.entry, memoryview(data))
    return torch.frombuffer(data, dtype=torch.float32).reshape(8, 8)


def save_with_writer_held_up(store: Path, staging: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights at the decision, weights after the next update), the writer begins only after that update."""
    model, optimizer, ckpt = training(store, staging)
    ckpt.resume()
    release = threading.Event()
    hold_writer(ckpt, release)
    update(model, optimizer)
    before = model.weight.detach().clone()
    assert ckpt.step() is not None
    update(model, optimizer)
    after = model.weight.detach().clone()
    release.set()
    ckpt.close(save=False)
    return before, after


@pytest.mark.parametrize("staging", ["eager", "lazy"])
def test_the_state_of_the_decision_is_written_although_the_writer_comes_late(tmp_path: Path, staging: str) -> None:
    before, after = save_with_writer_held_up(tmp_path / "s", staging)
    assert not torch.equal(before, after)
    assert torch.equal(stored_weight(tmp_path / "s"), before)


def test_without_the_hook_the_net_gives_the_save_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PyTorchAdapter, "before_update", lambda self, hook: None)
    save_with_writer_held_up(tmp_path / "s", "lazy")
    assert open_catalog(LocalFiles(tmp_path / "s")).saves() == []


def test_without_hook_and_net_a_torn_state_would_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PyTorchAdapter, "before_update", lambda self, hook: None)
    monkeypatch.setattr(AsyncCopy, "require_whole", lambda self: None)
    before, after = save_with_writer_held_up(tmp_path / "s", "lazy")
    assert torch.equal(stored_weight(tmp_path / "s"), after)
    assert not torch.equal(stored_weight(tmp_path / "s"), before)


def test_the_wait_for_copies_is_measured(tmp_path: Path) -> None:
    model, optimizer, ckpt = training(tmp_path / "s", "lazy")
    ckpt.resume()
    for _ in range(3):
        update(model, optimizer)
        ckpt.step()
        ckpt.flush()
    ckpt.close(save=False)
    assert ckpt.metrics.registry.get_sample_value("driftpoint_copy_wait_seconds_count") == 2


def test_a_change_around_the_optimizer_gives_the_save_up_and_training_goes_on(tmp_path: Path) -> None:
    model, optimizer, ckpt = training(tmp_path / "s", "lazy")
    ckpt.resume()
    update(model, optimizer)
    ckpt.step()
    ckpt.flush()
    release = threading.Event()
    hold_writer(ckpt, release)
    update(model, optimizer)
    committed = model.weight.detach().clone()
    with torch.no_grad():
        committed_step_one = stored_weight(tmp_path / "s")
        ckpt.step()
        model.weight.clamp_(-0.01, 0.01)
    update(model, optimizer)
    release.set()
    ckpt.close(save=False)
    assert not torch.equal(committed, committed_step_one)
    assert torch.equal(stored_weight(tmp_path / "s"), committed_step_one)
    assert ckpt.metrics.registry.get_sample_value("driftpoint_failures_total", {"reason": "StateChangedError"}) == 1


def test_auto_is_eager_where_scripts_can_reach_the_weights(tmp_path: Path) -> None:
    before, _ = save_with_writer_held_up(tmp_path / "s", "auto")
    assert torch.equal(stored_weight(tmp_path / "s"), before)
    model, optimizer, ckpt = training(tmp_path / "t", "auto")
    ckpt.resume()
    update(model, optimizer)
    ckpt.step()
    with torch.no_grad():
        model.weight.data.copy_(torch.zeros(8, 8))  # as weight averaging does, unseen by autograd
    ckpt.close(save=False)
    assert not torch.equal(stored_weight(tmp_path / "t"), model.weight)
