"""Shared-memory buffers, CUDA pinning.

Pinned shared memory: copies from an accelerator into it run beside training, as into buffers torch has pinned.

Memory that the CUDA driver does not know is copied to through a buffer of the driver's own, and the copy waits. On a
machine without CUDA nothing here does anything. Where pinning is refused (a limit on locked memory, say) copies are
slower and as right.

The memory of one rank in the memory tier: taken when the job begins, found room in, given back at the end.

Knows payloads and how large they are, not what is in them, nor which of them other ranks count on. Training thread.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable

import torch

from monitor.save.store_session import StoreSession
from store.errors import StorageError, StoreError
from store.memory.arena import Arena
from store.memory.cleanup import clear_old
from store.memory.layout import Tier
from store.names import SaveId

_log = logging.getLogger("driftpoint")


class PinnedRanges:
    """What this process has pinned. Training thread."""

    def __init__(self) -> None:
        self._pinned: dict[int, torch.Tensor] = {}
        self._refused = False

    def pin(self, memory: mmap.mmap) -> None:
        """Pin all of it, once; it stays where it is as long as it is pinned."""
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
        """Unpin everything; before the memory goes. A second call changes nothing."""
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._pinned.clear()


class SharedMemoryBuffers:
    """versions: kept side by side. pinned: copies come from a device, so the memory is locked for it."""

    def __init__(self, versions: int, *, pinned: bool) -> None:
        self._versions = versions
        self._pinned = pinned
        self.pins = PinnedRanges()
        self.arena: Arena | None = None
        """None before :meth:`take`, and after the memory was given back."""

    @property
    def slots(self) -> tuple[int, ...]:
        """Payloads that there are."""
        return () if self.arena is None else self.arena.slots

    @property
    def single(self) -> bool:
        """Whether there is none while a version is being replaced."""
        return self._versions == 1

    def take(self, tier: Tier, opened: StoreSession, rank: int, nbytes: int, kept: SaveId | None) -> str | None:
        """Have payloads of ``nbytes``, those of earlier incarnations first. Why it cannot be, else None.

        kept: the version that the job stands on, which stays."""
        trying(lambda: clear_old(tier.base))  # on every node
        try:
            self.arena = Arena(tier, opened.epoch, rank, self._versions, opened.files)
            self.arena.take_over(kept)
            # With an older version to keep, the last payload is that one's, once it is not needed any more.
            for slot in self.arena.slots[: -1 if self.arena.spares(kept) else None]:
                self.at(slot, nbytes)
        except (StoreError, OSError) as error:
            return str(error)
        return None

    def at(self, slot: int, nbytes: int) -> mmap.mmap:
        """Room for a version; what was one there is none any more. StorageError."""
        if self.arena is None:
            raise StorageError("the memory tier was not begun")
        memory = self.arena.room(slot, nbytes)
        if self._pinned:
            self.pins.pin(memory)
        return memory

    def stand_on(self, kept: SaveId | None) -> int | None:
        """The job went back to this version: which payload is it? All others are versions no more."""
        arena = self.arena
        if arena is None:
            return None
        found = None if kept is None else arena.holding(kept)
        for other in (one for one in arena.slots if one != found):
            trying(lambda other=other: arena.drop(other))  # type: ignore[misc]
        return found

    def take_rest(self, world_size: int) -> None:
        """See :meth:`store.memory.arena.Arena.take_rest`; what it cannot take is said."""
        arena = self.arena
        if arena is not None:
            trying(lambda: arena.take_rest(world_size))

    def keep_only(self, slot: int) -> None:
        """No more versions; this one may still be the newest state."""
        self.pins.release()
        arena = self.arena
        for other in (one for one in self.slots if one != slot):
            trying(lambda other=other: arena.give_back(other))  # type: ignore[misc,union-attr]

    def close(self, *, remove: bool) -> None:
        """Let go of the memory; ``remove``: and give it back."""
        self.pins.release()
        arena, self.arena = self.arena, None
        if arena is not None:
            trying(lambda: arena.close(remove=remove))


def trying(action: Callable[[], object]) -> None:
    """Do what need not succeed, and say if it did not."""
    try:
        action()
    except (StorageError, OSError) as error:
        _log.warning("memory: %s", error)
