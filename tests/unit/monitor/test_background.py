"""The background thread: in order, one at a time, nothing swallowed, nobody kept."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from monitor.background import BackgroundWorker, Once


@pytest.fixture
def writer() -> Iterator[BackgroundWorker[str]]:
    made: BackgroundWorker[str] = BackgroundWorker("test-writer")
    yield made
    made.stop()


def test_jobs_run_in_order_beside_the_caller(writer: BackgroundWorker[str]) -> None:
    seen: list[str] = []

    def job(name: str) -> str:
        seen.append(threading.current_thread().name)
        return name

    numbers = [writer.submit(lambda name=name: job(name)) for name in ("a", "b", "c")]  # type: ignore[misc]
    assert writer.join(180)
    done = writer.finished()
    assert [(one.number, one.result, one.error) for one in done] == [
        (number, name, None) for number, name in zip(numbers, ("a", "b", "c"), strict=True)
    ]
    assert seen == ["test-writer"] * 3
    assert writer.finished() == []


def test_what_a_job_raises_is_kept_and_the_next_one_runs(writer: BackgroundWorker[str]) -> None:
    def broken() -> str:
        raise KeyboardInterrupt("even this")

    first, second = writer.submit(broken), writer.submit(lambda: "fine")
    assert writer.join(180)
    failed, fine = writer.finished()
    assert failed.number == first and isinstance(failed.error, KeyboardInterrupt)
    assert (fine.number, fine.result) == (second, "fine")


def test_join_gives_up_in_time_and_tells(writer: BackgroundWorker[str]) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        assert go_on.wait(180)
        return "late"

    number = writer.submit(slow)
    assert begun.wait(180)
    assert not writer.join(0)
    assert not writer.wait(number, 0.0)
    assert writer.finished() == []
    go_on.set()
    assert writer.join(180)
    assert writer.wait(number, 0.0)
    assert [one.result for one in writer.finished()] == ["late"]


def test_a_result_is_there_once_join_returns(writer: BackgroundWorker[str]) -> None:
    for index in range(200):
        writer.submit(lambda index=index: str(index))  # type: ignore[misc]
        assert writer.join(180)
        assert [one.result for one in writer.finished()] == [str(index)]


def test_the_thread_ends_when_it_is_stopped() -> None:
    writer: BackgroundWorker[str] = BackgroundWorker("ends")
    thread = next(one for one in threading.enumerate() if one.name == "ends")
    writer.submit(lambda: "last")
    writer.stop()
    thread.join(180)
    assert not thread.is_alive()
    assert [one.result for one in writer.finished()] == ["last"]


def test_an_idle_thread_is_gone_once_it_is_stopped() -> None:
    """One that still lets go of what its last job held, while the interpreter ends, may abort the process."""

    class Slow:
        def __del__(self) -> None:
            time.sleep(0.3)

    writer: BackgroundWorker[Slow] = BackgroundWorker("idle")
    thread = next(one for one in threading.enumerate() if one.name == "idle")
    writer.submit(Slow)
    assert writer.join(180)
    writer.finished()
    writer.stop()
    assert not thread.is_alive()


def test_it_cannot_keep_a_process_from_ending(writer: BackgroundWorker[str]) -> None:
    assert next(one for one in threading.enumerate() if one.name == "test-writer").daemon


def test_what_is_called_once_is_called_once_by_all_threads_and_then_released() -> None:
    calls: list[str] = []

    class Call:
        def __call__(self) -> int:
            calls.append(threading.current_thread().name)
            time.sleep(0.01)
            return 5

    call = Call()
    once, held, results = Once(call), weakref.ref(call), list[int]()
    del call
    threads = [threading.Thread(target=lambda: results.append(once())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [5] * 4 and len(calls) == 1 and held() is None


@pytest.fixture
def interval() -> Iterator[Callable[[float], None]]:
    """Sets the interpreter's switch interval, until the test ends."""
    usual = sys.getswitchinterval()
    yield sys.setswitchinterval
    sys.setswitchinterval(usual)


def test_a_task_takes_short_turns_and_who_waited_for_it_has_the_usual_ones(writer: BackgroundWorker[float]) -> None:
    usual = sys.getswitchinterval()
    for _ in range(100):
        assert writer.wait(writer.submit(sys.getswitchinterval), 180)
        assert sys.getswitchinterval() == usual
    assert all((one.result or 1.0) < usual / 10 for one in writer.finished())


