"""The garbage collector is paused while records of all tensors are made, and only then."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monitor
from store.schema import without_gc

USUAL = gc.get_threshold()


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
    kept += [[number] for number in range(1000)]
    assert collections


def test_what_lasts_is_not_gone_through_at_the_end(collections: list[int]) -> None:
    with without_gc(lasting=True):
        collections.clear()
        kept = [[number] for number in range(100_000)]
    assert not any(len(gc.get_objects(generation)) > 50_000 for generation in (0, 1))
    assert not collections
    assert len(kept) == 100_000


def test_what_the_script_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with without_gc(lasting=True):
            pass
        assert gc.get_freeze_count() == frozen
    finally:
        gc.unfreeze()


def test_it_runs_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="wrong"), without_gc(), without_gc():
        raise ValueError("wrong")
    assert gc.get_threshold() == USUAL


def test_it_rests_until_the_last_thread_has_left() -> None:
    inside, leave, done = (threading.Event() for _ in range(3))

    def other() -> None:
        with without_gc():
            inside.set()
            assert leave.wait(30)
        done.set()

    thread = threading.Thread(target=other)
    with without_gc():
        thread.start()
        assert inside.wait(30)
    assert gc.get_threshold() == (0, *USUAL[1:])
    leave.set()
    assert done.wait(30)
    thread.join()
    assert gc.get_threshold() == USUAL


def test_it_runs_again_whatever_threads_come_and_go() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def often() -> None:
        for _ in range(3000):
            with without_gc():
                sum(range(50))

    threads = [threading.Thread(target=often) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert gc.get_threshold() == USUAL


def test_a_script_that_turns_it_off_meanwhile_is_heard() -> None:
    with without_gc():
        gc.disable()
    assert not gc.isenabled()
    gc.enable()
    with without_gc():
        gc.set_threshold(1234, 5, 6)
    assert gc.get_threshold() == (1234, 5, 6)
    gc.set_threshold(0)
    with without_gc():
        pass
    assert gc.get_threshold()[0] == 0
    gc.set_threshold(*USUAL)


def test_it_runs_in_a_process_that_is_forked_meanwhile() -> None:
    with without_gc():
        child = os.fork()
        if not child:
            first = gc.get_threshold() == USUAL
            with without_gc():
                inside = gc.get_threshold()[0] == 0
            os._exit(0 if first and inside and gc.get_threshold() == USUAL else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold() == USUAL


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
