"""Sending this rank's newest version to the rank that keeps its replica, beside training.

One version at a time, in a thread of its own; the memory tier begins no version while one is on its way, so that the
payload stands still. Whatever goes wrong costs the replica and is told when ranks meet next: once, until it is another
trouble. What breaks off because the job ends is told to nobody. After a failure some time passes before the next
attempt, ever longer: a peer that hangs must not keep versions from being made.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from monitor.peers.wire import Answer, Link, Place, Put, Request, connect, name_of
from monitor.writer import Writer
from store.errors import DriftpointError, PeerError
from store.memory.record import RECORD_LIMIT, parse_record
from store.memory.tier import read_whole
from store.names import SaveId

_log = logging.getLogger("driftpoint")

_SILENCE = 10.0
"""Seconds without a byte after which a peer counts as gone."""

_PAUSES = (5.0, 20.0, 60.0, 300.0)
"""Seconds without another attempt after so many failures in a row."""

_LAST = 2.0


@dataclass(frozen=True)
class _Offer:
    turn: int
    save: SaveId
    record: Path
    payload: Path
    keep: SaveId | None


def silence_of(timeout: float) -> float:
    """Seconds without a byte after which a connection counts as broken, where all of it may take ``timeout``."""
    return min(_SILENCE, timeout)


class _BrokenOffError(PeerError):
    """This rank wanted it no more."""


class Sender:
    """Of one rank. to: the rank that keeps its replica. timeout: seconds that a version may take."""

    def __init__(self, rank: int, to: int, place: Place, token: bytes, timeout: float) -> None:
        self._rank, self._to, self._place, self._token, self._timeout = rank, to, place, token, timeout
        self._writer: Writer[float] = Writer(f"driftpoint-sender-{rank}")
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._turn = 0
        """What was offered before it last changed is not sent any more."""
        self._stopped = False
        self._quiet_until = 0.0
        self._failures = 0
        self._told = ""
        self.sent: SaveId | None = None
        """The version that the peer has of this rank."""

    @property
    def busy(self) -> bool:
        """Whether a version is on its way."""
        return not self._writer.join(0.0)

    def offer(self, save: SaveId, record: Path, payload: Path, keep: SaveId | None) -> None:
        """Send this, unless an attempt failed a short time ago. Any thread; returns at once."""
        if time.monotonic() >= self._quiet_until and not self._stopped:
            offer = _Offer(self._turn, save, record, payload, keep)
            self._writer.submit(partial(self._send, offer))

    def collect(self) -> tuple[list[float], bool]:
        """Seconds that versions took since the last call, and whether any failed, which is told. Training thread."""
        took, failed = [], False
        for done in self._writer.finished():
            if done.result is not None:
                took.append(done.result)
                self._told = ""
            elif not isinstance(done.error, _BrokenOffError):
                failed = True
                self._complain(done.error)
        return took, failed

    def break_off(self) -> None:
        """End what is on its way, or about to be."""
        with self._lock:
            self._turn += 1
            if self._link is not None:
                self._link.abort()
        self._writer.join(_LAST)

    def close(self) -> None:
        """Send nothing any more."""
        self._stopped = True
        self.break_off()
        self._writer.stop()

    # The thread.

    def _send(self, offer: _Offer) -> float:
        began = time.monotonic()
        try:
            self._deliver(offer, began + self._timeout)
        except Exception as error:
            if offer.turn != self._turn:
                raise _BrokenOffError("it was broken off") from error
            self._quiet_until = time.monotonic() + _PAUSES[min(self._failures, len(_PAUSES) - 1)]
            self._failures += 1
            raise
        if self._failures:
            _log.warning("rank %d: step %d is at its peer, rank %d, again", self._rank, offer.save.step, self._to)
        self._failures, self.sent = 0, offer.save
        return time.monotonic() - began

    def _deliver(self, offer: _Offer, deadline: float) -> None:
        data = read_whole(offer.record, RECORD_LIMIT)
        nbytes = parse_record(data, str(offer.record)).part.payload_bytes
        link = connect(
            self._place,
            self._token,
            silence=silence_of(self._timeout),
            deadline=deadline,
            begun=lambda link: self._begun(link, offer.turn),
        )
        try:
            put = Put(rank=self._rank, keep=name_of(offer.keep), record=len(data), payload=nbytes)
            link.tell(Request(request=put))
            link.send(data)
            self._require_ok(link)
            link.send_file(offer.payload, 0, nbytes)
            self._require_ok(link)
        finally:
            with self._lock:
                self._link = None
            link.close()

    def _begun(self, link: Link, turn: int) -> None:
        with self._lock:
            if turn != self._turn:
                raise _BrokenOffError("it was broken off")
            self._link = link

    def _require_ok(self, link: Link) -> None:
        answer = link.hear(Answer, self._timeout)  # it reserves memory, or hashes all of it
        if not answer.ok:
            raise PeerError(answer.why)

    def _complain(self, error: BaseException | None) -> None:
        """Once, until it is another trouble."""
        expected, text = isinstance(error, DriftpointError), str(error)
        if text != self._told:
            _log.warning(
                "rank %d: its memory is not replicated to rank %d: %s. Until it is, the loss of a node takes the job "
                "back to the store; training is not affected",
                self._rank,
                self._to,
                text if expected else repr(error),
                exc_info=None if expected else error,
            )
        self._told = text
