"""How a run stands, looked at again and again: what did not change is not read twice.

Records are read when the list of commits or marks changes, and all of them anew once a minute, so that damage to what
was read before is seen, too. Payloads are never read. Storage that does not answer keeps the thread that looks, and
nobody else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.cli.door import holder, open_store
from deploy.safety.disk import disk_of
from deploy.safety.facts import Facts, gather
from deploy.safety.memory import MemorySight
from deploy.standing import StoreStatus, standing
from deploy.top.tail import Tail
from store.catalog import Catalog
from store.epochs import newest_epoch
from store.errors import DamagedError, DriftpointError, NothingToResumeError

_ANEW = 60.0
"""Seconds after which everything is read again."""


class Watch:
    """Of the store at ``root``. memory: where shared memory is. Owned by one thread."""

    def __init__(self, root: Path, trace: Path, memory: Path) -> None:
        self._root, self._memory = root, MemorySight(memory)
        self._tail = Tail(trace)
        self._catalog: Catalog | None = None
        self._status: StoreStatus | None = None
        self._key: Hashable = None
        self._read_at = 0.0

    def look(self) -> Facts:
        """Now. NoStoreError where there is no store."""
        now, pulse = time.time(), self._tail.look()
        try:
            catalog = self._opened()
            status = self._standing(catalog)
        except (NothingToResumeError, DamagedError) as error:
            self._catalog = None
            disk = disk_of(self._root)
            return Facts(now, self._root.absolute(), None, str(error), disk=disk, trace=self._tail.path, pulse=pulse)
        return gather(catalog, self._root, self._memory.look(catalog), pulse, now, trace=self._tail.path, status=status)

    def _opened(self) -> Catalog:
        """What was read of the store before, if it still is the same one."""
        found = open_store(self._root)
        known = self._catalog
        if known is not None and known.record == found.record and time.monotonic() - self._read_at <= _ANEW:
            return known
        self._catalog, self._status, self._read_at = found, None, time.monotonic()
        return found

    def _standing(self, catalog: Catalog) -> StoreStatus:
        saves, marks = tuple(catalog.saves()), catalog.suspects()
        epoch = newest_epoch(catalog.files)
        key = (saves, frozenset(marks.saves), marks.problems, frozenset(catalog.proven()), epoch)
        if self._status is None or key != self._key:
            self._status, self._key = standing(catalog, self._root, counted=False), key
            catalog.retain(saves)
        return replace(self._status, in_use_by=holder(self._root))


@dataclass(frozen=True)
class Seen:
    """facts: None before the first look was over. trouble: why the last one did not succeed. at: monotonic seconds of
    the last one that did, and how many it ``took``."""

    facts: Facts | None = None
    trouble: str = ""
    at: float = 0.0
    took: float = 0.0


class Looker:
    """A thread that looks every ``interval`` seconds. ``seen`` and ``error`` may be read by any thread."""

    def __init__(self, watch: Watch, interval: float) -> None:
        self.seen = Seen(at=time.monotonic())
        self.error: BaseException | None = None
        self._watch, self._interval = watch, interval
        self._ended = threading.Event()
        threading.Thread(target=self._work, name="driftpoint-top", daemon=True).start()

    def end(self) -> None:
        """Look no more."""
        self._ended.set()

    def _work(self) -> None:
        try:
            while not self._ended.is_set():
                began = time.monotonic()
                try:
                    facts = self._watch.look()
                    self.seen = Seen(facts, "", time.monotonic(), time.monotonic() - began)
                except (DriftpointError, OSError) as error:
                    self.seen = replace(self.seen, trouble=str(error))
                self._ended.wait(max(self._interval, 2 * (time.monotonic() - began)))
        except BaseException as error:  # noqa: BLE001 - the thread's edge: raised again by the one that draws
            self.error = error
