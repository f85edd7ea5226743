"""Threads that write out of memory what dead jobs left: one for each store, so that one that hangs holds up no other.

A store and its copies have one thread: they share a lock. It owns the store while it writes, as far as anybody does
(see :mod:`store.memory.rescue`). What becomes of each rescue is told to ``tell``, in that thread. Nothing here keeps
the process from ending: a rescue that is cut off is completed by the next one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from store.catalog import open_catalog
from store.errors import (
    DamagedError,
    DriftpointError,
    FencedError,
    NoStoreError,
    SaveError,
    StoreInUseError,
)
from store.files import LocalFiles
from store.memory.rescue import rescue_newest
from store.memory.tier import Tier

_log = logging.getLogger("driftpoint")

_CALLED = {
    FencedError: "fenced",
    StoreInUseError: "in use",
    DamagedError: "damaged",
    NoStoreError: "no store",
    SaveError: "given up",
}

OUTCOMES = ("written", "nothing", "incomplete", "fenced", "in use", "damaged", "no store", "given up", "failed")
"""``failed``: storage refused; it is tried again a few times."""

THREADS = 16
"""Stores that are written to at a time."""


@dataclass(frozen=True)
class Wish:
    """A store to be looked at. epoch: of the job that died, None where that is not known. tried: times before."""

    store: Path
    store_id: str
    epoch: int | None
    tried: int = 0
    dropped: threading.Event = field(default_factory=threading.Event, compare=False)


@dataclass(frozen=True)
class Done:
    """What became of a wish."""

    wish: Wish
    outcome: str
    why: str
    seconds: float


class Rescuer:
    """:meth:`ask` and :meth:`drop` from any thread."""

    def __init__(self, base: Path, tell: Callable[[Done], None], begun: Callable[[Wish], None]) -> None:
        self._base, self._tell, self._begun = base, tell, begun
        self._lock = threading.Lock()
        self._wishes: deque[Wish] = deque()
        self._current: dict[str, Wish] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._ending = False

    @property
    def busy(self) -> bool:
        """Whether a rescue is under way or waits."""
        with self._lock:
            return bool(self._current) or bool(self._wishes)

    def ask(self, wish: Wish) -> None:
        """Do this after what was asked before for the same store."""
        with self._lock:
            self._wishes.append(wish)
            self._begin()

    def drop(self, store: Path) -> bool:
        """A new job has the store: what is asked for it is not needed any more. Whether there was anything."""
        with self._lock:
            found = [wish for wish in (*self._wishes, *self._current.values()) if wish.store == store]
            self._wishes = deque(wish for wish in self._wishes if wish.store != store)
        for wish in found:
            wish.dropped.set()
        return bool(found)

    def end(self, grace: float) -> bool:
        """Begin nothing more, and wait for what is under way. False where it is not finished after so many seconds."""
        with self._lock:
            self._ending = True
            threads = list(self._threads.values())
        deadline = time.monotonic() + grace
        for one in threads:
            one.join(max(0.0, deadline - time.monotonic()))
        return not any(one.is_alive() for one in threads)

    def _begin(self) -> None:
        """A thread for each store that has none, as long as there are not too many. Under the lock."""
        for store_id in dict.fromkeys(wish.store_id for wish in self._wishes):
            if self._ending or len(self._threads) >= THREADS:
                return
            if store_id not in self._threads:
                name = f"driftpoint-rescuer-{store_id[:8]}"
                self._threads[store_id] = threading.Thread(target=self._work, args=(store_id,), name=name, daemon=True)
                self._threads[store_id].start()

    def _work(self, store_id: str) -> None:
        while (wish := self._next(store_id)) is not None:
            self._begun(wish)
            began = time.monotonic()
            outcome, why = self._done(wish)
            done = Done(wish, outcome, why, time.monotonic() - began)
            with self._lock:
                del self._current[store_id]
            self._tell(done)

    def _next(self, store_id: str) -> Wish | None:
        """What is to be done next for the store. Without anything its thread ends, and makes room for another's."""
        with self._lock:
            found = None if self._ending else next((one for one in self._wishes if one.store_id == store_id), None)
            if found is None:
                del self._threads[store_id]
                self._begin()
                return None
            self._wishes.remove(found)
            self._current[store_id] = found
            return found

    def _done(self, wish: Wish) -> tuple[str, str]:
        try:
            return self._rescued(wish)
        except DriftpointError as error:
            return next((name for kind, name in _CALLED.items() if isinstance(error, kind)), "failed"), str(error)
        except Exception as error:  # noqa: BLE001 - the thread's edge: it must serve the next job
            _log.exception("a rescue failed")
            return "failed", f"internal {type(error).__name__}: {error}"

    def _rescued(self, wish: Wish) -> tuple[str, str]:
        catalog = open_catalog(LocalFiles(wish.store))
        if catalog.store_id != wish.store_id:
            raise NoStoreError(f"{wish.store} is another store now")
        done = rescue_newest(Tier(self._base, wish.store_id), catalog, aborted=wish.dropped.is_set)
        return done.outcome, done.why
