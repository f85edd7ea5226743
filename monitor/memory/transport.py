"""Authenticated connections between the ranks of a job, and the address to listen on.

Messages are JSON with their length in front; records and payloads follow as raw bytes. Nothing is unpickled. The job's
key is never sent: each side proves that it has it by an HMAC over the nonce of the other one. Bytes are not encrypted,
as the process group's own traffic is not; receivers compare them with hashes. Every wait is bounded."""

import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

from store.errors import PeerError
from store.schema import Natural, Record, SaveName, learn

_LENGTH = struct.Struct(">I")
_MAX_MESSAGE = 1 << 16
_CHUNK = 1 << 22
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_LOOPBACK = (int(socket.AF_INET), "127.0.0.1")
Address = tuple[int, str]  # address family, and an address of this machine
Endpoint = tuple[int, str, int]  # address family, address and port of a server
R = TypeVar("R", bound=Record)


class Put(Record, frozen=True, kw_only=True, tag_field="do", tag="put"):
    """Announces a version of ``rank``: its record, then, once that is accepted, its payload; lengths in bytes.

    keep: Replica that all ranks count on, which must not be overwritten."""

    rank: Natural
    keep: SaveName | None
    record: Natural
    payload: Natural


class Get(Record, frozen=True, kw_only=True, tag_field="do", tag="get"):
    """Requests bytes of the payload of ``rank`` in the version ``save``."""

    rank: Natural
    save: SaveName
    offset: Natural
    nbytes: Natural


class Request(Record, frozen=True, kw_only=True):
    """A request to a server."""

    request: Put | Get


class Answer(Record, frozen=True, kw_only=True):
    """Whether a request was accepted or succeeded, and why not."""

    ok: bool
    why: str = ""


learn(Request, Answer)


class Connection:
    """One connection; client or server side. All methods raise PeerError. One thread at a time, except :meth:`abort`.

    silence: seconds without a byte after which the connection counts as broken. deadline: ``time.monotonic()`` at which
    everything must be done, or None."""

    def __init__(self, connection: socket.socket, silence: float, deadline: float | None = None) -> None:
        self._socket, self._silence, self._deadline = connection, silence, deadline
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connect(self, endpoint: Endpoint, key: bytes) -> None:
        """Connect to a server and authenticate both sides."""
        _, host, port = endpoint
        try:
            with _as_peer_error():
                self._apply_timeout()
                self._socket.connect((host, port))
            self.client_handshake(key)
        except PeerError as error:
            self.close()
            raise PeerError(f"no connection to {host} port {port}: {error}") from error

    def client_handshake(self, key: bytes) -> None:
        """Prove that this client has the key, and check that the server has it."""
        server_nonce, nonce = self._receive(_NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
        self.send_bytes(nonce + _proof(key, b"guest", server_nonce, nonce))
        if not hmac.compare_digest(self._receive(_PROOF_BYTES), _proof(key, b"host", nonce, server_nonce)):
            raise PeerError("the process that listens there is not of this job")

    def server_handshake(self, key: bytes) -> None:
        """Check that the client has the key, and prove that this server has it."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self.send_bytes(nonce)
        client_nonce, proof = self._receive(_NONCE_BYTES), self._receive(_PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(key, b"guest", nonce, client_nonce)):
            raise PeerError("a client does not have the key of this job")
        self.send_bytes(_proof(key, b"host", client_nonce, nonce))

    def send(self, message: Record) -> None:
        data = msgspec.json.encode(message)
        self.send_bytes(_LENGTH.pack(len(data)) + data)

    def receive(self, kind: type[R], patience: float | None = None) -> R:
        """Receive a message of this kind, whose first byte may take ``patience`` seconds; default: ``silence``."""
        (length,) = _LENGTH.unpack(self._receive(_LENGTH.size, patience))
        if length > _MAX_MESSAGE:
            raise PeerError(f"a peer sends a message of {length} bytes")
        data = self._receive(length)
        try:
            return msgspec.json.decode(data, type=kind)
        except (ValueError, RecursionError, msgspec.DecodeError) as error:
            raise PeerError(f"a peer sends a message that is not understood: {bytes(data[:200])!r}") from error

    def require_ok(self, patience: float | None = None) -> None:
        """Receive an :class:`Answer`. Raise its reason if it is a refusal."""
        answer = self.receive(Answer, patience)
        if not answer.ok:
            raise PeerError(answer.why)

    def send_bytes(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        with _as_peer_error():
            while view:
                self._apply_timeout()
                view = view[self._socket.send(view[:_CHUNK]) :]

    def send_file(self, path: Path, offset: int, nbytes: int) -> None:
        """Send bytes of a file without copying them through the interpreter."""
        end = offset + nbytes
        with _as_peer_error(), path.open("rb", buffering=0) as file:
            while offset < end:
                self._apply_timeout()
                sent = self._socket.sendfile(file, offset, min(_CHUNK, end - offset))
                if not sent:
                    raise PeerError(f"{path} ends at byte {offset}")
                offset += sent

    def receive_into(self, target: memoryview, patience: float | None = None) -> None:
        with _as_peer_error():
            while len(target):
                self._apply_timeout(patience)
                received = self._socket.recv_into(target[:_CHUNK])
                if not received:
                    raise PeerError("the peer is gone")
                target, patience = target[received:], None

    def abort(self) -> None:
        """End the connection, also while another thread waits for it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut down and close; a forked child, such as a data-loader worker, may hold the socket too."""
        self.abort()
        self._socket.close()

    def _receive(self, nbytes: int, patience: float | None = None) -> bytearray:
        data = bytearray(nbytes)
        self.receive_into(memoryview(data), patience)
        return data

    def _apply_timeout(self, patience: float | None = None) -> None:
        wait = self._silence if patience is None else patience
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("deadline exceeded")
            wait = min(wait, left)
        self._socket.settimeout(max(wait, 1e-3))


def new_connection(endpoint: Endpoint, silence: float, deadline: float | None = None) -> Connection:
    """Return a connection that :meth:`Connection.connect` is to be called on; another thread can abort it before."""
    return Connection(socket.socket(endpoint[0], socket.SOCK_STREAM), silence, deadline)


def _proof(key: bytes, side: bytes, *nonces: bytes | bytearray) -> bytes:
    return hmac.digest(key, b"driftpoint " + side + b"".join(nonces), "sha256")


@contextmanager
def _as_peer_error() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise PeerError("the peer is silent, or too slow") from error
    except OSError as error:
        raise PeerError(f"the peer is gone: {error.strerror or error}") from error


def own_address() -> Address:
    """Return the address that gloo uses for the process group, over which the ranks reach each other already.

    It is that of the interface in GLOO_SOCKET_IFNAME, else of the host's name, else the loopback's. Raises OSError if
    the interface does not exist."""
    interface, found = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip(), list[Address]()
    if interface:
        known = psutil.net_if_addrs()
        if interface not in known:
            raise OSError(f"there is no network interface {interface!r}, which GLOO_SOCKET_IFNAME names")
        families = (socket.AF_INET, socket.AF_INET6)
        found = [(int(kind), one.address) for kind in families for one in known[interface] if one.family == kind]
    else:
        with suppress(OSError):
            places = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
            found = [(int(family), str(address[0])) for family, _, _, _, address in places]
    return next((address for address in found if _can_bind(address)), _LOOPBACK)


def _can_bind(address: Address) -> bool:
    family, host = address
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True