def test_turns_are_short_until_the_last_task_is_over(writer: BackgroundWorker[Any]) -> None:
    usual, others = sys.getswitchinterval(), [BackgroundWorker[Any](f"test-{number}") for number in range(8)]
    begun, go_on = threading.Event(), threading.Event()

    def task() -> None:
        begun.set()
        assert go_on.wait(180)

    number = writer.submit(task)
    assert begun.wait(180)
    for _ in range(200):
        for worker in others:
            worker.submit(lambda: None)
    assert all(worker.join(180) for worker in others)
    assert sys.getswitchinterval() < usual / 10
    go_on.set()
    assert writer.wait(number, 180) and sys.getswitchinterval() == usual
    for worker in others:
        worker.stop()


@pytest.mark.parametrize("seconds", [0.02, 0.0001, 1e-7])
def test_turns_of_the_script_come_back(
    writer: BackgroundWorker[float], interval: Callable[[float], None], seconds: float
) -> None:
    """Below 1 µs, Python reports 0, which it does not take back."""
    interval(seconds)
    before = sys.getswitchinterval()
    assert writer.wait(writer.submit(sys.getswitchinterval), 180)
    assert sys.getswitchinterval() == before >= (writer.finished()[0].result or 0.0)


def test_turns_that_a_script_sets_during_a_task_stay(
    writer: BackgroundWorker[None], interval: Callable[[float], None]
) -> None:
    assert writer.wait(writer.submit(lambda: interval(0.0123)), 180)
    assert sys.getswitchinterval() == pytest.approx(0.0123)


