"""ExactMeter: precision for tiny drifts, and memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from monitor.observe.drift_meter import ExactMeter
from store.names import Unit

UNIT = Unit("layer", "fp32")


@pytest.mark.parametrize("by", [1e-3, 1e-5, 1e-7])
def test_tiny_drifts_on_many_chunks(by: float) -> None:
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(1_000_003, generator=generator) + 10
    after = before + before * by
    meter = ExactMeter()
    meter.reset(UNIT, [before])
    measure = meter.measure(UNIT, [after])
    expected = np.linalg.norm(after.numpy().astype(np.float64) - before.numpy().astype(np.float64))
    assert math.sqrt(measure.moved_sq) == pytest.approx(expected, rel=1e-6)
    norm = np.linalg.norm(before.numpy().astype(np.float64))
    assert math.sqrt(measure.reference_sq) == pytest.approx(norm, rel=1e-6)


def test_one_small_change_among_large_values() -> None:
    before = torch.full((500_000,), 1e4, dtype=torch.float64)
    after = before.clone()
    after[123_456] += 1e-6
    meter = ExactMeter()
    meter.reset(UNIT, [before])
    assert math.sqrt(meter.measure(UNIT, [after]).moved_sq) == pytest.approx(1e-6, rel=1e-4)


def test_the_committed_copies_are_the_reference_without_another_copy() -> None:
    meter = ExactMeter()
    copies = [torch.zeros(10), torch.ones(3)]
    meter.stage(UNIT, copies)
    assert meter.settle(UNIT, True) == []
    copies[0][4] = 2.0
    assert meter.measure(UNIT, [torch.zeros(10), torch.ones(3)]).moved_sq == 4.0


def test_working_memory_is_a_few_megabytes() -> None:
    assert ExactMeter().scratch_bytes <= 4 << 20
