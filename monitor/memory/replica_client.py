"""Send this rank's newest version to the rank that keeps its replica, and read payloads from other nodes.

One version is sent at a time, in a background thread. The memory tier begins no version while one is being sent, so the
payload does not change meanwhile. A failure costs the replica and is logged once, until the error changes. After a
failure the next attempt waits, longer each time, so that a peer that hangs does not hold up new versions."""

import logging
import threading
import time
from functools import partial
from pathlib import Path

from monitor.background import BackgroundWorker
from monitor.memory.transport import Connection, Endpoint, Get, Put, Request, new_connection
from store.errors import DriftpointError, MissingError, PeerError
from store.memory.layout import RECORD_LIMIT, parse_record, read_whole
from store.names import SaveId

_log = logging.getLogger("driftpoint")
_SILENCE = 10.0  # seconds without a byte after which a peer counts as gone
_RETRY_DELAYS = (5.0, 20.0, 60.0, 300.0)  # seconds without another attempt, by the number of failures in a row
_JOIN_TIMEOUT = 2.0


def transfer_timeout(timeout: float) -> float:
    """Return after how many seconds without a byte a connection is broken, if a version may take ``timeout``."""
    return min(_SILENCE, timeout)


class _AbortedError(PeerError):
    """This rank ended the transfer itself."""


class ReplicaSender:
    """Sends the versions of ``rank`` to ``target``, which keeps their replica. timeout: seconds that one may take."""

    def __init__(self, rank: int, target: int, endpoint: Endpoint, key: bytes, timeout: float) -> None:
        self._rank, self._target, self._endpoint, self._key, self._timeout = rank, target, endpoint, key, timeout
        self._writer: BackgroundWorker[float] = BackgroundWorker(f"driftpoint-sender-{rank}")
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._turn = 0  # offers made before it last changed are not sent
        self._stopped = False
        self._retry_at = 0.0
        self._failures = 0
        self._logged = ""
        self.sent: SaveId | None = None  # newest version that the target has of this rank

    @property
    def busy(self) -> bool:
        return not self.wait(0.0)

    def wait(self, timeout: float) -> bool:
        """Wait until nothing is being sent. Return False after ``timeout`` seconds."""
        return self._writer.join(timeout)

    def offer(self, save: SaveId, record: Path, payload: Path, keep: SaveId | None) -> None:
        """Send a version, unless an attempt failed a short time ago. Any thread; returns at once.

        record, payload: files that hold them. keep: replica that the target must not overwrite."""
        if time.monotonic() >= self._retry_at and not self._stopped:
            self._writer.submit(partial(self._send, self._turn, save, record, payload, keep))

    def collect(self) -> tuple[list[float], bool]:
        """Return the seconds that versions took since the last call, and whether any failed. Training thread."""
        took, failed = [], False
        for done in self._writer.finished():
            if done.result is not None:
                took.append(done.result)
                self._logged = ""
            elif not isinstance(done.error, _AbortedError):
                failed = True
                self._log_failure(done.error)
        return took, failed

    def break_off(self) -> None:
        """Abort the transfers that are running or waiting."""
        with self._lock:
            self._turn += 1
            if self._connection is not None:
                self._connection.abort()
        self._writer.join(_JOIN_TIMEOUT)

    def close(self) -> None:
        self._stopped = True
        self.break_off()
        self._writer.stop()

    # Background thread.

    def _send(self, turn: int, save: SaveId, record: Path, payload: Path, keep: SaveId | None) -> float:
        began = time.monotonic()
        try:
            self._transfer(turn, record, payload, keep, began + self._timeout)
        except Exception as error:
            if turn != self._turn:
                raise _AbortedError("the transfer was aborted") from error
            self._retry_at = time.monotonic() + _RETRY_DELAYS[min(self._failures, len(_RETRY_DELAYS) - 1)]
            self._failures += 1
            raise
        if self._failures:
            _log.warning("rank %d: replicated to rank %d again, step %d", self._rank, self._target, save.step)
        self._failures, self.sent = 0, save
        return time.monotonic() - began

    def _transfer(self, turn: int, path: Path, payload: Path, keep: SaveId | None, deadline: float) -> None:
        record = read_whole(path, RECORD_LIMIT)
        nbytes = parse_record(record, str(path)).part.payload_bytes
        connection = new_connection(self._endpoint, transfer_timeout(self._timeout), deadline)
        try:
            with self._lock:
                if turn != self._turn:
                    raise _AbortedError("the transfer was aborted")
                self._connection = connection
            connection.connect(self._endpoint, self._key)
            kept = None if keep is None else keep.name
            connection.send(Request(request=Put(rank=self._rank, keep=kept, record=len(record), payload=nbytes)))
            connection.send_bytes(record)
            connection.require_ok(self._timeout)  # the peer reserves memory
            connection.send_file(payload, 0, nbytes)
            connection.require_ok(self._timeout)  # the peer hashes all of it
        finally:
            with self._lock:
                self._connection = None
            connection.close()

    def _log_failure(self, error: BaseException | None) -> None:
        expected, text = isinstance(error, DriftpointError), str(error)
        if text != self._logged:
            line = (
                "rank %d: its memory is not replicated to rank %d: %s. Until it is, the loss of a node takes the job "
                "back to the store; training is not affected"
            )
            why, cause = (text, None) if expected else (repr(error), error)
            _log.warning(line, self._rank, self._target, why, exc_info=cause)
        self._logged = text


class RemoteNode:
    """Reads payloads that another node's server serves, piece by piece. Any thread; one piece at a time.

    The caller compares each piece with its hash. After two failures in a row the node is not asked again; its layers
    then come from their next newest version, on all ranks alike. timeout: see :func:`transfer_timeout`."""

    def __init__(self, endpoint: Endpoint, key: bytes, timeout: float) -> None:
        self._endpoint, self._key, self._silence = endpoint, key, transfer_timeout(timeout)
        self._lock = threading.Lock()  # a request and its answer share the connection
        self._connection: Connection | None = None
        self._failure: str | None = None
        self.nbytes = 0  # bytes read so far

    def read(self, save: SaveId, rank: int, offset: int, target: memoryview) -> None:
        """Fill ``target`` from a payload. Raises MissingError if that fails."""
        request = Get(rank=rank, save=save.name, offset=offset, nbytes=target.nbytes)
        with self._lock:
            for last in (False, True):
                if self._failure is not None:
                    break
                try:
                    self._fetch(request, target)
                    self.nbytes += target.nbytes
                    return
                except PeerError as error:
                    self.close()
                    if last:
                        self._failure = str(error)
                        _log.warning("version %s of rank %d cannot be read from its peer: %s", save, rank, error)
            raise MissingError(f"version {save} of rank {rank} cannot be read from another node: {self._failure}")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _fetch(self, request: Get, target: memoryview) -> None:
        if self._connection is None:
            self._connection = new_connection(self._endpoint, self._silence)
            self._connection.connect(self._endpoint, self._key)
        self._connection.send(Request(request=request))
        self._connection.require_ok()
        self._connection.receive_into(target.cast("B") if target.nbytes else target)
