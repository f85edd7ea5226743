"""Allocates the shared-memory payloads of one rank, and pins them for CUDA. Training thread.

Pinned, copies from a device run beside training, as into torch's pinned buffers; otherwise the driver copies through a
buffer of its own, and waits. If pinning fails, because of a limit on locked memory for example, copies are slower but
equally correct.
"""

import logging
import mmap
from collections.abc import Callable
from functools import partial

import torch

from monitor.save.store_session import StoreSession
from store.errors import StorageError, StoreError
from store.memory.arena import Arena
from store.memory.cleanup import clear_old, without_versions
from store.memory.layout import Tier
from store.names import SaveId

_log = logging.getLogger("driftpoint")


class PinnedRanges:
    """The memory that this process has pinned."""

    def __init__(self) -> None:
        self._pinned: dict[int, torch.Tensor] = {}
        self._refused = False

    def pin(self, memory: mmap.mmap) -> None:
        """Pin a mapping, once. Its address does not change while it is pinned."""
        view = torch.frombuffer(memory, dtype=torch.uint8)
        address = view.data_ptr()
        if address in self._pinned or self._refused:
            return
        code = int(torch.cuda.cudart().cudaHostRegister(address, view.numel(), 0))  # type: ignore[no-untyped-call]
        if code:
            self._refused = True
            _log.warning("shared memory cannot be pinned (CUDA error %d): copies into it are slower", code)
            return
        self._pinned[address] = view

    def release(self) -> None:
        """Unpin everything, before the memory is unmapped. May be called twice."""
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._pinned.clear()


class SharedMemoryBuffers:
    """The payloads of one rank, ``versions`` of them. pinned: whether to pin them, because the state is on a device."""

    def __init__(self, versions: int, *, pinned: bool) -> None:
        self._versions = versions
        self._pinned = pinned
        self.pins = PinnedRanges()
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
        # On every node. Versions stay: only the node's daemon can tell whether a commit is as new, or rescue them.
        log_errors(lambda: clear_old(tier.base, wanted=without_versions))
        try:
            self.arena = Arena(tier, session.epoch, rank, self._versions, session.files)
            for slot in slots_to_reserve(self.arena, kept):
                self.at(slot, nbytes)
        except (StoreError, OSError) as error:
            return str(error)
        return None

    def at(self, slot: int, nbytes: int) -> mmap.mmap:
        """Return the memory of a payload, whose previous version is dropped. Raises StorageError."""
        if self.arena is None:
            raise StorageError("the memory tier was not begun")
        memory = self.arena.room(slot, nbytes)
        if self._pinned:
            self.pins.pin(memory)
        return memory

    def keep_only_version(self, kept: SaveId | None) -> int | None:
        """Drop all versions but the one that the job rolled back to. Return its payload."""
        arena = self.arena
        if arena is None:
            return None
        found = None if kept is None else arena.holding(kept)
        for other in (one for one in arena.slots if one != found):
            log_errors(partial(arena.drop, other))
        return found

    def take_rest(self, world_size: int) -> None:
        """Call :meth:`store.memory.arena.Arena.take_rest`, and log errors."""
        if self.arena is not None:
            log_errors(partial(self.arena.take_rest, world_size))

    def keep_only(self, slot: int) -> None:
        """Free all payloads but this one, which may hold the newest state."""
        self.pins.release()
        if self.arena is not None:
            for other in (one for one in self.slots if one != slot):
                log_errors(partial(self.arena.give_back, other))

    def close(self, *, remove: bool) -> None:
        """Close the memory, and free it if ``remove``."""
        self.pins.release()
        arena, self.arena = self.arena, None
        if arena is not None:
            log_errors(partial(arena.close, remove=remove))


def slots_to_reserve(arena: Arena, kept: SaveId | None) -> tuple[int, ...]:
    """Take over the memory of earlier incarnations, except ``kept``. Return the payloads that need memory now."""
    arena.take_over(kept)
    # The memory of an older snapshot that is kept becomes the last payload later.
    return arena.slots[: -1 if arena.spares(kept) else None]


def log_errors(action: Callable[[], object]) -> None:
    """Run ``action``, and log a StorageError or OSError instead of raising it."""
    try:
        action()
    except (StorageError, OSError) as error:
        _log.warning("memory: %s", error)
