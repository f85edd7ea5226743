"""Tensors made under ``torch.inference_mode()``, which have no version counter, are saved, kept and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from monitor.save.async_copy import AsyncCopy
from tests.support.jobs import Job, Model, job, same
from tests.support.kept import memory
from tests.support.memory_jobs import kept_steps, settled


class Calibrated(Model):
    """With a persistent buffer that a script replaces, and frozen weights that it made under inference mode."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.register_buffer("range", torch.zeros(5))
        with torch.inference_mode():
            self.register_parameter("base", torch.nn.Parameter(torch.randn(7), requires_grad=False))

    def calibrate(self, value: float) -> None:
        with torch.inference_mode():
            self.range = torch.full((5,), value)


@pytest.fixture(autouse=True)
def _calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.jobs.Model", Calibrated)


def state(one: Job) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in one.model.state_dict().items()}


@pytest.mark.parametrize("settings", [{}, {"staging": "lazy"}])
def test_a_buffer_replaced_under_inference_mode_is_saved_and_resumed(tmp_path: Path, settings: dict[str, Any]) -> None:
    with job(tmp_path / "s", memory=memory(tmp_path / "s"), **settings) as one:
        one.ckpt.resume()
        for step in range(1, 5):
            one.model.calibrate(float(step))  # type: ignore[operator]
            report = one.step()
            settled(one)
            assert report is not None and report.skipped is None
        kept = state(one)
        assert kept["range"][0] == 4.0
        one.ckpt.resume(memory=False)  # into the same tensors
        assert same(state(one), kept)
    with job(tmp_path / "s") as two:
        two.model.calibrate(0.0)  # type: ignore[operator]
        two.ckpt.resume(memory=False)
        assert same(state(two), kept)


def test_versions_in_memory_are_kept_too(tmp_path: Path) -> None:
    with job(tmp_path / "s", every=3, memory=memory(tmp_path / "s")) as one:
        one.ckpt.resume()
        for step in range(1, 9):
            one.model.calibrate(float(step))  # type: ignore[operator]
            one.step()
            settled(one)
        assert max(kept_steps(tmp_path / "s")) == 8


def test_a_change_of_such_a_tensor_is_found_by_the_sample() -> None:
    with torch.inference_mode():
        live = torch.randn(100)
    made = AsyncCopy()
    made.add([live], [torch.empty(100)])
    made.start()
    with torch.inference_mode():
        live.zero_()
    made.finish()
    with pytest.raises(Exception, match=r"ckpt\.copied\(\)"):
        made.require_whole()
