"""Reading, at a resume, payloads that lie on other nodes: piece by piece, straight to where the pieces belong.

No payload is ever here as a whole, and every piece is compared with its hash by whoever asked for it. What a node does
not give is not asked of it again: to the reader it is missing, and the layer comes from where it is next newest, on
all ranks alike. Training thread.
"""

from __future__ import annotations

import logging

from monitor.peers.sender import silence_of
from monitor.peers.wire import Answer, Get, Link, Place, Request, connect
from store.errors import MissingError, PeerError
from store.names import SaveId

_log = logging.getLogger("driftpoint")


class Far:
    """One node's door, as read from. timeout: see :func:`monitor.peers.sender.silence_of`."""

    def __init__(self, place: Place, token: bytes, timeout: float) -> None:
        self._place, self._token, self._silence = place, token, silence_of(timeout)
        self._link: Link | None = None
        self._lost: str | None = None
        self.nbytes = 0
        """Read so far."""

    def read(self, save: SaveId, rank: int, offset: int, target: memoryview) -> None:
        """Fill ``target`` from a payload. MissingError where that cannot be."""
        asked = Get(rank=rank, save=save.name, offset=offset, nbytes=target.nbytes)
        for last in (False, True):
            if self._lost is not None:
                break
            try:
                self._fetch(asked, target)
                self.nbytes += target.nbytes
                return
            except PeerError as error:
                self.close()
                if last:
                    self._lost = str(error)
                    _log.warning("version %s of rank %d cannot be read from its peer: %s", save, rank, error)
        raise MissingError(f"version {save} of rank {rank} cannot be had from another node: {self._lost}")

    def close(self) -> None:
        """Let go of the connection."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def _fetch(self, asked: Get, target: memoryview) -> None:
        if self._link is None:
            self._link = connect(self._place, self._token, silence=self._silence)
        self._link.tell(Request(request=asked))
        answer = self._link.hear(Answer)
        if not answer.ok:
            raise PeerError(answer.why)
        self._link.receive(target.cast("B") if target.nbytes else target)


class FarPayload:
    """A rank's payload of one version, on another node."""

    def __init__(self, far: Far, save: SaveId, rank: int) -> None:
        self._far, self._save, self._rank = far, save, rank

    def read(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset``. MissingError."""
        self._far.read(self._save, self._rank, offset, target)
