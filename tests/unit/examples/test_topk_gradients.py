"""The hook that sends only the largest gradients, without processes: what ranks send is what the test says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from examples import topk_gradients
from examples.topk_gradients import TopK, reduce_topk


def bucket_of(model: nn.Module, gradients: list[torch.Tensor]) -> Any:
    buffer = torch.empty(0)
    return SimpleNamespace(
        parameters=lambda: list(model.parameters()), gradients=lambda: gradients, buffer=lambda: buffer
    )


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Three ranks that send the same places, and the values of this rank times 2³⁰, -2³⁰ and 1."""

    def gather(found: list[torch.Tensor], tensor: torch.Tensor) -> None:
        for one, by in zip(found, (1 << 30, -(1 << 30), 1), strict=True):
            one.copy_(tensor * by if tensor.is_floating_point() else tensor)

    monkeypatch.setattr(topk_gradients, "dist", SimpleNamespace(get_world_size=lambda: 3, all_gather=gather))
    return 3


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_in_any_memory_format_are_added_rank_by_rank(ranks: int, layout: torch.memory_format) -> None:
    """In this order: in another one 2³⁰ takes the last rank's value along, and ranks would go apart."""
    model = nn.Conv2d(3, 4, 3, bias=False).to(memory_format=layout)
    topk, gradient = TopK(model, 0.25), torch.rand(4, 3, 3, 3).add_(0.5).to(memory_format=layout)
    before = gradient.clone()
    reduce_topk(topk, bucket_of(model, [gradient])).wait()
    largest = before.flatten() >= before.flatten().topk(27).values.min()
    assert torch.equal(gradient.flatten(), torch.where(largest, before.flatten() / ranks, 0.0))
    assert torch.equal(topk.remainders["weight"], torch.where(largest, 0.0, before.flatten()))
