"""The one background thread that does a rank's slow work: segments, commits, pruning, marks.

One job at a time, in order. The training thread submits and asks; it never waits except in
:meth:`BackgroundWorker.join`.
The thread is a daemon: a storage that hangs cannot keep the process from ending. What a job raises is kept and
handed to the training thread, nothing is swallowed.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

_LAST = 2.0
"""Seconds that an idle thread gets to end."""


@dataclass(frozen=True)
class TaskResult(Generic[T]):
    """A finished job, by its number: its result, or what it raised."""

    number: int
    result: T | None
    error: BaseException | None


class BackgroundWorker(Generic[T]):
    """Runs jobs beside training."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[int, Callable[[], T]] | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[TaskResult[T]] = queue.SimpleQueue()
        self._lock = threading.Condition()
        self._open: set[int] = set()
        self._last = 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def running(self, number: int) -> bool:
        """Whether a submitted job is not finished."""
        with self._lock:
            return number in self._open

    def submit(self, job: Callable[[], T]) -> int:
        """Run a job after those before it. Returns its number, counted from 1."""
        with self._lock:
            self._last += 1
            number = self._last
            self._open.add(number)
        self._jobs.put((number, job))
        return number

    def finished(self) -> list[TaskResult[T]]:
        """What finished since the last call, in order."""
        done = []
        while True:
            try:
                done.append(self._finished.get_nowait())
            except queue.Empty:
                return done

    def wait(self, number: int, timeout: float) -> bool:
        """Wait until this job is finished; False after ``timeout`` seconds."""
        with self._lock:
            return self._lock.wait_for(lambda: number not in self._open, max(0.0, timeout))

    def join(self, timeout: float) -> bool:
        """Wait until nothing is left to do; False after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        with self._lock:
            return self._lock.wait_for(lambda: not self._open, max(0.0, deadline - time.monotonic()))

    def stop(self) -> None:
        """End the thread after the jobs submitted so far; where they are done already, wait for its end.

        A thread that still lets go of tensors while the interpreter ends may abort the process."""
        self._jobs.put(None)
        if self.join(0.0) and threading.current_thread() is not self._thread:
            self._thread.join(_LAST)

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            number, job = item
            try:
                done = TaskResult(number, job(), None)
            except BaseException as error:  # noqa: BLE001 - the thread's edge: kept for the training thread
                done = TaskResult(number, None, error)
            self._finished.put(done)
            with self._lock:
                self._open.discard(number)
                self._lock.notify_all()
