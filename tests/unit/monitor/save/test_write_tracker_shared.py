"""Two threads copy tracked memory together: every write is found, whichever of them copies it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

import monitor.save.write_tracker as write_tracker_module
from monitor.background import BackgroundWorker, Once
from monitor.save.write_tracker import WriteTracker, write_tracker
from tests.support.tracked_copies import CHANGES, MIB, tracked

if write_tracker() is None:
    pytest.skip("this kernel does not track writes", allow_module_level=True)


class Shared:
    """Another thread that takes a part in a copy: it makes the calls ``mine`` while the copying thread waits."""

    def __init__(self, mine: slice) -> None:
        self.mine = mine
        self.made = 0

    def __call__(self, calls: Iterable[Once[Any]], own: Callable[[], Any]) -> Any:
        def make() -> None:
            for call in [*calls][self.mine]:
                with suppress(ArithmeticError):
                    call()
                self.made += 1

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        return own()


HALVES = [slice(0, 0), slice(0, 1), slice(0, 3), slice(0, 6)]


@pytest.fixture(name="step_by_step")
def _step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor of a MiB is a step of its own."""
    monkeypatch.setattr(write_tracker_module, "_STEP", 1)


@pytest.mark.usefixtures("step_by_step")
@pytest.mark.parametrize("mine", HALVES)
def test_another_thread_copies_a_part(tracker: WriteTracker, mine: slice) -> None:
    lives = [torch.randn(MIB + 7 * at) for at in range(6)]
    before, buffers, shared = [one.clone() for one in lives], [torch.empty_like(one) for one in lives], Shared(mine)
    copy = tracked(tracker, list(zip(lives, buffers, strict=True)))
    assert copy.finish(shared)
    assert all(map(torch.equal, buffers, before)) and shared.made == mine.stop
    for one in lives:
        one.add_(1.0)  # nothing is protected any more, nor read
    assert all(map(torch.equal, buffers, before))
    assert tracker.in_use.acquire(blocking=False)


@pytest.mark.usefixtures("step_by_step")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mine", HALVES[1:])
def test_a_write_is_found_whichever_thread_copies_it(
    tracker: WriteTracker, mine: slice, change: Callable[[torch.Tensor], None]
) -> None:
    lives = [torch.randn(MIB) for _ in range(6)]
    for live in lives:
        copy = tracked(tracker, [(one, torch.empty_like(one)) for one in lives])
        change(live)
        assert not copy.finish(Shared(mine))
        assert tracker.in_use.acquire(blocking=False)


@pytest.mark.usefixtures("step_by_step")
@pytest.mark.parametrize("error", [OSError, ArithmeticError])
def test_a_block_that_another_thread_could_not_copy_is_not_taken_for_whole(
    tracker: WriteTracker, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """The kernel's refusal gives the copy up. After anything else, the thread that needs the block copies it."""
    main, real = threading.current_thread(), tracker.copy_all

    def copy_all(*given: Any) -> None:
        if threading.current_thread() is not main:
            raise error("no")
        real(*given)

    monkeypatch.setattr(tracker, "copy_all", copy_all)
    lives = [torch.randn(MIB) for _ in range(6)]
    buffers = [torch.empty_like(one) for one in lives]
    copy, shared = tracked(tracker, list(zip(lives, buffers, strict=True))), Shared(slice(2))
    assert copy.finish(shared) is (error is ArithmeticError) and shared.made == 2
    assert error is OSError or all(map(torch.equal, buffers, lives))
    assert tracker.in_use.acquire(blocking=False)


def test_the_tracker_is_released_after_the_other_thread(tracker: WriteTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the copying thread fails. Otherwise the other thread would write into buffers of the next save."""
    writer, helper = BackgroundWorker[Any]("test-writer"), BackgroundWorker[None]("test-helper")
    began, over, real = threading.Event(), threading.Event(), tracker.copy_all

    def copy_all(*given: Any) -> None:
        if threading.current_thread().name == "test-writer":
            assert began.wait(60)
            raise KeyboardInterrupt
        began.set()
        time.sleep(0.3)
        real(*given)
        over.set()

    monkeypatch.setattr(tracker, "copy_all", copy_all)
    copy = tracked(tracker, [(torch.randn(MIB), torch.empty(MIB)) for _ in range(6)])

    def task() -> bool:
        try:
            return copy.finish(partial(writer.share, helper))
        finally:
            assert over.is_set() and tracker.in_use.acquire(blocking=False)

    assert writer.wait(writer.submit(task), 60)
    assert isinstance(writer.finished()[0].error, KeyboardInterrupt)
    writer.stop()
    helper.stop()
