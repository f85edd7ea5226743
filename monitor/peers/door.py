"""Where other ranks reach this one: their versions come in to be kept, and pieces of payloads that lie here go out.

One thread listens, one serves each connection. What a guest does wrong, or a connection that breaks, ends that
connection and nothing else; the guest knows it, and says it where it matters. The training thread opens and closes.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from monitor.peers.address import Address
from monitor.peers.wire import Answer, Get, Link, Put, Request, size_of
from store.errors import PeerError, StoreError
from store.names import SaveId

_log = logging.getLogger("driftpoint")

_GUESTS = 256
"""Connections at a time; those beyond are refused."""

_PAUSE = 1.0

_BETWEEN = 900.0
"""Seconds that a guest may be silent between two requests: at a resume all ranks may wait for one of them."""

Shown = Mapping[tuple[SaveId, int], Path]


class Door:
    """Open from construction until :meth:`close`. OSError where it cannot listen.

    receive: has a version that follows kept. silence: see :class:`monitor.peers.wire.Link`."""

    def __init__(self, at: Address, token: bytes, receive: Callable[[Put, Link], None], silence: float) -> None:
        family, host = at
        self._listener = socket.create_server((host, 0), family=socket.AddressFamily(family), backlog=128)
        self.place = (family, host, int(self._listener.getsockname()[1]))
        """Family, address and port."""
        self._token, self._receive, self._silence = token, receive, silence
        self._shown: Shown = MappingProxyType({})
        self._links: set[Link] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        threading.Thread(target=self._listen, name="driftpoint-door", daemon=True).start()

    def show(self, payloads: Shown) -> None:
        """These may be read from now on, and no others."""
        self._shown = dict(payloads)

    def break_off(self) -> None:
        """End what is under way; who comes later is served."""
        with self._lock:
            for link in self._links:
                link.abort()

    def close(self) -> None:
        """Serve nobody any more."""
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that listens
        self._listener.close()
        self.break_off()

    def _listen(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.is_set():
                    _log.warning("a peer's connection could not be taken: %s", error.strerror or error)
                    self._closing.wait(_PAUSE)  # too many open files, say
                continue
            threading.Thread(target=self._serve, args=(connection,), name="driftpoint-guest", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        link = Link(connection, self._silence)
        try:
            with self._lock:
                if self._closing.is_set() or len(self._links) >= _GUESTS:
                    return
                self._links.add(link)
            link.welcome(self._token)
            while True:
                self._answer(link, link.hear(Request, _BETWEEN).request)
        except PeerError as error:
            _log.debug("a connection of a peer ended: %s", error)  # it tells why it came, if that was not done
        except Exception:  # noqa: BLE001 - the thread's edge: a guest must not end the door
            _log.exception("serving a peer failed")
        finally:
            with self._lock:
                self._links.discard(link)
            link.close()

    def _answer(self, link: Link, asked: Put | Get) -> None:
        if isinstance(asked, Put):
            self._receive(asked, link)
            return
        path = self._shown.get((SaveId.parse(asked.save), asked.rank))
        try:
            if path is None or asked.offset + asked.nbytes > size_of(path):
                raise PeerError(f"version {asked.save} of rank {asked.rank} is not here, or not so long")
        except (PeerError, StoreError) as error:
            link.tell(Answer(ok=False, why=str(error)))
            return
        link.tell(Answer(ok=True))
        link.send_file(path, asked.offset, asked.nbytes)
