"""What this rank keeps for others: their versions, each in an arena of its own beside this rank's own.

A replica is written into the payload that its owner does not count on, every byte of it is compared with the hashes in
its record, and only then is the record written. So whatever ends this process, or the connection, the replica before
is whole, if there was one.

Training thread: :meth:`Replicas.take`, :meth:`Replicas.stand_on`, :meth:`Replicas.take_rest`, :meth:`Replicas.close`.
The door's threads: :meth:`Replicas.receive`, one at a time for each owner. A lock for each owner keeps the two apart;
the training thread waits for it a moment at most.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import xxhash

from monitor.memory_room import trying
from monitor.peers.wire import Answer, Link, Put
from store.errors import DamagedError, PeerError, StorageError, StoreError
from store.files import Files
from store.memory.arena import Arena
from store.memory.record import RECORD_LIMIT, VersionRecord, parse_record
from store.memory.tier import Tier
from store.names import SaveId
from store.schema import to_bytes
from store.segments import parse_part

_PATIENCE = 5.0
"""Seconds that the training thread waits for a replica that was just told to break off."""

_PIECE = 1 << 20


@dataclass
class _Ward:
    """One owner's replicas."""

    arena: Arena
    lock: threading.Lock = field(default_factory=threading.Lock)


class Replicas:
    """Of the ranks that are told to :meth:`take`. versions: kept side by side, of each."""

    def __init__(self, versions: int) -> None:
        self._versions = versions
        self._wards: dict[int, _Ward] = {}
        self._tier: Tier | None = None

    def take(
        self, tier: Tier, epoch: int, needs: Mapping[int, int], kept: SaveId | None, files: Files | None = None
    ) -> str | None:
        """Have memory for these ranks, of so many bytes a version. Why it cannot be, else None.

        kept: the version that the job stands on; replicas of it stay. files: see :class:`Arena`."""
        self._tier = tier
        try:
            for rank, nbytes in needs.items():
                arena = Arena(tier, epoch, rank, self._versions, files)
                self._wards[rank] = _Ward(arena)
                arena.take_over(kept)
                for slot in arena.slots[: -1 if arena.spares(kept) else None]:
                    arena.room(slot, nbytes)
        except (StoreError, OSError) as error:
            return str(error)
        return None

    def stand_on(self, kept: SaveId | None) -> None:
        """The job went back to this version: what there is of others is no replica any more."""
        for arena in self._quiet():
            for slot in (one for one in arena.slots if kept is None or arena.holding(kept) != one):
                trying(lambda slot=slot, arena=arena: arena.drop(slot))  # type: ignore[misc]

    def take_rest(self, world_size: int) -> bool:
        """See :meth:`store.memory.arena.Arena.take_rest`. False where something was on its way; it does not wait."""
        for ward in self._wards.values():
            if not ward.lock.acquire(blocking=False):
                return False
            try:
                trying(lambda arena=ward.arena: arena.take_rest(world_size))  # type: ignore[misc]
            finally:
                ward.lock.release()
        return True

    def close(self, *, remove: bool) -> None:
        """Let go of the memory; ``remove``: and give it back."""
        for arena in self._quiet():
            trying(lambda arena=arena: arena.close(remove=remove))  # type: ignore[misc]
        self._wards.clear()

    def receive(self, put: Put, link: Link) -> None:
        """Have what follows as the replica of its owner; the owner is told whether. PeerError where it broke off."""
        try:
            record = self._record(put, link)
            with self._held(put.rank) as arena:
                self._fill(arena, put, record, link)
        except StoreError as error:
            link.tell(Answer(ok=False, why=str(error)))
        else:
            link.tell(Answer(ok=True))

    def _fill(self, arena: Arena, put: Put, record: VersionRecord, link: Link) -> None:
        slot = _free(arena, None if put.keep is None else SaveId.parse(put.keep))
        with memoryview(arena.room(slot, put.payload)) as memory:
            link.tell(Answer(ok=True))
            with memory[: put.payload] as payload:
                link.receive(payload)
                _require_right(record, payload)
        arena.seal(slot, record.model_copy(update={"replica": True}))

    def _record(self, put: Put, link: Link) -> VersionRecord:
        """DamagedError where it is not what its owner may send."""
        if put.record > RECORD_LIMIT or self._tier is None:
            raise PeerError(f"a peer sends a record of {put.record} bytes")
        data = bytearray(put.record)
        link.receive(memoryview(data))
        what = f"the version that rank {put.rank} sends"
        record = parse_record(bytes(data), what)
        parse_part(to_bytes(record.part), self._tier.store_id, record.save, put.rank)
        if record.part.payload_bytes != put.payload:
            raise DamagedError(f"{what} has {record.part.payload_bytes} bytes, and {put.payload} are announced")
        return record

    @contextmanager
    def _held(self, rank: int) -> Iterator[Arena]:
        ward = self._wards.get(rank)
        if ward is None:
            raise StorageError(f"no replica of rank {rank} is kept here")
        if not ward.lock.acquire(timeout=_PATIENCE):
            raise StorageError(f"another version of rank {rank} is on its way")
        try:
            if self._wards.get(rank) is not ward:
                raise StorageError("no replicas are kept here any more")
            yield ward.arena
        finally:
            ward.lock.release()

    def _quiet(self) -> Iterator[Arena]:
        """Arenas that nothing is being written to; one that something is, for all that, is left alone."""
        for rank, ward in list(self._wards.items()):
            if not ward.lock.acquire(timeout=_PATIENCE):
                trying(lambda rank=rank: _refuse(rank))  # type: ignore[misc]
                continue
            try:
                yield ward.arena
            finally:
                ward.lock.release()


def _refuse(rank: int) -> None:
    raise StorageError(f"the replica of rank {rank} is still being written, and its memory is left as it is")


def _free(arena: Arena, keep: SaveId | None) -> int:
    """The payload to write to: not the replica that all ranks count on."""
    kept = None if keep is None else arena.holding(keep)
    return next((slot for slot in arena.slots if slot != kept), arena.slots[0])


def _require_right(record: VersionRecord, memory: memoryview) -> None:
    """DamagedError unless every byte that the record describes is what it says."""
    pieces: Sequence[tuple[int, int, str, str]] = [
        *((one.offset, one.nbytes, one.xxh3_128, f"{one.fqn} ({one.slot})") for one in record.part.entries),
        *((one.offset, one.nbytes, one.xxh3_128, "the run state") for one in record.part.run_tensors),
    ]
    for offset, nbytes, expected, what in pieces:
        state = xxhash.xxh3_128()
        for begin in range(offset, offset + nbytes, _PIECE):
            state.update(memory[begin : min(begin + _PIECE, offset + nbytes)])
        if state.hexdigest() != expected:
            raise DamagedError(f"{what} did not arrive as rank {record.part.rank} has it: it was changed on the way")
