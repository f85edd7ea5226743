"""Commit the snapshots of dead jobs in threads, one rescue per store at a time.

A hanging store does not block others; a store and its copies share a lock and wait for each other. The thread owns the
store while it writes (see :mod:`store.memory.rescue`). Threads never keep the process alive: an interrupted rescue is
completed by the next one. All but the rescues themselves runs in the event loop's thread."""

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
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
_THREAD = "driftpoint-rescuer"


@dataclass(frozen=True)
class RescueRequest:
    """A store to rescue."""

    store: Path
    store_id: str
    epoch: int | None  # of the dead job, None if unknown
    tried: int = 0  # earlier attempts
    dropped: threading.Event = field(default_factory=threading.Event, compare=False)
    old: bool = False  # whether its memory is old: versions that a commit contains are removed afterwards


@dataclass(frozen=True)
class RescueResult:
    """Outcome of a request."""

    request: RescueRequest
    outcome: str
    why: str
    seconds: float


class Rescuer:
    """Runs rescues, each in its own thread. ``begun`` is called when one begins, ``tell`` when it has ended."""

    def __init__(
        self, base: Path, tell: Callable[[RescueResult], None], begun: Callable[[RescueRequest], None]
    ) -> None:
        self._base, self._tell, self._begun = base, tell, begun
        self._requests: dict[asyncio.Task[None], RescueRequest] = {}
        self._locks = defaultdict[str, asyncio.Lock](asyncio.Lock)  # by store id
        self._threads = asyncio.Semaphore(THREADS)
        self._ending = False

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def ask(self, request: RescueRequest) -> None:
        """Queue a request, after earlier ones for the same store."""
        task = asyncio.create_task(self._rescue(request))
        self._requests[task] = request
        task.add_done_callback(self._requests.pop)

    def drop(self, store: Path) -> bool:
        """Cancel the requests for a store that a new job uses; return whether there were any."""
        found = [request for request in self._requests.values() if request.store == store]
        for request in found:
            request.dropped.set()
        return bool(found)

    async def end(self, grace: float) -> bool:
        """Finish rescues of jobs seen to die and cancel all others; return whether that took under ``grace`` s."""
        self._ending, deadline = True, time.monotonic() + grace
        while self._requests and (left := deadline - time.monotonic()) > 0:
            await asyncio.wait(self._requests, timeout=left)
        return not self._requests

    async def _rescue(self, request: RescueRequest) -> None:
        async with self._locks[request.store_id], self._threads:
            if request.dropped.is_set() or (self._ending and request.epoch is None):
                return
            self._begun(request)
            began, result = time.monotonic(), Future[tuple[str, str]]()
            result.set_running_or_notify_cancel()  # a loop that ends does not wait for it
            threading.Thread(target=lambda: result.set_result(self._run(request)), name=_THREAD, daemon=True).start()
            outcome, why = await asyncio.wrap_future(result)
        self._tell(RescueResult(request, outcome, why, time.monotonic() - began))

    def _run(self, request: RescueRequest) -> tuple[str, str]:
        try:
            return self._commit(request)
        except errors.DriftpointError as error:
            return next((name for kind, name in _OUTCOME_OF.items() if isinstance(error, kind)), "failed"), str(error)
        except Exception as error:  # noqa: BLE001 - the thread's edge: it must serve the next job
            _log.exception("a rescue failed")
            return "failed", f"internal {type(error).__name__}: {error}"

    def _commit(self, request: RescueRequest) -> tuple[str, str]:
        try:
            catalog = open_catalog(LocalFiles(request.store))
        except errors.DamagedError as error:  # the store is damaged, not the snapshots: the rescue is retried
            raise errors.StorageError(str(error)) from error
        if catalog.store_id != request.store_id:
            raise errors.NoStoreError(f"{request.store} now holds another store")
        tier, in_use = Tier(self._base, request.store_id), False
        try:
            done = rescue_newest(tier, catalog, aborted=request.dropped.is_set)
        except errors.StoreInUseError:
            in_use = True  # by a job, which needs the memory
            raise
        finally:
            if request.old and not in_use:
                catalog.forget()
                clear_old_of(tier, wanted=committed(tier, catalog.files, newest_whole(catalog)))
        return done.outcome, done.why
