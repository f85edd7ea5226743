"""Commit the snapshots of dead jobs in threads, one rescue per store at a time.

A hanging store does not block others; a store and its copies share a lock and wait for each other. The thread owns the
store while it writes (see :mod:`store.memory.rescue`). Threads never keep the process alive: an interrupted rescue is
completed by the next one.
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
from store.memory.layout import Tier
from store.memory.rescue import rescue_newest
from store.storage.local import LocalFiles

_log = logging.getLogger("driftpoint")

_CALLED = {
    FencedError: "fenced",
    StoreInUseError: "in use",
    DamagedError: "damaged",
    NoStoreError: "no store",
    SaveError: "given up",
}

OUTCOMES = ("written", "nothing", "incomplete", "fenced", "in use", "damaged", "no store", "given up", "failed")
"""``failed``: storage refused; the rescue is retried a few times."""

THREADS = 16
"""Most stores written at a time."""


@dataclass(frozen=True)
class RescueRequest:
    """A store to rescue. ``epoch``: of the dead job, None if unknown; ``tried``: earlier attempts."""

    store: Path
    store_id: str
    epoch: int | None
    tried: int = 0
    dropped: threading.Event = field(default_factory=threading.Event, compare=False)


@dataclass(frozen=True)
class RescueResult:
    """Outcome of a request."""

    wish: RescueRequest
    outcome: str
    why: str
    seconds: float


class Rescuer:
    """Runs rescues in threads. :meth:`ask` and :meth:`drop` may be called from any thread."""

    def __init__(
        self, base: Path, tell: Callable[[RescueResult], None], begun: Callable[[RescueRequest], None]
    ) -> None:
        self._base, self._tell, self._begun = base, tell, begun
        self._changed = threading.Condition()
        self._wishes: deque[RescueRequest] = deque()
        self._current: dict[str, RescueRequest] = {}
        self._threads: list[threading.Thread] = []
        self._ending = False

    @property
    def busy(self) -> bool:
        """Return whether a rescue runs or waits."""
        with self._changed:
            return bool(self._current) or bool(self._wishes)

    def ask(self, wish: RescueRequest) -> None:
        """Queue a request, after earlier ones for the same store."""
        with self._changed:
            self._wishes.append(wish)
            if len(self._current) + len(self._wishes) > len(self._threads) < THREADS:
                thread = threading.Thread(target=self._work, name="driftpoint-rescuer", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()

    def drop(self, store: Path) -> bool:
        """Cancel the requests for a store that a new job uses; return whether there were any."""
        with self._changed:
            found = [wish for wish in (*self._wishes, *self._current.values()) if wish.store == store]
            self._wishes = deque(wish for wish in self._wishes if wish.store != store)
        for wish in found:
            wish.dropped.set()
        return bool(found)

    def end(self, grace: float) -> bool:
        """Finish rescues of jobs that were seen to die and cancel all others; return whether that took less than
        ``grace`` s.
        """
        with self._changed:
            self._ending = True
            self._wishes = deque(wish for wish in self._wishes if wish.epoch is not None)
            self._changed.notify_all()
            threads = list(self._threads)
        deadline = time.monotonic() + grace
        for one in threads:
            one.join(max(0.0, deadline - time.monotonic()))
        return not any(one.is_alive() for one in threads)

    def _work(self) -> None:
        while (wish := self._next()) is not None:
            self._begun(wish)
            began = time.monotonic()
            outcome, why = self._done(wish)
            done = RescueResult(wish, outcome, why, time.monotonic() - began)
            with self._changed:
                del self._current[wish.store_id]
                self._changed.notify_all()
            self._tell(done)

    def _next(self) -> RescueRequest | None:
        """Wait for a request whose store has no rescue in progress; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ending or self._possible() is not None)
            found = self._possible()
            if found is not None:
                self._wishes.remove(found)
                self._current[found.store_id] = found
            return found

    def _possible(self) -> RescueRequest | None:
        return next((one for one in self._wishes if one.store_id not in self._current), None)

    def _done(self, wish: RescueRequest) -> tuple[str, str]:
        try:
            return self._rescued(wish)
        except DriftpointError as error:
            return next((name for kind, name in _CALLED.items() if isinstance(error, kind)), "failed"), str(error)
        except Exception as error:  # noqa: BLE001 - the thread's edge: it must serve the next job
            _log.exception("a rescue failed")
            return "failed", f"internal {type(error).__name__}: {error}"

    def _rescued(self, wish: RescueRequest) -> tuple[str, str]:
        catalog = open_catalog(LocalFiles(wish.store))
        if catalog.store_id != wish.store_id:
            raise NoStoreError(f"{wish.store} is another store now")
        done = rescue_newest(Tier(self._base, wish.store_id), catalog, aborted=wish.dropped.is_set)
        return done.outcome, done.why
