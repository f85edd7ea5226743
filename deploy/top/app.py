"""The live loop of ``driftpoint top``: a thread polls the store, the main thread draws.

Storage that does not answer holds up only the polling thread."""

import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from deploy.health.facts import Facts, MemoryFacts, disk_of, gather
from deploy.health.trace_reader import Tail
from deploy.store_status import StoreStatus, lock_owner, open_store, store_status
from deploy.top.view import Dashboard, Freshness
from store.catalog import Catalog
from store.errors import DamagedError, DriftpointError, NothingToResumeError
from store.session import newest_epoch

_REREAD_AFTER = 60.0  # seconds after which everything is read again
_TICK = 0.2  # seconds between two checks for something new to draw


class FactsReader:
    """Reads the facts about a store again and again, and only the changes. Owned by one thread.

    Records are read when the list of commits or marks changes, and all of them once a minute, so that later damage is
    seen too. Payloads are never read."""

    def __init__(self, root: Path, trace: Path, memory: Path) -> None:
        self._root, self._memory = root, MemoryFacts(memory)
        self._tail = Tail(trace)
        self._catalog: Catalog | None = None
        self._status: StoreStatus | None = None
        self._key: Hashable = None
        self._read_at = 0.0

    def read(self) -> Facts:
        """Return the facts as of now. Raises NoStoreError if there is no store."""
        now, job_status = time.time(), self._tail.look()
        try:
            catalog = self._open()
            status = self._read_status(catalog)
        except (NothingToResumeError, DamagedError) as error:
            self._catalog = None
            disk = disk_of(self._root)
            return Facts(
                now, self._root.absolute(), None, str(error), disk=disk, trace=self._tail.path, job_status=job_status
            )
        return gather(
            catalog, self._root, self._memory.look(catalog), job_status, now, trace=self._tail.path, status=status
        )

    def _open(self) -> Catalog:
        """Return the catalog, with what was read before if it is still the same store."""
        found, known = open_store(self._root), self._catalog
        if known is not None and known.record == found.record and time.monotonic() - self._read_at <= _REREAD_AFTER:
            return known
        self._catalog, self._status, self._read_at = found, None, time.monotonic()
        return found

    def _read_status(self, catalog: Catalog) -> StoreStatus:
        saves, marks = tuple(catalog.saves()), catalog.suspects()
        epoch = newest_epoch(catalog.files)
        key = (saves, frozenset(marks.saves), marks.problems, frozenset(catalog.proven()), epoch)
        if self._status is None or key != self._key:
            self._status, self._key = store_status(catalog, self._root, counted=False), key
            catalog.retain(saves)
        return replace(self._status, in_use_by=lock_owner(self._root))


@dataclass(frozen=True)
class Poll:
    """Result of polling: the newest facts, the last error, the monotonic time of the last success, and its duration."""

    facts: Facts | None = None
    trouble: str = ""
    at: float = 0.0
    took: float = 0.0


class FactsPoller:
    """Polls every ``interval`` seconds in a thread. Any thread may read ``latest`` and ``error``."""

    def __init__(self, reader: FactsReader, interval: float) -> None:
        self.latest = Poll(at=time.monotonic())
        self.error: BaseException | None = None
        self._reader, self._interval = reader, interval
        self._stopped = threading.Event()
        threading.Thread(target=self._work, name="driftpoint-top", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _work(self) -> None:
        try:
            while not self._stopped.is_set():
                began = time.monotonic()
                try:
                    facts = self._reader.read()
                    self.latest = Poll(facts, "", time.monotonic(), time.monotonic() - began)
                except (DriftpointError, OSError) as error:
                    self.latest = replace(self.latest, trouble=str(error))
                self._stopped.wait(max(self._interval, 2 * (time.monotonic() - began)))
        except BaseException as error:  # noqa: BLE001 - the thread's edge: raised again by the main thread
            self.error = error


def run(console: Console, reader: FactsReader, interval: float) -> Facts | None:
    """Draw until Ctrl-C. Return the newest facts, or None if there are none. Raises what the polling thread raised."""
    poller = FactsPoller(reader, interval)
    drawn = None
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while poller.error is None:
                poll = poller.latest
                freshness = Freshness(poll.trouble, time.monotonic() - poll.at, max(15.0, 3 * interval, 5 * poll.took))
                state = (poll, console.size, freshness.stale and int(freshness.age))
                if state != drawn:
                    drawn, waiting = state, Text(poll.trouble or "Reading the store …")
                    live.update(waiting if poll.facts is None else Dashboard(poll.facts, freshness), refresh=True)
                time.sleep(_TICK)
            raise poller.error
    except KeyboardInterrupt:
        return poller.latest.facts
    finally:
        poller.stop()
