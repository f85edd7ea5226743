"""Work spread over threads, of which the first error ends all. It does not know what the work is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

T = TypeVar("T")


class _StoppedError(Exception):
    """Something else ended the work; this is never the error to tell."""


def go_on(stop: threading.Event) -> None:
    """Leave the work, by an exception that :func:`in_parallel` keeps to itself, where it was told to stop."""
    if stop.is_set():
        raise _StoppedError


def in_parallel(work: Callable[[T, threading.Event], None], items: Sequence[T], workers: int) -> None:
    """Run ``work`` on every item; the first error ends it and is raised.

    Work that takes long asks :func:`go_on` now and then with the event that it is given, so that an error
    elsewhere, or Ctrl-C, need not wait for it. No thread is at work on return.
    """
    stop = threading.Event()

    def one(item: T) -> None:
        try:
            go_on(stop)
            work(item, stop)
        except BaseException:
            stop.set()
            raise

    futures: list[Future[None]] = []
    with ThreadPoolExecutor(workers, initializer=_one_thread_each) as pool:
        try:
            futures.extend(pool.submit(one, item) for item in items)
            wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:
            stop.set()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=stop.is_set())
    errors = [future.exception() for future in futures if not future.cancelled()]
    for error in errors:
        if error is not None and not isinstance(error, _StoppedError):
            raise error


def _one_thread_each() -> None:
    torch.set_num_threads(1)
