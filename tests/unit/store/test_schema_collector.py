"""The garbage collector is paused while records of all tensors are made, and only then."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monitor
from store.schema import without_gc


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generation of each collection since the test began."""
    seen = list[int]()

    def saw(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(saw)
    yield seen
    gc.callbacks.remove(saw)


def test_nothing_is_collected_inside(collections: list[int]) -> None:
    with without_gc():
        collections.clear()
        kept = [[number] for number in range(100_000)]
        assert not collections
    assert gc.isenabled()
    kept += [[number] for number in range(1000)]
    assert collections


def test_the_collector_is_on_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="wrong"), without_gc(), without_gc():
        raise ValueError("wrong")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with without_gc(), without_gc():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_save_of_many_tensors_rarely_lets_it_run(tmp_path: Path, collections: list[int]) -> None:
    model = nn.ParameterList(torch.randn(4) for _ in range(1000))
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = monitor.attach((model, optimizer), {"store": str(tmp_path / "s"), "every": 1, "metrics": {"enabled": False}})
    ckpt.resume()
    for _ in range(3):
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        ckpt.flush()
        collections.clear()
        ckpt.step()
        ckpt.flush()
    ckpt.close(save=False)
    assert len(collections) < 100  # 3,000 tensors are saved, with about 50 objects each that live at once