def test_a_child_forked_during_a_task_takes_the_usual_turns(writer: BackgroundWorker[bool]) -> None:
    usual, begun, go_on = sys.getswitchinterval(), threading.Event(), threading.Event()

    def task() -> bool:
        begun.set()
        return go_on.wait(180)

    number = writer.submit(task)
    assert begun.wait(180)
    child = os.fork()
    if not child:
        os._exit(0 if sys.getswitchinterval() == usual else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    go_on.set()
    assert writer.wait(number, 180)


def test_a_worker_tells_whether_it_is_awaited(writer: BackgroundWorker[bool]) -> None:
    go_on = threading.Event()

    def asked() -> bool:
        assert go_on.wait(180)
        return writer.awaited

    number = writer.submit(asked)
    assert not writer.wait(number, 0.0)
    threading.Timer(0.2, go_on.set).start()
    assert writer.wait(number, 180)
    assert writer.finished()[0].result is True and not writer.awaited
    number = writer.submit(asked)
    while not writer.wait(number, 0.0):
        time.sleep(0.01)
    assert writer.finished()[0].result is False


@pytest.fixture
def helper() -> Iterator[BackgroundWorker[None]]:
    made: BackgroundWorker[None] = BackgroundWorker("test-helper")
    yield made
    made.stop()


class Names:
    """Calls that note which thread made each of them."""

    def __init__(self, count: int) -> None:
        self.of: dict[int, str] = {}
        self.calls = [Once(partial(self.note, at)) for at in range(count)]

    def note(self, at: int) -> int:
        self.of[at] = threading.current_thread().name
        time.sleep(0.001)
        return at


def test_calls_are_shared_while_a_thread_waits(writer: BackgroundWorker[Any], helper: BackgroundWorker[None]) -> None:
    names = Names(40)

    def own() -> list[int]:
        until = time.monotonic() + 60
        while not names.of:
            assert time.monotonic() < until
            time.sleep(0.001)
        return [call() for call in names.calls]

    assert writer.wait(writer.submit(lambda: writer.share(helper, names.calls, own)), 180)
    assert writer.finished()[0].result == list(range(40))
    assert set(names.of.values()) == {"test-writer", "test-helper"}
    assert names.of[0] == "test-writer" and names.of[39] == "test-helper"


def test_no_call_is_shared_while_no_thread_waits(
    writer: BackgroundWorker[Any], helper: BackgroundWorker[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether one does is asked often at first, then ten times a second, until the end."""
    names, real, pauses, events = Names(10), threading.Event.wait, list[float | None](), set[threading.Event]()

    def wait(event: threading.Event, timeout: float | None = None) -> bool:
        if threading.current_thread().name == "test-helper":
            pauses.append(timeout)
            events.add(event)
        return real(event, timeout)

    def own() -> None:
        until = time.monotonic() + 60
        while len(pauses) < 10:
            assert time.monotonic() < until
            time.sleep(0.01)
        for call in names.calls:
            call()

    monkeypatch.setattr(threading.Event, "wait", wait)
    number = writer.submit(lambda: writer.share(helper, names.calls, own))
    while not writer.wait(number, 0.0):
        time.sleep(0.01)
    assert writer.finished()[0].error is None
    assert set(names.of.values()) == {"test-writer"}
    assert helper.join(60) and all(event.is_set() for event in events)
    assert pauses[:8] == [0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.1] and set(pauses[8:]) == {0.1}


def test_calls_are_shared_no_more_once_the_wait_is_over(
    writer: BackgroundWorker[Any], helper: BackgroundWorker[None]
) -> None:
    names, go_on = Names(10_000), threading.Event()
    number = writer.submit(lambda: writer.share(helper, names.calls, lambda: go_on.wait(180)))
    while not names.of:
        assert not writer.wait(number, 0.01)
    time.sleep(0.1)  # for the call that was under way
    made = len(names.of)
    time.sleep(0.3)
    assert len(names.of) == made < 10_000
    assert not writer.wait(number, 0.3)
    assert len(names.of) > made
    go_on.set()
    assert writer.wait(number, 180)


@pytest.mark.parametrize("fails", [True, False])
def test_no_shared_call_is_under_way_afterwards(
    writer: BackgroundWorker[Any], helper: BackgroundWorker[None], fails: bool
) -> None:
    began, under_way = threading.Event(), threading.Event()

    def slow() -> None:
        under_way.set()
        began.set()
        time.sleep(0.3)
        under_way.clear()

    def own() -> None:
        assert began.wait(60)
        if fails:
            raise OSError("no")

    names = Names(3)
    assert writer.wait(writer.submit(lambda: writer.share(helper, [*names.calls, Once(slow)], own)), 180)
    assert began.is_set() and not under_way.is_set()
    time.sleep(0.1)
    assert not names.of
    assert isinstance(writer.finished()[0].error, OSError if fails else type(None))


def test_no_call_is_shared_where_handing_over_fails(
    writer: BackgroundWorker[Any], helper: BackgroundWorker[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the end of the interpreter, where threads are told to exit."""
    names, submit = Names(5), helper.submit

    def exits(task: Any) -> int:
        submit(task)
        raise SystemExit

    monkeypatch.setattr(helper, "submit", exits)

    def task() -> None:
        try:
            writer.share(helper, names.calls, lambda: None)
        finally:
            made = dict(names.of)
            time.sleep(0.3)
            assert names.of == made

    number = writer.submit(task)
    assert writer.wait(number, 180)
    assert isinstance(writer.finished()[0].error, SystemExit)


def test_what_a_shared_call_raises_is_raised_by_the_thread_that_needs_it(
    writer: BackgroundWorker[Any], helper: BackgroundWorker[None]
) -> None:
    tried: list[str] = []

    def bad() -> None:
        tried.append(threading.current_thread().name)
        raise ValueError("no")

    once = Once(bad)

    def own() -> None:
        until = time.monotonic() + 60
        while not tried:
            assert time.monotonic() < until
            time.sleep(0.001)
        once()

    assert writer.wait(writer.submit(lambda: writer.share(helper, [once], own)), 180)
    assert isinstance(writer.finished()[0].error, ValueError)
    assert tried == ["test-helper", "test-writer"]
    assert helper.join(60) and helper.finished()[0].error is None


def test_the_result_of_the_last_call_counts() -> None:
    """An exception may come after a call and before its result is kept for good."""

    class Interrupted(list[Any]):
        def append(self, result: Any) -> None:
            super().append(result)
            if len(self) == 1:
                raise SystemExit

    results = iter([True, False])
    once = Once(lambda: next(results))
    once._results = Interrupted()
    with pytest.raises(SystemExit):
        once()
    assert once() is False and once() is False


def test_a_helper_that_never_runs_keeps_nobody(writer: BackgroundWorker[Any], helper: BackgroundWorker[None]) -> None:
    """It hangs in another task, say."""
    names, go_on = Names(5), threading.Event()

    def hang() -> None:
        assert go_on.wait(180)

    def own() -> list[int]:
        return [call() for call in names.calls]

    helper.submit(hang)
    assert writer.wait(writer.submit(lambda: writer.share(helper, names.calls, own)), 180)
    assert writer.finished()[0].result == list(range(5)) and set(names.of.values()) == {"test-writer"}
    go_on.set()
    assert helper.join(60)
    assert set(names.of.values()) == {"test-writer"}
