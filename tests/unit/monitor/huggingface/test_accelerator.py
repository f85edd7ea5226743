"""monitor.attach(accelerator) in one process: steps that the gradient scaler skips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn

import monitor


def test_a_step_that_the_scaler_skips_counts(tmp_path: Path) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # what mixed_precision="fp16" makes on a device
    inner = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(inner, torch.optim.AdamW(inner.parameters()))
    settings: dict[str, Any] = {"store": str(tmp_path / "store"), "every": 1, "metrics": {"enabled": False}}
    taken = []
    with monitor.attach(accelerator, settings) as ckpt:
        ckpt.resume()
        for batch in range(8):  # two to a step
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
