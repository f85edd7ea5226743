"""Loops that call the checkpointer wrongly are told so, once; loops that only look like them are not."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monitor
from monitor.telemetry import log
from tests.support.launch import ENVIRONMENT

BEFORE, MICRO = "before the optimizer step", "times for each optimizer step"
FORGOTTEN, UNUSED = "nothing is saved. Call it", "is not used"
NOTICES = (BEFORE, MICRO, FORGOTTEN, UNUSED)


class Loop:
    """A model, its optimizer and a checkpointer that has been asked for the step to begin at."""

    def __init__(self, store: Path, every: int = 1000, state: Any = ()) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        settings = {"store": str(store), "every": every, "metrics": {"enabled": False}}
        self.ckpt = monitor.attach((self.model, self.optimizer), settings, state=state)

    def backward(self, scale: float = 1.0) -> torch.Tensor:
        loss = scale * self.model(torch.randn(2, 3)).square().mean()
        loss.backward()
        return loss


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    gc.collect()
    for one in gc.get_objects():  # of earlier tests of this process, such as in Accelerate's global state
        if issubclass(type(one), torch.amp.GradScaler):
            one._enabled = False
    made = Loop(tmp_path / "store")
    start = made.ckpt.resume()
    assert start == 0
    yield made
    made.ckpt.close(save=False)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The notices so far, in order."""
    caplog.set_level(logging.WARNING, "driftpoint")
    return lambda: [text for record in caplog.records for text in NOTICES if text in record.getMessage()]


@pytest.mark.parametrize("zero", ["first", "last"])
def test_a_call_before_the_optimizer_step(loop: Loop, said: Callable[[], list[str]], zero: str) -> None:
    for _ in range(4):
        if zero == "first":
            loop.optimizer.zero_grad()
        loop.backward()
        loop.ckpt.step()
        loop.optimizer.step()
        if zero == "last":
            loop.optimizer.zero_grad()
    assert said() == [BEFORE]


def test_a_call_at_the_beginning_of_the_loop(loop: Loop, said: Callable[[], list[str]]) -> None:
    for _ in range(4):
        loop.ckpt.step()
        loop.optimizer.zero_grad()
        loop.backward()
        loop.optimizer.step()
    assert said() == [BEFORE]


def test_a_call_for_each_micro_batch(loop: Loop, said: Callable[[], list[str]]) -> None:
    for batch in range(32):
        loop.backward()
        if batch % 4 == 3:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        loop.ckpt.step()
    assert said() == [MICRO]


def test_a_forgotten_call(loop: Loop, said: Callable[[], list[str]], caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3 * log.FORGOTTEN):
        loop.optimizer.step()  # without gradients
    assert said() == [FORGOTTEN]
    assert "was never called" in caplog.text


def test_a_call_that_is_forgotten_later(loop: Loop, said: Callable[[], list[str]]) -> None:
    for step in range(2 * log.FORGOTTEN):
        loop.optimizer.step()
        if step < 10:
            loop.ckpt.step()
    assert said() == [FORGOTTEN]


@pytest.mark.parametrize("zero", ["before the call", "after the call"])
@pytest.mark.parametrize("inf", [range(3), (0,), (0, 4, 7), (3,), ()])
def test_steps_that_a_gradient_scaler_skips_are_no_misuse(
    loop: Loop, said: Callable[[], list[str]], inf: Any, zero: str
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(12):
        loss = loop.model(torch.full((2, 3), 1e30 if step in inf else 1.0)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        if zero == "before the call":
            loop.optimizer.zero_grad()
        loop.ckpt.step()
        if zero == "after the call":
            loop.optimizer.zero_grad()
    assert said() == []


@pytest.mark.parametrize("kept", [True, False])
def test_accumulation_that_calls_once_is_no_misuse(loop: Loop, said: Callable[[], list[str]], kept: bool) -> None:
    for _ in range(8):
        for _ in range(4):
            loop.backward()
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
        loop.optimizer.step()
        loop.optimizer.zero_grad(set_to_none=not kept)
        loop.ckpt.step()
    assert said() == []


@pytest.mark.parametrize("zero", ["before backward", "after the step", "in place"])
@pytest.mark.parametrize("begin", [0, 20])
def test_a_loop_that_counts_something_else_is_no_misuse(
    loop: Loop, said: Callable[[], list[str]], zero: str, begin: int
) -> None:
    """As a loop over the steps of an environment that learns from every fourth, after it has collected some."""
    for count in range(60):
        if count >= begin and count % 4 == 3:
            if zero == "before backward":
                loop.optimizer.zero_grad()
            loop.backward()
            loop.optimizer.step()
            if zero != "before backward":
                loop.optimizer.zero_grad(set_to_none=zero == "after the step")
        loop.ckpt.step()
    assert said() == []


def test_many_optimizer_steps_to_a_call_are_no_misuse(loop: Loop, said: Callable[[], list[str]]) -> None:
    """As in PPO, whose loop counts what it collects."""
    for _ in range(8):
        for _ in range(320):
            loop.optimizer.step()
        loop.ckpt.step()
    assert said() == []


def test_an_optimizer_that_never_steps_is_no_misuse(loop: Loop, said: Callable[[], list[str]]) -> None:
    for _ in range(20):
        loop.backward()
        loop.ckpt.step()
    assert said() == []


def test_a_resumed_loop_is_looked_at_anew(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    first = Loop(tmp_path / "store", every=1)
    with first.ckpt:
        for _ in range(first.ckpt.resume(), 3):
            first.backward()
            first.optimizer.step()
            first.ckpt.step()
    assert said() == []
    other = Loop(tmp_path / "store", every=1)
    begin = other.ckpt.resume()
    assert begin == 3
    other.backward()
    other.ckpt.step()
    other.optimizer.step()
    other.ckpt.close(save=False)
    assert said() == [BEFORE]


class Position:
    """An object that may know where the loop is."""

    def state_dict(self) -> dict[str, int]:
        return {"step": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_a_resume_whose_step_is_not_used(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    for number, state in enumerate([(), [torch.Generator()], [Position()]]):
        with Loop(tmp_path / str(number), state=state).ckpt as ckpt:
            ckpt.resume()
        assert said() == [UNUSED] * min(number + 1, 2)


@pytest.mark.parametrize(
    "use", ["range(ckpt.resume(), 9)", "step = ckpt.resume()", "[ckpt.resume()]", "f(ckpt.resume())"]
)
def test_a_resume_whose_step_is_used_is_no_misuse(tmp_path: Path, said: Callable[[], list[str]], use: str) -> None:
    with Loop(tmp_path / "store").ckpt as ckpt:
        exec(use, {"ckpt": ckpt, "f": print})  # as a script has it
    assert said() == []


def test_what_a_script_sees(tmp_path: Path) -> None:
    """Nothing is configured, so warnings go to stderr."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, monitor\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "with monitor.attach((model, optimizer), {'metrics': {'enabled': False}}) as ckpt:\n"
        "    for step in range(ckpt.resume(), 3):\n"
        "        model(torch.ones(1, 2)).sum().backward()\n"
        "        ckpt.step()\n"
        "        optimizer.step()\n"
    )
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, env={**ENVIRONMENT}, capture_output=True, text=True, check=True
    )
    assert done.stderr.count(BEFORE) == 1
