"""Read the store's state between two attempts of a supervised job.

Reads records only. A missing store counts as empty. A store that is unreadable or does not answer in time yields an
unknown state with the reason; the hanging read is left in a daemon thread."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

from deploy.supervisor.restart_policy import StoreSnapshot
from store.catalog import Catalog, mark_suspect, open_catalog, withdraw_suspect
from store.errors import DamagedError, DriftpointError, NoStoreError, NothingToResumeError, StorageError, StoreError
from store.location import files_at, is_url
from store.memory.index import HeldSnapshot, belonging_to, unfinished_ranks
from store.memory.index import scan_node as look_at_memory
from store.memory.layout import SLOTS, Tier
from store.names import SaveId
from store.resolve import newest_resumable
from store.session import lock_holder, newest_epoch
from store.storage.bucket import ObjectOptions

_T = TypeVar("_T")


class StoreProbe:
    """Access of the supervisor to a store.

    ``memory``: its job's shared-memory directory, None without snapshots. ``patience``: seconds to wait for storage."""

    def __init__(
        self, root: Path, memory: Path | None = None, patience: float = 120.0, options: ObjectOptions | None = None
    ) -> None:
        self.root, self._options, self._memory, self._patience = root, options, memory, patience

    def look(self) -> StoreSnapshot:
        """Return the current state. Never raises because of the store's content."""
        try:
            return self._with_timeout(lambda: _look(self.root, self._memory, self._options))
        except (DriftpointError, OSError) as error:
            return StoreSnapshot(trouble=str(error))

    def holder(self) -> int | None:
        """Return the local process that locks the store, 0 if its id is unknown, None if unlocked."""
        try:
            return None if is_url(self.root) else self._with_timeout(lambda: lock_holder(self.root))
        except (DriftpointError, OSError):  # look() reports storage that hangs
            return None

    def mark(self, save: SaveId, why: str) -> str:
        """Mark a commit as suspect. Returns the error message, '' on success."""
        return self._changed(lambda catalog: mark_suspect(catalog.files, catalog.store_id, save, why))

    def withdraw(self, save: SaveId) -> str:
        """Remove the suspect mark. Returns the error message, '' on success."""
        return self._changed(lambda catalog: withdraw_suspect(catalog.files, save))

    def _changed(self, change: Callable[[Catalog], None]) -> str:
        try:
            self._with_timeout(lambda: change(open_catalog(files_at(self.root, self._options))))
        except (DriftpointError, OSError) as error:
            return str(error)
        return ""

    def _with_timeout(self, ask: Callable[[], _T]) -> _T:
        found: Future[_T] = Future()

        def run() -> None:
            try:
                found.set_result(ask())
            except BaseException as error:  # noqa: BLE001 - a thread's edge: raised again by who asked
                found.set_exception(error)

        threading.Thread(target=run, name="driftpoint-look", daemon=True).start()
        if not wait([found], self._patience).done:
            raise StorageError(f"the storage of {self.root} did not answer within {self._patience:g} s")
        return found.result()


def _look(root: Path, memory: Path | None, options: ObjectOptions | None) -> StoreSnapshot:
    try:
        catalog = open_catalog(files_at(root, options))
    except NoStoreError:
        return StoreSnapshot()
    commits, suspects = catalog.saves(), catalog.suspects().saves
    committed, versions = _resumes(catalog, frozenset()), _snapshots_in_memory(catalog, memory)
    least = max([*suspects, *([] if committed is None else [committed])], default=None)
    order = sorted((save for save in versions if least is None or save > least), reverse=True)
    order += [] if committed is None else [committed]
    return StoreSnapshot(
        newest=max([*commits, *versions], default=None),
        step=max((save.step for save in (*commits, *versions)), default=-1),
        resumes=order[0] if order else None,
        instead=_replacement(catalog, order, committed),
        epoch=newest_epoch(catalog.files),
    )


def _snapshots_in_memory(catalog: Catalog, memory: Path | None) -> list[SaveId]:
    """List the snapshots in memory that a job can resume: readable, and of all ranks as far as this node can tell."""
    if memory is None:
        return []
    try:
        tier = Tier(memory, catalog.store_id)
        node = belonging_to(look_at_memory(tier), catalog.files)
        finished = [save for save, held in node.versions.items() if not unfinished_ranks(tier, node, held)]
        return [save for save in finished if save != node.newest or _may_be_whole(node.versions[save])]
    except (StoreError, OSError):
        return []


def _may_be_whole(newest: Mapping[int, HeldSnapshot]) -> bool:
    """Return whether the newest snapshot here is of all ranks, or can be told from no other.

    Ranks on other nodes may have died before they finished it. They have the one before it: with two payloads, no rank
    begins a snapshot before all have finished the last one."""
    one = next(iter(newest.values()))
    return len(newest) == one.record.part.world_size or not any(one.payload.parent.glob(f"rank-*.{SLOTS[1]}.payload"))


def _resumes(catalog: Catalog, skip: frozenset[SaveId]) -> SaveId | None:
    try:
        return newest_resumable(catalog, skip=skip)[0].manifest.save
    except NothingToResumeError:
        return None


def _replacement(catalog: Catalog, order: list[SaveId], committed: SaveId | None) -> SaveId | None:
    """Return the replacement if the first of ``order`` were suspect; see :class:`StoreSnapshot`.

    Other snapshots in memory do not count: a suspect mark covers them as well."""
    suspects = catalog.suspects().saves
    if not order or order[0] in suspects or _was_continued(catalog, order[0]):
        return None
    found = committed if order[0] != committed else _resumes(catalog, frozenset({order[0]}))
    return None if found in suspects else found


def _was_continued(catalog: Catalog, resumed: SaveId) -> bool:
    for save in catalog.saves():
        try:
            if save.epoch > resumed.epoch and catalog.manifest(save).previous == resumed.name:
                return True
        except (DamagedError, StorageError):
            continue
    return False
