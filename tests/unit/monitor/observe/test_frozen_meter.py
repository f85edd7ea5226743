"""Frozen weights: any change is found, and what is committed is never another value than the live one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import monitor
from monitor.observe.drift_meter import BySlotMeter, _fingerprints, _wide, drift_ratio
from monitor.observe.sketch_meter import SketchMeter
from store.names import FROZEN, Unit
from tests.support.jobs import Model, same

UNIT = Unit("base", FROZEN)
SETTINGS = {"every": 1, "metrics": {"enabled": False}}


def drift(meter: BySlotMeter, pieces: list[torch.Tensor]) -> float:
    measure = meter.measure(UNIT, pieces)
    return drift_ratio(measure.moved_sq, measure.reference_sq)


def committed(meter: BySlotMeter, pieces: list[torch.Tensor]) -> None:
    meter.measure(UNIT, pieces)
    meter.stage(UNIT, [piece.clone() for piece in pieces])
    meter.settle({UNIT: True})


def reset(meter: BySlotMeter, pieces: list[torch.Tensor]) -> None:
    meter.reset(UNIT, pieces)


@pytest.mark.parametrize("refer", [committed, reset])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_of_one_element_is_found(
    refer: Callable[[BySlotMeter, list[torch.Tensor]], None], dtype: torch.dtype
) -> None:
    meter = BySlotMeter(SketchMeter())
    pieces = [torch.randn(1 << 20).to(dtype), torch.zeros(5, dtype=dtype)]
    refer(meter, pieces)
    for _ in range(3):
        assert drift(meter, pieces) == 0.0
    for piece, place in ((0, 777_777), (1, 3)):
        words = pieces[piece].data.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
        before = int(words[place])
        words[place] ^= 1
        assert 0.0 < drift(meter, pieces) < 1e-3
        words[place] = before
        assert drift(meter, pieces) == 0.0


def test_a_save_that_failed_or_was_not_measured_is_no_reference() -> None:
    meter, pieces = BySlotMeter(SketchMeter()), [torch.randn(10_000)]
    committed(meter, pieces)
    pieces[0].data[5] *= 1 + 1e-6
    meter.measure(UNIT, pieces)
    meter.stage(UNIT, [piece.clone() for piece in pieces])
    meter.settle({UNIT: False})
    assert drift(meter, pieces) > 0.0
    other = BySlotMeter(SketchMeter())
    other.stage(UNIT, [piece.clone() for piece in pieces])
    other.settle({UNIT: True})
    assert drift(other, pieces) > 0.0


def test_values_that_are_not_finite_are_told_although_nothing_changed() -> None:
    meter, pieces = BySlotMeter(SketchMeter()), [torch.full((10,), float("nan"))]
    meter.reset(UNIT, pieces)
    assert [meter.measure(UNIT, pieces).finite for _ in range(2)] == [False, False]


@pytest.mark.parametrize("start", [0, 1, 4])
def test_words_of_eight_bytes_where_they_fit(start: int) -> None:
    piece = torch.randn(64).to(torch.bfloat16).narrow(0, start, 16)
    assert _wide(piece).dtype == (torch.bfloat16 if start == 1 else torch.int64)
    assert _fingerprints([piece]) == _fingerprints([piece.clone()])


class Adapted(Model):
    """A large frozen layer, and the small trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Embedding(200, 1000)
        self.base.requires_grad_(False)


def attached(store: Path, seed: int) -> tuple[Adapted, torch.optim.Optimizer, monitor.Checkpointer]:
    torch.manual_seed(seed)
    model = Adapted()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    return model, optimizer, monitor.attach((model, optimizer), {"store": str(store), **SETTINGS})


def train(model: Adapted, optimizer: torch.optim.Optimizer, ckpt: monitor.Checkpointer) -> monitor.StepReport | None:
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    report = ckpt.step()
    ckpt.flush()
    return report


def test_a_frozen_weight_changed_a_little_is_saved_again_and_then_rests(tmp_path: Path) -> None:
    model, optimizer, ckpt = attached(tmp_path / "s", 0)
    ckpt.resume()
    saved = []
    for step in range(6):
        if step == 3:
            model.base.weight.data[100, 7] *= 1 + 1e-6
        report = train(model, optimizer, ckpt)
        assert report is not None and report.saved is not None
        saved.append(Unit("base", FROZEN) in report.saved)
    assert saved == [True, False, False, True, False, False]
    expected = {name: one.detach().clone() for name, one in model.named_parameters()}
    ckpt.close()
    model, optimizer, ckpt = attached(tmp_path / "s", 1)
    ckpt.resume()
    assert ckpt.certificate is not None and ckpt.certificate.exact
    assert same({name: one.detach() for name, one in model.named_parameters()}, expected)
    model.base.weight.data[0, 0] *= 1 + 1e-6
    report = train(model, optimizer, ckpt)
    assert report is not None and report.saved is not None and Unit("base", FROZEN) in report.saved
    ckpt.close()


# ---- complex values


@pytest.mark.parametrize("slot", ["fp32", FROZEN])
@pytest.mark.parametrize("numel", [6, 40_000])
def test_imaginary_parts_count(slot: str, numel: int) -> None:
    unit, values = Unit("base", slot), torch.complex(torch.ones(numel), torch.zeros(numel))
    meter = BySlotMeter(SketchMeter())
    meter.measure(unit, [values])
    meter.stage(unit, [values.clone()])
    meter.settle({unit: True})
    values.imag += 1
    measure = meter.measure(unit, [values])
    assert drift_ratio(measure.moved_sq, measure.reference_sq) == pytest.approx(1.0, rel=0.1) and measure.finite
    values.imag[3] = torch.nan
    assert not meter.measure(unit, [values]).finite


def test_a_nan_in_an_imaginary_part_never_replaces_a_finite_version(tmp_path: Path) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(64, 64, dtype=torch.complex64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = monitor.attach((model, optimizer), {"store": str(tmp_path / "store"), **SETTINGS})
    ckpt.resume()
    for step in range(2):
        model.weight.abs().square().sum().backward()
        optimizer.step()
        if step == 1:
            model.weight.data.imag[0, 0] = torch.nan
        ckpt.step()
        ckpt.flush()
    assert ckpt.save(wait=True, strict=False).saved == {}
    assert ckpt.resume() == 1 and bool(torch.view_as_real(model.weight.detach()).isfinite().all())
    ckpt.close(save=False)
