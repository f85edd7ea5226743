"""Tasks that training submits in a step begin at its end, or when it waits for one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monitor.background import BackgroundWorker, training_first
from tests.support.jobs import Job, job


def test_a_task_begins_at_the_end_of_the_context() -> None:
    worker, done = BackgroundWorker[None]("test"), threading.Event()
    with training_first():
        number = worker.submit(done.set)
        assert not done.wait(0.2)
    assert worker.wait(number, 30) and done.is_set()
    worker.stop()


def test_whoever_waits_is_not_kept_waiting() -> None:
    worker = BackgroundWorker[int]("test")
    with training_first():
        assert worker.wait(worker.submit(lambda: 1), 30)
        worker.submit(lambda: 2)
        assert worker.join(30)
    assert [one.result for one in worker.finished()] == [1, 2]
    worker.stop()


def test_order_is_kept() -> None:
    worker, seen = BackgroundWorker[None]("test"), list[int]()
    worker.submit(lambda: time.sleep(0.05))
    with training_first(), training_first():
        for number in range(5):
            worker.submit(lambda number=number: seen.append(number))  # type: ignore[misc]
    assert worker.join(30) and seen == list(range(5))
    worker.stop()


def test_what_was_submitted_is_done_before_a_stop() -> None:
    worker, done = BackgroundWorker[None]("test"), threading.Event()
    with training_first():
        worker.submit(done.set)
        worker.stop()
    assert done.wait(30)


def test_an_error_in_the_step_loses_no_task() -> None:
    worker, done = BackgroundWorker[None]("test"), threading.Event()
    try:
        with training_first():
            worker.submit(done.set)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert done.wait(30)
    worker.stop()


def test_other_threads_submit_at_once() -> None:
    worker, done = BackgroundWorker[None]("test"), threading.Event()
    with training_first():
        other = threading.Thread(target=lambda: worker.submit(done.set))
        other.start()
        assert done.wait(30)
        other.join()
    worker.stop()


@pytest.mark.parametrize("ask", [lambda one: one.step(), lambda one: one.ckpt.save()], ids=["step", "save"])
def test_a_decision_is_over_before_the_tasks_that_it_submits_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Callable[[Job], Any]
) -> None:
    worker, begun, inside = BackgroundWorker[None]("test"), threading.Event(), list[bool]()
    with job(tmp_path / "s") as one:
        one.ckpt.resume()
        one.step()
        decide = one.ckpt._decide

        def deciding(*args: Any) -> Any:
            worker.submit(begun.set)
            report = decide(*args)
            inside.append(begun.wait(0.2))
            return report

        monkeypatch.setattr(one.ckpt, "_decide", deciding)
        ask(one)
        assert inside == [False]
        assert begun.wait(30)
    worker.stop()
