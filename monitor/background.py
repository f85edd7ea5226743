"""Run a rank's slow work (segments, commits, pruning) in one background thread.

Tasks run one at a time, in order. The training thread blocks only in :meth:`BackgroundWorker.wait`, ``join`` and
``stop``. The thread is a daemon, so hanging storage cannot keep the process from exiting. An exception of a task is
kept in its :class:`TaskResult`; none is swallowed.
"""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

_STOP_TIMEOUT = 2.0  # seconds that an idle thread gets to exit


@dataclass(frozen=True)
class TaskResult(Generic[T]):
    """Result or exception of the finished task ``number``."""

    number: int
    result: T | None
    error: BaseException | None


class Once(Generic[T]):
    """Calls a function once, in the first thread that needs its result."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._lock = threading.Lock()
        self._todo, self._results = [function], list[T]()

    def __call__(self) -> T:
        with self._lock:
            if self._todo:
                self._results.append(self._todo[0]())
                self._todo.clear()  # with what the function holds
            return self._results[0]

    finish = __call__


class BackgroundWorker(Generic[T]):
    """Runs tasks in a background thread."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[int, Callable[[], T]] | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[TaskResult[T]] = queue.SimpleQueue()
        self._lock = threading.Condition()
        self._open: set[int] = set()
        self._last = 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], T]) -> int:
        """Queue a task and return its number, counted from 1."""
        with self._lock:
            self._last += 1
            number = self._last
            self._open.add(number)
        self._tasks.put((number, task))
        return number

    def finished(self) -> list[TaskResult[T]]:
        """Return the tasks that finished since the last call, in order."""
        results = []
        with suppress(queue.Empty):
            while True:
                results.append(self._finished.get_nowait())
        return results

    def wait(self, number: int, timeout: float) -> bool:
        """Wait until this task is finished. Return False after ``timeout`` seconds."""
        with self._lock:
            return self._lock.wait_for(lambda: number not in self._open, max(0.0, timeout))

    def join(self, timeout: float) -> bool:
        """Wait until all tasks are finished. Return False after ``timeout`` seconds."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._open, max(0.0, timeout))

    def stop(self) -> None:
        """Stop the thread after the tasks submitted so far. If all are finished, wait for the thread to exit.

        A thread that still frees tensors at interpreter shutdown may abort the process."""
        self._tasks.put(None)
        if self.join(0.0) and threading.current_thread() is not self._thread:
            self._thread.join(_STOP_TIMEOUT)

    def _work(self) -> None:
        while (item := self._tasks.get()) is not None:
            number, task = item
            try:
                result = TaskResult(number, task(), None)
            except BaseException as error:  # noqa: BLE001 - the thread's edge: kept for the training thread
                result = TaskResult(number, None, error)
            self._finished.put(result)
            with self._lock:
                self._open.discard(number)
                self._lock.notify_all()
