"""Connections between ranks: who may have one, and that nothing on them is waited for without an end."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from monitor.memory.transport import Answer, Connection, own_address
from store.errors import PeerError
from tests.support.peering import KEY, LOCAL, connected


@pytest.fixture
def pair() -> Iterator[tuple[Connection, socket.socket]]:
    one, other = socket.socketpair()
    yield Connection(one, silence=0.2), other
    one.close()
    other.close()


def test_both_sides_prove_that_they_have_the_key() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    _, port = listener.getsockname()
    heard: list[object] = []

    def host(key: bytes) -> None:
        connection = Connection(listener.accept()[0], 60.0)
        try:
            connection.server_handshake(key)
            heard.append(connection.receive(Answer).why)
        except PeerError as error:
            heard.append(error)
        connection.close()

    for mine, theirs in ((KEY, KEY), (KEY, b"x" * 32)):
        thread = threading.Thread(target=host, args=(mine,))
        thread.start()
        try:
            connection = connected((*LOCAL, port), theirs)
            connection.send(Answer(ok=True, why="hello"))
            connection.close()
        except PeerError as error:
            assert theirs != KEY and "no connection" in str(error)
        thread.join(180)
    listener.close()
    assert heard[0] == "hello" and isinstance(heard[1], PeerError)


def test_a_host_without_the_key_is_not_believed() -> None:
    """Whoever took over the port of a dead rank, say: it answers what it likes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def impostor() -> None:
        guest, _ = listener.accept()
        guest.sendall(b"n" * 32)
        guest.recv(64, socket.MSG_WAITALL)
        guest.sendall(b"p" * 32)
        guest.close()

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(PeerError, match="not of this job"):
        connected((*LOCAL, listener.getsockname()[1]))
    thread.join(180)
    listener.close()


def test_nobody_there() -> None:
    with socket.socket() as deaf:  # it has the port, which nobody else can take, and does not listen
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        with pytest.raises(PeerError, match=f"no connection to 127.0.0.1 port {port}"):
            connected((*LOCAL, port))


def test_silence_is_an_error(pair: tuple[Connection, socket.socket]) -> None:
    connection, _ = pair
    with pytest.raises(PeerError, match="silent"):
        connection.receive(Answer)


def test_a_peer_that_takes_nothing_is_an_error(pair: tuple[Connection, socket.socket]) -> None:
    connection, _ = pair
    with pytest.raises(PeerError, match="silent"):
        connection.send_bytes(bytes(64 << 20))


def test_a_trickle_ends_at_the_deadline() -> None:
    one, other = socket.socketpair()
    connection = Connection(one, silence=60.0, deadline=time.monotonic() + 0.5)
    ended = threading.Event()

    def trickle() -> None:
        while not ended.wait(0.05):
            other.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises(PeerError, match="too slow"):
        connection.receive_into(memoryview(bytearray(1 << 20)))
    ended.set()
    thread.join(180)
    connection.close()
    other.close()


@pytest.mark.parametrize(
    ("sent", "what"),
    [
        (struct.pack(">I", 1 << 30), "message of 1073741824 bytes"),
        (struct.pack(">I", 4) + b"null", "not understood"),
        (struct.pack(">I", 2) + b"\xff{", "not understood"),
        (struct.pack(">I", 20) + b'{"ok":true,"why":"\xff"', "not understood"),
        (struct.pack(">I", 60_000) + b"[" * 60_000, "not understood"),
        (struct.pack(">I", 9) + b'{"ok', "is gone"),
        (b"", "is gone"),
    ],
)
def test_what_is_not_a_message_is_an_error(pair: tuple[Connection, socket.socket], sent: bytes, what: str) -> None:
    connection, other = pair
    other.sendall(sent)
    other.shutdown(socket.SHUT_WR)
    with pytest.raises(PeerError, match=what):
        connection.receive(Answer)


def test_another_thread_can_end_it(pair: tuple[Connection, socket.socket]) -> None:
    connection, _ = pair
    connection._silence = 600.0
    threading.Timer(0.1, connection.abort).start()
    with pytest.raises(PeerError, match="gone"):
        connection.receive(Answer)


def test_the_address_is_that_of_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address() == LOCAL
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none9")
    with pytest.raises(OSError, match="none9"):
        own_address()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    family, host = own_address()
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
