"""Commit the snapshots of dead jobs in threads, one rescue per store at a time.

A hanging store does not block others; a store and its copies share a lock and wait for each other. The thread owns the
store while it writes (see :mod:`store.memory.rescue`). Threads never keep the process alive: an interrupted rescue is
completed by the next one."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from store import errors
from store.catalog import open_catalog
from store.memory.cleanup import clear_old_of, committed
from store.memory.layout import Tier
from store.memory.rescue import newest_whole, rescue_newest
from store.storage.local import LocalFiles

_log = logging.getLogger("driftpoint")

_OUTCOME_OF = {
    errors.FencedError: "fenced",
    errors.StoreInUseError: "in use",
    errors.DamagedError: "damaged",
    errors.NoStoreError: "no store",
    errors.SaveError: "given up",
}

OUTCOMES = ("written", "nothing", "incomplete", "fenced", "in use", "damaged", "no store", "given up", "failed")
"""``failed``: storage refused, or the store is damaged; the rescue is retried a few times."""

THREADS = 16  # most stores written at a time


@dataclass(frozen=True)
class RescueRequest:
    """A store to rescue."""

    store: Path
    store_id: str
    epoch: int | None  # of the dead job, None if unknown
    tried: int = 0  # earlier attempts
    dropped: threading.Event = field(default_factory=threading.Event, compare=False)
    old: bool = False  # whether its memory is old, so that what a commit has is removed afterwards


@dataclass(frozen=True)
class RescueResult:
    """Outcome of a request."""

    request: RescueRequest
    outcome: str
    why: str
    seconds: float


class Rescuer:
    """Runs rescues in threads. :meth:`ask` and :meth:`drop` may be called from any thread."""

    def __init__(
        self, base: Path, tell: Callable[[RescueResult], None], begun: Callable[[RescueRequest], None]
    ) -> None:
        self._base, self._tell, self._on_rescue_started = base, tell, begun
        self._changed = threading.Condition()
        self._requests: deque[RescueRequest] = deque()
        self._current: dict[str, RescueRequest] = {}
        self._threads: list[threading.Thread] = []
        self._ending = False

    @property
    def busy(self) -> bool:
        """Return whether a rescue runs or waits."""
        with self._changed:
            return bool(self._current) or bool(self._requests)

    def ask(self, request: RescueRequest) -> None:
        """Queue a request, after earlier ones for the same store."""
        with self._changed:
            self._requests.append(request)
            if len(self._current) + len(self._requests) > len(self._threads) < THREADS:
                thread = threading.Thread(target=self._work, name="driftpoint-rescuer", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()

    def drop(self, store: Path) -> bool:
        """Cancel the requests for a store that a new job uses; return whether there were any."""
        with self._changed:
            found = [request for request in (*self._requests, *self._current.values()) if request.store == store]
            self._requests = deque(request for request in self._requests if request.store != store)
        for request in found:
            request.dropped.set()
        return bool(found)

    def end(self, grace: float) -> bool:
        """Finish rescues of jobs that were seen to die and cancel all others; return whether that took less than
        ``grace`` s."""
        with self._changed:
            self._ending = True
            self._requests = deque(request for request in self._requests if request.epoch is not None)
            self._changed.notify_all()
            threads = list(self._threads)
        deadline = time.monotonic() + grace
        for one in threads:
            one.join(max(0.0, deadline - time.monotonic()))
        return not any(one.is_alive() for one in threads)

    def _work(self) -> None:
        while (request := self._next()) is not None:
            self._on_rescue_started(request)
            began = time.monotonic()
            outcome, why = self._done(request)
            done = RescueResult(request, outcome, why, time.monotonic() - began)
            with self._changed:
                del self._current[request.store_id]
                self._changed.notify_all()
            self._tell(done)

    def _next(self) -> RescueRequest | None:
        """Wait for a request whose store has no rescue in progress; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ending or self._next_possible() is not None)
            found = self._next_possible()
            if found is not None:
                self._requests.remove(found)
                self._current[found.store_id] = found
            return found

    def _next_possible(self) -> RescueRequest | None:
        return next((one for one in self._requests if one.store_id not in self._current), None)

    def _done(self, request: RescueRequest) -> tuple[str, str]:
        try:
            return self._rescued(request)
        except errors.DriftpointError as error:
            return next((name for kind, name in _OUTCOME_OF.items() if isinstance(error, kind)), "failed"), str(error)
        except Exception as error:  # noqa: BLE001 - the thread's edge: it must serve the next job
            _log.exception("a rescue failed")
            return "failed", f"internal {type(error).__name__}: {error}"

    def _rescued(self, request: RescueRequest) -> tuple[str, str]:
        try:
            catalog = open_catalog(LocalFiles(request.store))
        except errors.DamagedError as error:  # of the store: it says nothing of the memory
            raise errors.StorageError(str(error)) from error
        if catalog.store_id != request.store_id:
            raise errors.NoStoreError(f"{request.store} now holds another store")
        tier, begins = Tier(self._base, request.store_id), False
        try:
            done = rescue_newest(tier, catalog, aborted=request.dropped.is_set)
        except errors.StoreInUseError:
            begins = True  # a job that needs the memory
            raise
        finally:
            if request.old and not begins:
                catalog.forget()
                clear_old_of(tier, wanted=committed(tier, catalog.files, newest_whole(catalog)))
        return done.outcome, done.why
