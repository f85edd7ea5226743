"""Pause Python's cyclic garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gc() -> Iterator[None]:
    """Pause the collector while records of all tensors are made. Not while storage is waited for.

    It runs once some hundred objects were made, in whichever thread. For a save of many tensors it would go through all
    objects of the process again and again, and training waits for the interpreter meanwhile."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
