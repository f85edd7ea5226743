"""A unit that a rank cannot measure has no known drift: it is saved where that matters, and training goes on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from monitor.observe.drift_meter import Measure
from monitor.observe.sketch_meter import SketchMeter
from store.catalog import open_catalog
from store.names import FROZEN, Unit
from store.storage.local import LocalFiles
from tests.support.jobs import job

THRESHOLD: dict[str, Any] = {"policy": {"name": "threshold", "threshold": 1e9}, "bounds": {"max_drift": 1e9}}


@pytest.mark.parametrize(
    ("unit", "settings"), [(Unit("base", FROZEN), {}), (Unit("head", "fp32"), THRESHOLD)], ids=["frozen", "moving"]
)
def test_it_is_saved_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: Unit, settings: dict[str, Any]
) -> None:
    with job(tmp_path / "s", **settings) as one:
        if unit.slot == FROZEN:
            one.model.head.requires_grad_(False)
            unit = Unit("head", FROZEN)
        one.ckpt.resume()
        one.step()
        one.step()
        before = one.step()
        assert before is not None and unit not in (before.saved or {})
        real = SketchMeter.measure

        def measure(meter: SketchMeter, measured: Unit, pieces: Sequence[torch.Tensor]) -> Measure:
            if measured == unit and threading.current_thread() is threading.main_thread():
                raise torch.OutOfMemoryError("no memory for a board")
            return real(meter, measured, pieces)

        monkeypatch.setattr(SketchMeter, "measure", measure)
        if unit.slot == FROZEN:
            one.model.head.weight.data[0, 0] += 1.0  # else nothing of it is measured but its fingerprint
        report = one.step()
        assert report is not None and report.saved is not None and unit in report.saved
        monkeypatch.undo()
        one.step()
        catalog = open_catalog(LocalFiles(tmp_path / "s"))
        assert catalog.saves()[0].step == (5 if unit.slot == FROZEN else 4)
