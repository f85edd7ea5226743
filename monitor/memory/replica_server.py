"""Receive the replicas that this rank keeps for others, and serve payloads that lie on its node.

A new replica overwrites a payload that its owner no longer relies on. Every byte is compared with the record's hashes,
and only then is the record written. So if this process or the connection ends before, the previous replica is intact.

A lock for each owner separates the server's threads from the training thread, which waits ``_LOCK_TIMEOUT`` at most."""

import logging
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

from monitor.memory.buffers import log_errors
from monitor.memory.transport import Address, Answer, Connection, Endpoint, Get, Put, Request
from store.errors import DamagedError, PeerError, StorageError, StoreError
from store.memory.arena import Arena
from store.memory.layout import RECORD_LIMIT, Tier, VersionRecord, parse_record
from store.names import SaveId
from store.schema import Entry, StateTensor, digest, to_bytes
from store.segment import parse_part
from store.storage.local import Files

_log = logging.getLogger("driftpoint")
_LOCK_TIMEOUT = 5.0  # seconds that the training thread waits for a transfer that was just aborted
_MAX_CONNECTIONS = 256
_ACCEPT_RETRY = 1.0
_THREAD = "driftpoint-replica"
_IDLE_TIMEOUT = 900.0  # seconds between two requests of a peer; in a resume all ranks may wait for one of them
ServedPayloads = Mapping[tuple[SaveId, int], Path]  # files of payloads by version and rank


@dataclass
class _Source:
    arena: Arena
    lock: threading.Lock = field(default_factory=threading.Lock)


class ReplicaStore:
    """Memory for the replicas of other ranks, ``versions`` side by side of each."""

    def __init__(self, versions: int) -> None:
        self._versions = versions
        self._sources: dict[int, _Source] = {}
        self._tier: Tier | None = None

    def take(
        self, tier: Tier, epoch: int, needs: Mapping[int, int], kept: SaveId | None, files: Files | None = None
    ) -> str | None:
        """Reserve memory for ``needs``, the bytes of a version by rank. Return the problem, or None. Training thread.

        kept: version that the job resumed; replicas of it stay. files: see :class:`store.memory.arena.Arena`."""
        self._tier = tier
        try:
            for rank, nbytes in needs.items():
                arena = Arena(tier, epoch, rank, self._versions, files, replica=True)
                self._sources[rank] = _Source(arena)
                for slot in arena.take_over(kept):
                    arena.room(slot, nbytes)
        except (StoreError, OSError) as error:
            return str(error)
        return None

    def keep_only_version(self, kept: SaveId | None) -> None:
        """Drop all replicas except those of the version that the job went back to. Training thread."""
        for arena in self._locked_arenas():
            for slot in (one for one in arena.slots if kept is None or arena.holding(kept) != one):
                log_errors(partial(arena.drop, slot))

    def take_rest(self, world_size: int) -> bool:
        """Call :meth:`store.memory.arena.Arena.take_rest`. Return False, without waiting, during a transfer."""
        for source in self._sources.values():
            if not source.lock.acquire(blocking=False):
                return False
            try:
                log_errors(partial(source.arena.take_rest, world_size))
            finally:
                source.lock.release()
        return True

    def close(self, *, remove: bool) -> None:
        """Close the memory, and give it back if ``remove``. Training thread."""
        for arena in self._locked_arenas():
            log_errors(partial(arena.close, remove=remove))
        self._sources.clear()

    def receive(self, put: Put, connection: Connection) -> None:
        """Receive an announced replica and answer whether it is kept. Raises PeerError if the connection breaks."""
        try:
            record = self._receive_record(put, connection)
            with self._locked(put.rank) as arena:
                self._receive_payload(arena, put, record, connection)
        except StoreError as error:
            connection.send(Answer(ok=False, why=str(error)))
        else:
            connection.send(Answer(ok=True))

    def _receive_record(self, put: Put, connection: Connection) -> VersionRecord:
        """Raise DamagedError if it is not a record that its owner may send."""
        if put.record > RECORD_LIMIT or self._tier is None:
            raise PeerError(f"a peer sends a record of {put.record} bytes")
        data = bytearray(put.record)
        connection.receive_into(memoryview(data))
        record = parse_record(bytes(data), f"the version that rank {put.rank} sends")
        parse_part(to_bytes(record.part), self._tier.store_id, record.save, put.rank)
        if record.part.payload_bytes != put.payload:
            raise DamagedError(
                f"the version that rank {put.rank} sends has {record.part.payload_bytes} bytes by its record, and "
                f"{put.payload} are announced"
            )
        return record

    def _receive_payload(self, arena: Arena, put: Put, record: VersionRecord, connection: Connection) -> None:
        kept = None if put.keep is None else arena.holding(SaveId.parse(put.keep))
        slot = next((one for one in arena.slots if one != kept), arena.slots[0])
        with memoryview(arena.room(slot, put.payload)) as memory:
            connection.send(Answer(ok=True))
            with memory[: put.payload] as payload:
                connection.receive_into(payload)
                _verify(record, payload)
        arena.seal(slot, record.replace(replica=True))

    @contextmanager
    def _locked(self, rank: int) -> Iterator[Arena]:
        source = self._sources.get(rank)
        if source is None:
            raise StorageError(f"no replica of rank {rank} is kept here")
        if not source.lock.acquire(timeout=_LOCK_TIMEOUT):
            raise StorageError(f"another version of rank {rank} is being received")
        try:
            if self._sources.get(rank) is not source:
                raise StorageError("no replicas are kept here any more")
            yield source.arena
        finally:
            source.lock.release()

    def _locked_arenas(self) -> Iterator[Arena]:
        """Yield the arenas, except those that a transfer still writes to."""
        for rank, source in list(self._sources.items()):
            if not source.lock.acquire(timeout=_LOCK_TIMEOUT):
                _log.warning("memory: the replica of rank %d is still being written; its memory is left as it is", rank)
                continue
            try:
                yield source.arena
            finally:
                source.lock.release()


