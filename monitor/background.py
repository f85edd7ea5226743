"""Run a rank's slow work (segments, commits, pruning) in one background thread.

Tasks run one at a time, in order. The training thread blocks only in :meth:`BackgroundWorker.wait`, ``join`` and
``stop``. The thread is a daemon, so hanging storage cannot keep the process from exiting. An exception of a task is
kept in its :class:`TaskResult`; none is swallowed. At interpreter exit, tasks that still run are given up."""

import atexit
import ctypes
import logging
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Generic, TypeVar

from store.schema import short_turns

T = TypeVar("T")

_log = logging.getLogger("driftpoint")
_STOP_TIMEOUT = 30.0  # seconds that an idle thread gets to exit, at its niceness on a busy machine
_EXIT_TIMEOUT = 2.0  # seconds that all threads together get at interpreter exit
_LOCKING = {"logging", "threading", "queue", "concurrent", "importlib", "_frozen_importlib"}  # modules that take locks

_NICENESS = 10
"""Niceness of background threads. If training keeps all cores busy, they get about a tenth of a core, so a save slows
training no more than one that another process writes."""


@dataclass(frozen=True)
class TaskResult(Generic[T]):
    """Result or exception of the finished task ``number``."""

    number: int
    result: T | None
    error: BaseException | None


class _Held(threading.local):
    """Tasks that a thread submitted inside :func:`training_first` and that are not queued yet; None outside of it."""

    items: list[Callable[[], None]] | None = None

    def hand_over(self) -> None:
        items, self.items = self.items, None if self.items is None else []
        for item in items or ():
            item()


_held = _Held()


@contextmanager
def training_first() -> Iterator[None]:
    """Queue the tasks that this thread submits only when the context ends, or when it waits for a task.

    Threads take turns at the GIL, so training would otherwise wait for tasks that it has just submitted."""
    if _held.items is not None:
        yield
        return
    _held.items = []
    try:
        yield
    finally:
        try:
            _held.hand_over()
        finally:
            _held.items = None


class Once(Generic[T]):
    """Calls a function once, in the first thread that needs its result."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._lock = threading.Lock()
        self._todo, self._results = [function], list[T]()

    def __call__(self) -> T:
        with self._lock:
            if self._todo:
                self._results.append(self._todo[0]())
                self._todo.clear()  # frees what the function refers to
            return self._results[-1]  # of the last call, if an exception came after one

    finish = __call__


Beside = Callable[[Iterable[Once[Any]], Callable[[], Any]], Any]  # :meth:`BackgroundWorker.share` with a helper


def alone(_: Iterable[Once[Any]], own: Callable[[], T]) -> T:
    """Share no call with another thread."""
    return own()


class BackgroundWorker(Generic[T]):
    """Runs tasks in a background thread."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[int, Callable[[], T]] | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[TaskResult[T]] = queue.SimpleQueue()
        self._lock = threading.Condition()
        self._open: set[int] = set()
        self._last = 0
        self.awaited = False  # whether a thread waits for a task now
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        _workers().add(self)

    def submit(self, task: Callable[[], T]) -> int:
        """Queue a task and return its number, counted from 1."""
        with self._lock:
            self._last += 1
            number = self._last
            self._open.add(number)
        put = partial(self._tasks.put, (number, task))
        if _held.items is None:
            put()
        else:
            _held.items.append(put)
        return number

    def finished(self) -> list[TaskResult[T]]:
        """Return the tasks that finished since the last call, in order."""
        return [self._finished.get_nowait() for _ in range(self._finished.qsize())]  # only the caller takes any

    def wait(self, number: int, timeout: float) -> bool:
        """Wait until this task is finished. Return False after ``timeout`` seconds."""
        return self._wait_for(lambda: number not in self._open, timeout)

    def join(self, timeout: float) -> bool:
        """Wait until all tasks are finished. Return False after ``timeout`` seconds."""
        return self._wait_for(lambda: not self._open, timeout)

    def _wait_for(self, over: Callable[[], bool], timeout: float) -> bool:
        self.awaited = timeout > 0.0
        try:
            _held.hand_over()
            with self._lock:
                return self._lock.wait_for(over, max(0.0, timeout))
        finally:
            self.awaited = False

    def share(self, helper: "BackgroundWorker[None]", calls: Iterable[Once[Any]], own: Callable[[], Any]) -> Any:
        """Return ``own()``. While a thread waits for this worker, ``helper`` makes calls beside it, the last one first.

        At other times training needs the core. No call is under way afterwards."""
        left, lock, over = [*calls], threading.Lock(), threading.Event()

        def work() -> None:
            pause = 0.001
            while left:
                if self.awaited:
                    with lock, suppress(Exception):  # the thread that needs the result calls again and raises
                        left.pop()()
                elif not over.wait(pause):
                    pause = min(2.0 * pause, 0.1)

        try:
            helper.submit(work)
            return own()
        finally:
            left.clear()
            over.set()
            with lock:  # the call that is under way
                pass

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is the worker's own."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """Stop the thread after the tasks submitted so far. If all are finished, wait for the thread to exit."""
        _held.hand_over()
        self._tasks.put(None)
        if self.join(0.0) and not self.is_current:
            self._thread.join(_STOP_TIMEOUT)

    def _work(self) -> None:
        with suppress(OSError):  # a sandbox may refuse it
            os.nice(_NICENESS if sys.platform == "linux" else 0)  # elsewhere it would apply to the whole process
        while (item := self._tasks.get()) is not None:
            number, task = item
            try:
                short_turns.begin()
                result = TaskResult(number, task(), None)
            except BaseException as error:  # noqa: BLE001 - the thread's edge: kept for the training thread
                result = TaskResult(number, None, error)
            finally:
                short_turns.end()
            self._finished.put(result)
            del item, task, result  # frees what they refer to
            with self._lock:
                self._open.discard(number)
                self._lock.notify_all()

    def _drop(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._tasks.get_nowait()
        self._tasks.put(None)

    def _give_up(self) -> bool:
        """Raise SystemExit in the running task, at its next line of Python. Return False if it may be taking a lock.

        The exception could then arrive before the block that releases the lock, which would stay locked."""
        ident = self._thread.ident or 0
        frame = sys._current_frames().get(ident)
        if frame is None or str(frame.f_globals.get("__name__")).partition(".")[0] in _LOCKING:
            return False
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit))
        return True


def run_in_background(name: str, task: Callable[[], None]) -> None:
    """Run ``task`` in a background thread of its own, and log its error."""

    def run() -> None:
        try:
            task()
        except Exception:  # noqa: BLE001 - the thread's edge
            _log.exception("%s failed", name)

    worker = BackgroundWorker[None](name)
    worker.submit(run)
    worker.stop()


@cache
def _workers() -> "weakref.WeakSet[BackgroundWorker[Any]]":
    """Return the workers of this process. The first call registers an exit handler that ends their threads.

    A daemon thread that returns to Python during finalization is killed, which aborts the process if C++ code of torch
    is on its stack. Exit handlers run in reverse order: those of checkpointers are registered later, so run earlier."""
    workers: weakref.WeakSet[BackgroundWorker[Any]] = weakref.WeakSet()

    def give_up() -> None:
        deadline, alive = time.monotonic() + _EXIT_TIMEOUT, [worker for worker in workers if worker._thread.is_alive()]
        for worker in alive:
            worker._drop()
        left = alive
        while (left := [one for one in left if one._thread.is_alive() and not one._give_up()]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.01)
        for worker in alive:
            worker._thread.join(max(0.0, deadline - time.monotonic()))

    atexit.register(give_up)
    return workers
