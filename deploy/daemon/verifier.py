"""Verify commits slowly in one thread, so that changed bytes are found before a resume needs them.

Newest first; each commit and each segment group once, at a bounded rate and the lowest CPU and I/O priority. Changes
nothing. Commits pruned meanwhile are not damage. Bytes in the page cache are read from there."""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import psutil

from store.catalog import Catalog, open_catalog
from store.errors import DriftpointError, StorageError
from store.names import SaveId
from store.storage.local import LocalFiles
from store.verify import GroupKey, VerifyReport, groups_of, verify

_log = logging.getLogger("driftpoint")

_POLL_SECONDS = 10.0  # seconds between checks for new commits
_MOST_MESSAGES = 100  # most damage messages kept per store


class _EndedError(Exception):
    """Stop reading because the daemon exits. Not a project error, so that no reader handles it."""


VerifyResult = Callable[[Path, SaveId | None, list[str]], None]
"""Takes a store, a commit and its problems, in the verifier's thread; without a commit, the store cannot be read.

Without a commit and without problems, there is no directory at the store's path.
"""


@dataclass
class Checked:
    """Verification state of one store. Copies of a store count separately."""

    store_id: str
    path: Path
    saves: dict[SaveId, frozenset[GroupKey]] = field(default_factory=dict)  # with the groups that were found whole
    damaged: list[SaveId] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)


class Verifier:
    """Starts its thread on construction unless ``rate`` (bytes per second) is 0."""

    def __init__(self, rate: int, told: VerifyResult, read: Callable[[int], None]) -> None:
        self._told, self._throttle = told, _Throttle(rate, read)
        self._lock = threading.Lock()
        self._stores: dict[tuple[str, Path], Checked] = {}
        self.current: str | None = None
        self._thread = threading.Thread(target=self._work, name="driftpoint-verifier", daemon=True)
        if rate:
            self._thread.start()

    def watch(self, store_id: str, path: Path) -> None:
        with self._lock:
            self._stores.setdefault((store_id, path), Checked(store_id, path))
        self._throttle.wake.set()

    def found(self) -> list[Checked]:
        """Return the states of all stores, read-only."""
        with self._lock:
            return list(self._stores.values())

    def end(self, grace: float) -> None:
        self._throttle.ended.set()
        self._throttle.wake.set()
        if self._thread.is_alive():
            self._thread.join(grace)

    def _work(self) -> None:
        # The lowest CPU and I/O priority, for this thread only.
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, 19)
        with suppress(OSError, psutil.Error, AttributeError):
            psutil.Process(thread).ionice(psutil.IOPRIO_CLASS_IDLE)
        while not self._throttle.ended.is_set():
            self._throttle.wake.clear()
            try:
                busy = [self._one(found) for found in self.found()]
            except _EndedError:
                return
            if not any(busy):
                self._throttle.wake.wait(_POLL_SECONDS)

    def _one(self, found: Checked) -> bool:
        """Verify the newest unread commit of a store; return whether there was one."""
        try:
            return self._read(found)
        except DriftpointError as error:
            self._told(found.path, None, [str(error)])
        except _EndedError:
            raise
        except Exception as error:  # noqa: BLE001 - the thread's edge: it must go on with the next store
            _log.exception("verifying %s failed", found.path)
            self._told(found.path, None, [f"internal {type(error).__name__}: {error}"])
        return False

    def _read(self, found: Checked) -> bool:
        if not found.path.is_dir():
            if found.damaged:  # a store that reappears here is verified from scratch
                found.saves, found.damaged, found.damage = {}, [], []
            self._told(found.path, None, [])
            return False
        catalog = open_catalog(_ThrottledFiles(found.path, self._throttle))
        if catalog.store_id != found.store_id:
            return False
        saves = catalog.saves()
        found.saves = {save: groups for save, groups in found.saves.items() if save in saves}
        if not set(found.damaged) <= set(saves):
            found.damaged = [one for one in found.damaged if one in saves]
            found.damage = [
                text for text in found.damage if text.startswith(tuple(f"{one}: " for one in found.damaged))
            ]
        save = next((one for one in saves if one not in found.saves), None)
        if save is None:
            return False
        self.current = f"{found.path} {save}"
        try:
            report = verify(catalog, only=[save], checked=frozenset().union(*found.saves.values()))
        finally:
            self.current = None
        found.saves[save] = frozenset()
        self._learn(catalog, found, save, report)
        return True

    def _learn(self, catalog: Catalog, found: Checked, save: SaveId, report: VerifyReport) -> None:
        if report.ok:
            with suppress(StorageError):
                found.saves[save] = frozenset(groups_of(catalog, save))
            self._told(found.path, save, [])
            return
        if save not in catalog.saves():
            return  # pruned while it was read
        problems = [*report.problems, *(text for commit in report.commits for text in commit.problems)]
        found.damaged.append(save)
        found.damage = [*found.damage, *(f"{save}: {text}" for text in dict.fromkeys(problems))][-_MOST_MESSAGES:]
        self._told(found.path, save, problems or ["it cannot be resumed as committed"])


class _Throttle:
    """Limits the read rate; ``read`` is called with each number of bytes."""

    def __init__(self, rate: int, read: Callable[[int], None]) -> None:
        self._rate, self._read = rate, read
        self._due = time.monotonic()
        self.ended, self.wake = threading.Event(), threading.Event()

    def wait_for(self, nbytes: int) -> None:
        """Wait as long as ``nbytes`` take at this rate. Raises _EndedError when the daemon exits."""
        self._read(nbytes)
        self._due = max(self._due, time.monotonic()) + nbytes / self._rate
        if self.ended.wait(max(0.0, self._due - time.monotonic())):
            raise _EndedError


class _ThrottledFiles(LocalFiles):
    """Local files read at a limited rate, without read-ahead; refuses every change."""

    def __init__(self, root: Path, throttle: _Throttle) -> None:
        super().__init__(root)
        self._throttle = throttle

    def read(self, path: str, limit: int) -> bytes:
        data = super().read(path, limit)
        self._throttle.wait_for(len(data))
        return data

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        super().read_into(path, offset, target)
        self._throttle.wait_for(target.nbytes)

    def expect(self, path: str, offset: int, nbytes: int) -> None:
        del path, offset, nbytes

    def _refuse(self, path: str, *_: str) -> NoReturn:
        raise StorageError(f"cannot change {path}: a store that is verified is only read")

    create = link = rename = unlink = make_dir = remove_dir = sync_dir = _refuse  # type: ignore[assignment]
