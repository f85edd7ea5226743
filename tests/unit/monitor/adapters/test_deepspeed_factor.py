"""The factor that DeepSpeed's gradients are expected to have been multiplied by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from monitor.adapters.deepspeed import Zero12Adapter


def factor_of(**zero: Any) -> Any:
    return Zero12Adapter._factor(SimpleNamespace(_zero=SimpleNamespace(**zero)))  # type: ignore[arg-type]


def test_it_is_told_without_waiting_for_a_device() -> None:
    norm = torch.tensor(3.0, device="meta")  # a tensor without a value: reading it raises
    assert factor_of(loss_scale=2.0, clip_grad=1.0, _global_grad_norm=norm).device.type == "meta"


@pytest.mark.parametrize("norm", [None, 0.0, float("inf")])
def test_it_is_that_of_the_loss_scale_without_a_norm(norm: float | None) -> None:
    assert factor_of(loss_scale=4.0, clip_grad=1.0, _global_grad_norm=norm) == 0.25
    assert factor_of(loss_scale=4.0, clip_grad=0.0, _global_grad_norm=torch.tensor(3.0)) == 0.25
    assert factor_of(loss_scale=0.0, clip_grad=0.0, _global_grad_norm=norm) == 1.0
    assert factor_of(clip_grad=0.0, _global_grad_norm=norm) == 1.0


def test_without_a_loss_scale_clipping_alone_counts() -> None:
    expected = 1.0 / ((torch.tensor(3.0) + 1e-6) / 0.5)
    assert factor_of(clip_grad=0.5, _global_grad_norm=torch.tensor(3.0)) == expected