def _verify(record: VersionRecord, memory: memoryview) -> None:
    """Raise DamagedError unless all bytes that the record describes match their hashes."""
    described: Sequence[Entry | StateTensor] = (*record.part.entries, *record.part.run_tensors)
    for one in described:
        if digest(memory[one.offset : one.offset + one.nbytes]) != one.xxh3_128:
            what = f"{one.fqn} ({one.slot})" if isinstance(one, Entry) else "the run state"
            raise DamagedError(f"{what} did not arrive as rank {record.part.rank} has it: it was changed on the way")


class ReplicaServer:
    """Listens for peers until :meth:`close`, with a thread for each connection. Raises OSError if it cannot listen.

    A peer's error or a broken connection ends that connection only. The training thread opens and closes the server.
    The system chooses the port. silence: see :class:`monitor.memory.transport.Connection`."""

    def __init__(self, address: Address, key: bytes, replicas: ReplicaStore, silence: float) -> None:
        family, host = address
        self._listener = socket.create_server((host, 0), family=socket.AddressFamily(family), backlog=128)
        self.endpoint: Endpoint = (family, host, int(self._listener.getsockname()[1]))
        self._key, self._replicas, self._silence = key, replicas, silence
        self._served: ServedPayloads = MappingProxyType({})
        self._connections: set[Connection] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        threading.Thread(target=self._accept, name="driftpoint-replica-server", daemon=True).start()

    def serve(self, payloads: ServedPayloads) -> None:
        """Let peers read these payloads and no others."""
        self._served = dict(payloads)

    def break_off(self) -> None:
        """End all open connections. Later ones are served."""
        with self._lock:
            for connection in self._connections:
                connection.abort()

    def close(self) -> None:
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listener.close()
        self.break_off()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                accepted, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.is_set():
                    _log.warning("cannot accept a peer's connection: %s", error.strerror or error)
                    self._closing.wait(_ACCEPT_RETRY)  # for example, too many open files
                continue
            connection = Connection(accepted, self._silence)
            with self._lock:
                refused = self._closing.is_set() or len(self._connections) >= _MAX_CONNECTIONS
                if not refused:
                    self._connections.add(connection)
            if refused:
                connection.close()
                continue
            try:
                threading.Thread(target=self._handle, args=(connection,), name=_THREAD, daemon=True).start()
            except RuntimeError as error:
                _log.warning("cannot serve a peer: %s", error)  # no more threads
                self._forget(connection)

    def _handle(self, connection: Connection) -> None:
        try:
            connection.server_handshake(self._key)
            while True:
                request = connection.receive(Request, _IDLE_TIMEOUT).request
                if isinstance(request, Put):
                    self._replicas.receive(request, connection)
                else:
                    self._send_payload(request, connection)
        except PeerError as error:
            _log.debug("a peer's connection ended: %s", error)  # the peer reports it
        except Exception:  # noqa: BLE001 - the thread's edge: a peer must not end the server
            _log.exception("serving a peer failed")
        finally:
            self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()

    def _send_payload(self, get: Get, connection: Connection) -> None:
        path = self._served.get((SaveId.parse(get.save), get.rank))
        try:
            if path is None or get.offset + get.nbytes > path.stat().st_size:
                raise PeerError(f"version {get.save} of rank {get.rank} is not here, or not so long")
        except (PeerError, OSError) as error:
            connection.send(Answer(ok=False, why=str(error)))
            return
        connection.send(Answer(ok=True))
        connection.send_file(path, get.offset, get.nbytes)
