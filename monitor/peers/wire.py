"""A connection between two ranks: both know the job's token, messages are whole, and every wait is bounded.

Messages are JSON with their length before them; what is large follows as it is. Nothing is unpickled. The token never
crosses the wire: each side proves that it has it by a keyed hash over what the other one drew. The bytes themselves are
as open as those of the process group. One thread at a time, but for :meth:`Link.abort`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, ValidationError

from store.errors import PeerError
from store.names import SaveId
from store.schema import Natural, Record, SaveName

_LENGTH = struct.Struct(">I")
_MESSAGE = 1 << 16
"""Largest message, in bytes."""

_PIECE = 1 << 22
_DRAWN = 32
_PROOF = hashlib.sha256().digest_size

Place = tuple[int, str, int]
"""Where a door is: address family, address, port."""

R = TypeVar("R", bound=Record)


class Put(Record):
    """The version of ``rank`` follows: its record, then, once that is welcome, its payload; lengths in bytes.

    keep: the replica that all ranks have one of, which stays until they have this one."""

    do: Literal["put"] = "put"
    rank: Natural
    keep: SaveName | None
    record: Natural
    payload: Natural


class Get(Record):
    """Bytes of the payload of ``rank`` in the version ``save``, please."""

    do: Literal["get"] = "get"
    rank: Natural
    save: SaveName
    offset: Natural
    nbytes: Natural


class Answer(Record):
    """Whether it goes on, or well; else why not."""

    ok: bool
    why: str = ""


class Request(Record):
    """What is asked of a door."""

    request: Annotated[Put | Get, Field(discriminator="do")]


class Link:
    """One connection. silence: seconds without a byte after which it counts as broken. deadline: on ``time.monotonic``,
    for all of it; None: none. Everything raises PeerError."""

    def __init__(self, connection: socket.socket, silence: float, deadline: float | None = None) -> None:
        self._socket = connection
        self._silence = silence
        self._deadline = deadline
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def tell(self, message: Record) -> None:
        """Send a message."""
        data = message.model_dump_json().encode()
        self.send(_LENGTH.pack(len(data)) + data)

    def hear(self, kind: type[R], patience: float | None = None) -> R:
        """The next message, which is to be one of these. patience: seconds until it begins, if not as ever."""
        (length,) = _LENGTH.unpack(self._received(_LENGTH.size, patience))
        if length > _MESSAGE:
            raise PeerError(f"a peer sends a message of {length} bytes")
        data = self._received(length)
        try:
            return kind.model_validate_json(data)
        except ValidationError as error:
            raise PeerError(f"a peer says what is not understood: {bytes(data[:200])!r}") from error

    def send(self, data: bytes | memoryview) -> None:
        """Send bytes."""
        view = memoryview(data)
        try:
            while view:
                self._bound()
                view = view[self._socket.send(view[:_PIECE]) :]
        except OSError as error:
            raise _lost(error) from error

    def send_file(self, path: Path, offset: int, nbytes: int) -> None:
        """Send bytes of a file, without a copy of them here."""
        try:
            with path.open("rb", buffering=0) as file:
                end = offset + nbytes
                while offset < end:
                    self._bound()
                    sent = self._socket.sendfile(file, offset, min(_PIECE, end - offset))
                    if not sent:
                        raise PeerError(f"{path} ends at byte {offset}")
                    offset += sent
        except OSError as error:
            raise _lost(error) from error

    def receive(self, target: memoryview, patience: float | None = None) -> None:
        """Fill ``target``."""
        try:
            while len(target):
                self._bound(patience)
                got = self._socket.recv_into(target[:_PIECE])
                if not got:
                    raise PeerError("the peer is gone")
                target, patience = target[got:], None
        except OSError as error:
            raise _lost(error) from error

    def introduce(self, token: bytes) -> None:
        """As the guest: show that we have the token, and see that the host has."""
        theirs, mine = self._received(_DRAWN), secrets.token_bytes(_DRAWN)
        self.send(mine + _proof(token, b"guest", theirs, mine))
        if not hmac.compare_digest(self._received(_PROOF), _proof(token, b"host", mine, theirs)):
            raise PeerError("whoever listens there is not of this job")

    def welcome(self, token: bytes) -> None:
        """As the host: the same."""
        mine = secrets.token_bytes(_DRAWN)
        self.send(mine)
        theirs, proof = self._received(_DRAWN), self._received(_PROOF)
        if not hmac.compare_digest(proof, _proof(token, b"guest", mine, theirs)):
            raise PeerError("a guest has not the token of this job")
        self.send(_proof(token, b"host", theirs, mine))

    def abort(self) -> None:
        """End it, whatever another thread waits for in it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it and let go of it: a forked child (a data-loader worker) may have it open, too."""
        self.abort()
        self._socket.close()

    def _received(self, nbytes: int, patience: float | None = None) -> bytearray:
        data = bytearray(nbytes)
        self.receive(memoryview(data), patience)
        return data

    def _bound(self, patience: float | None = None) -> None:
        wait = self._silence if patience is None else patience
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("it took too long")
            wait = min(wait, left)
        self._socket.settimeout(max(wait, 1e-3))


def connect(
    place: Place,
    token: bytes,
    *,
    silence: float,
    deadline: float | None = None,
    begun: Callable[[Link], None] = lambda _: None,
) -> Link:
    """A connection to the door there, once both have shown that they have the token. PeerError.

    begun: given the link before anything is waited for, so that another thread can abort it."""
    family, host, port = place
    connection = socket.socket(family, socket.SOCK_STREAM)
    link = Link(connection, silence, deadline)
    try:
        begun(link)
        connection.settimeout(silence)
        connection.connect((host, port))
        link.introduce(token)
    except OSError as error:
        link.close()
        raise PeerError(f"no connection to {host} port {port}: {error.strerror or error}") from error
    except PeerError as error:
        link.close()
        raise PeerError(f"no connection to {host} port {port}: {error}") from error
    return link


def _proof(token: bytes, side: bytes, *drawn: bytes | bytearray) -> bytes:
    return hmac.digest(token, b"driftpoint " + side + b"".join(drawn), "sha256")


def _lost(error: OSError) -> PeerError:
    if isinstance(error, TimeoutError):
        return PeerError("the peer is silent, or too slow")
    return PeerError(f"the peer is gone: {error.strerror or error}")


def name_of(save: SaveId | None) -> str | None:
    """As messages have it."""
    return None if save is None else save.name


def size_of(path: Path) -> int:
    """Bytes of a payload. PeerError where it is not there."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise PeerError(f"cannot look at {path}: {error.strerror}") from error
