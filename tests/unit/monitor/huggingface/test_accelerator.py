"""monitor.attach(accelerator) in one process: steps that the gradient scaler skips, and calls in the wrong order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn

import monitor

NOTICE = "is called before the optimizer step"


def new_accelerator(accumulation: int) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, gradient_accumulation_steps=accumulation)


@pytest.mark.parametrize("wrong", [True, False])
@pytest.mark.parametrize("guarded", [True, False])
def test_a_call_before_the_optimizer_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: bool, guarded: bool
) -> None:
    accelerator = new_accelerator(1 if wrong else 3)
    inner = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(inner, torch.optim.AdamW(inner.parameters()))
    with monitor.attach(accelerator, {"store": str(tmp_path), "metrics": {"enabled": False}}) as ckpt:
        for _ in range(ckpt.resume(), 6):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(2, 3)).square().mean())
                if wrong:
                    ckpt.step()
                if accelerator.sync_gradients or not guarded:
                    optimizer.step()
                    optimizer.zero_grad()
            if not wrong:
                ckpt.step()
    assert caplog.text.count(NOTICE) == wrong


def test_a_step_that_the_scaler_skips_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = new_accelerator(2)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # what mixed_precision="fp16" makes on a device
    inner = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(inner, torch.optim.AdamW(inner.parameters()))
    settings: dict[str, Any] = {"store": str(tmp_path / "store"), "every": 1, "metrics": {"enabled": False}}
    taken = []
    with monitor.attach(accelerator, settings) as ckpt:
        for batch in range(ckpt.resume(), 8):  # two to a step
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.full((2, 3), 1e30 if batch == 3 else 1.0)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            report = ckpt.step()
            ckpt.flush()
            taken.append((None if report is None else report.step, optimizer.step_was_skipped))
    assert taken == [
        (None, False), (1, False), (None, False), (2, True), (None, True), (3, False), (None, False), (4, False),
    ]  # fmt: skip
    assert NOTICE not in caplog.text


@pytest.mark.parametrize("accelerated", [True, False])
def test_other_random_numbers_after_a_resume_name_the_page(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, accelerated: bool
) -> None:
    settings: dict[str, Any] = {"store": str(tmp_path / "store"), "every": 2, "metrics": {"enabled": False}}
    for resumed in (False, True):
        model = nn.Linear(3, 1)
        target: Any = (model, torch.optim.AdamW(model.parameters()))
        optimizer = target[1]
        if accelerated:
            target = new_accelerator(1)
            _, optimizer = target.prepare(model, optimizer)
        ckpt = monitor.attach(target, settings)
        assert ckpt.resume() == 2 * resumed
        torch.rand(int(resumed))
        for _ in range(3):
            model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step()
            ckpt.flush()
        ckpt.close(save=False)
        assert ("random numbers" in caplog.text) == resumed
    page = "huggingface" if accelerated else "loops"
    assert (
        f"Ignore this if the data continues where it stopped and nothing later is random. See docs/{page}.md"
        in caplog.text
    )
