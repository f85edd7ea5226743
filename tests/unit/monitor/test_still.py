"""Looking things up once while a job stands still, and again when it has moved on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from monitor.adapters.base import StepCache
from monitor.adapters.module_tensors import ModuleTensors
from monitor.adapters.pytorch import PyTorchAdapter


def test_nothing_is_kept_outside_a_period() -> None:
    still, looks = StepCache(), []
    for _ in range(2):
        still.once("key", lambda: looks.append(0))
    assert len(looks) == 2


def test_a_period_looks_once_and_the_next_one_again() -> None:
    still, looks = StepCache(), []
    for _ in range(2):
        with still.period():
            with still.period():
                still.once("key", lambda: looks.append(0))
            still.once("key", lambda: looks.append(0))
            still.once("other", lambda: looks.append(0))
    assert len(looks) == 4


def test_an_error_ends_the_period_and_is_not_kept_as_an_answer() -> None:
    still = StepCache()

    def fail() -> None:
        raise RuntimeError("nothing to see")

    with pytest.raises(RuntimeError), still.period():
        with pytest.raises(RuntimeError):
            still.once("key", fail)
        assert still.once("key", lambda: 5) == 5
        fail()
    assert still.once("key", lambda: 6) == 6


def test_what_a_script_changes_between_two_periods_is_seen() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    inventory = ModuleTensors(module)
    with inventory.still.period():
        assert list(inventory.parameters()) == ["0.weight", "0.bias"]
    module.append(nn.LayerNorm(2))
    module[0].register_buffer("mean", torch.zeros(2))
    with inventory.still.period():
        assert list(inventory.parameters()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert list(inventory.buffers()) == ["0.mean"]


def test_an_adapter_walks_the_module_tree_once_in_a_period(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(2, 2)
    adapter = PyTorchAdapter(module, torch.optim.AdamW(module.parameters()))
    walks: list[int] = []
    named = module.named_parameters
    monkeypatch.setattr(
        module, "named_parameters", lambda *args, **kwargs: (walks.append(0), named(*args, **kwargs))[1]
    )
    with adapter.still():
        for _ in range(3):
            adapter.owned(), adapter.tensors(), adapter.run_state(), adapter.layout_facts()
    assert len(walks) == 2  # one of them with the other names of tied parameters
