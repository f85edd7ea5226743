"""Allocate the shared-memory payloads of one rank, and pin them for CUDA. Training thread."""

import logging
import mmap
from collections.abc import Callable
from functools import partial

import torch

from monitor.save.device_memory import pin, unpin
from monitor.save.store_session import StoreSession
from store.errors import StorageError, StoreError
from store.memory.arena import Arena
from store.memory.cleanup import clear_old, without_versions
from store.memory.layout import Tier
from store.names import SaveId

_log = logging.getLogger("driftpoint")
_abandoned: list[torch.Tensor] = []  # stays pinned and mapped until the process ends


class SharedMemoryBuffers:
    """The payloads of one rank, ``versions`` of them."""

    def __init__(self, versions: int) -> None:
        self._versions = versions
        self.pinned = False  # whether to pin them, because the state is on a device
        self._pins: dict[int, torch.Tensor] = {}  # by slot; mapped for as long as they are here
        self._refused = False  # whether the system refused to pin one
        self.arena: Arena | None = None  # None before :meth:`take` and after :meth:`close`

    @property
    def slots(self) -> tuple[int, ...]:
        return () if self.arena is None else self.arena.slots

    @property
    def single(self) -> bool:
        """Whether there is one payload only, so none while it is being overwritten."""
        return self._versions == 1

    def take(self, tier: Tier, session: StoreSession, rank: int, nbytes: int, kept: SaveId | None) -> str | None:
        """Reserve payloads of ``nbytes``, reusing those of earlier incarnations. Return the problem, or None.

        kept: snapshot that the job resumed; it stays."""
        # Remove memory without versions only: the node's daemon decides on those with versions, and rescues them.
        log_errors(lambda: clear_old(tier.base, wanted=without_versions))
        try:
            self.arena = Arena(tier, session.epoch, rank, self._versions, session.files)
            for slot in self.arena.take_over(kept):
                self.at(slot, nbytes)
        except (StoreError, OSError) as error:
            return str(error)
        return None

    def at(self, slot: int, nbytes: int) -> mmap.mmap:
        """Return the memory of a payload, whose previous version is dropped. Raises StorageError."""
        if self.arena is None:
            raise StorageError("the memory tier was not begun")
        memory = self.arena.room(slot, nbytes)
        if self.pinned:
            self._pin(slot, torch.frombuffer(memory, dtype=torch.uint8))
        return memory

    def _pin(self, slot: int, view: torch.Tensor) -> None:
        """Pin a payload, unless it is pinned; unpin the smaller one that it replaces."""
        old = self._pins.get(slot)
        if self._refused or (old is not None and old.data_ptr() == view.data_ptr()):
            return
        if old is not None:
            unpin(self._pins.pop(slot).data_ptr())
        self._refused = not pin(view.data_ptr(), view.numel())
        if not self._refused:
            self._pins[slot] = view

    def _unpin(self) -> None:
        for view in self._pins.values():
            unpin(view.data_ptr())
        self._pins.clear()

    def keep_only_version(self, kept: SaveId | None) -> int | None:
        """Drop all versions but the one that the job rolled back to. Return its payload."""
        arena = self.arena
        if arena is None:
            return None
        kept_slot = None if kept is None else arena.holding(kept)
        for other in (one for one in arena.slots if one != kept_slot):
            log_errors(partial(arena.drop, other))
        return kept_slot

    def take_rest(self, world_size: int) -> None:
        if self.arena is not None:
            log_errors(partial(self.arena.take_rest, world_size))

    def keep_only(self, slot: int) -> None:
        """Free all payloads but this one, which may hold the newest state."""
        self._unpin()
        if self.arena is not None:
            for other in (one for one in self.slots if one != slot):
                log_errors(partial(self.arena.give_back, other))

    def close(self, *, remove: bool, copying: bool = False) -> None:
        """Close the memory, and free it if ``remove``. copying: whether copies into it may be under way."""
        if copying:
            _abandoned.extend(self._pins.values())
            self._pins.clear()
        self._unpin()
        arena, self.arena = self.arena, None
        if arena is not None:
            log_errors(partial(arena.close, remove=remove, unmap=not copying))


def log_errors(action: Callable[[], object]) -> None:
    """Run ``action``, and log a StorageError or OSError instead of raising it."""
    try:
        action()
    except (StorageError, OSError) as error:
        _log.warning("memory: %s", error)
