"""StepCache: lookups are cached while it is enabled, and only then."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from monitor.adapters.base import wrap_methods
from monitor.adapters.identity import StepCache
from monitor.adapters.module_tensors import ModuleTensors
from monitor.adapters.pytorch import PyTorchAdapter


def test_nothing_is_cached_while_disabled() -> None:
    cache, lookups = StepCache(), []
    for _ in range(2):
        cache.get("key", lambda: lookups.append(0))
    assert len(lookups) == 2


def test_each_key_is_looked_up_once_per_period() -> None:
    cache, lookups = StepCache(), []
    for _ in range(2):
        with cache.enabled():
            with cache.enabled():
                cache.get("key", lambda: lookups.append(0))
            cache.get("key", lambda: lookups.append(0))
            cache.get("other", lambda: lookups.append(0))
    assert len(lookups) == 4


def test_an_error_ends_the_period_and_is_not_cached() -> None:
    cache = StepCache()

    def fail() -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError), cache.enabled():
        with pytest.raises(RuntimeError):
            cache.get("key", fail)
        assert cache.get("key", lambda: 5) == 5
        fail()
    assert cache.get("key", lambda: 6) == 6


def test_changes_between_two_periods_are_seen() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    inventory = ModuleTensors(module)
    with inventory.cache.enabled():
        assert list(inventory.parameters()) == ["0.weight", "0.bias"]
    module.append(nn.LayerNorm(2))
    module[0].register_buffer("mean", torch.zeros(2))
    with inventory.cache.enabled():
        assert list(inventory.parameters()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert list(inventory.buffers()) == ["0.mean"]


def test_an_adapter_walks_the_module_tree_once_per_period(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(2, 2)
    adapter = PyTorchAdapter(module, torch.optim.AdamW(module.parameters()))
    walks: list[int] = []
    named = module.named_parameters
    monkeypatch.setattr(
        module, "named_parameters", lambda *args, **kwargs: (walks.append(0), named(*args, **kwargs))[1]
    )
    with adapter.cache_lookups():
        for _ in range(3):
            adapter.owned(), adapter.tensors(), adapter.run_state(), adapter.layout_facts()
    assert len(walks) == 2  # one of them with the other names of tied parameters


class Engine:
    def load(self, folder: str) -> str:
        return f"loaded {folder}"


def test_a_method_that_its_class_replaces_later_is_called_through_the_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the Trainer's resume does at each ``train()``, with an engine that was attached at the first one."""
    engine, seen = Engine(), list[str]()
    wrap_methods(engine, ["load"], lambda: seen.append("hook"))
    wrap_methods(engine, ["load"], lambda: seen.append("second"))
    assert engine.load("a") == "loaded a" and seen == ["second", "hook"]
    monkeypatch.setattr(Engine, "load", lambda _, folder: f"skipped {folder}")
    assert engine.load("b") == "skipped b" and seen == ["second", "hook"] * 2
