"""Connections above the limit of a replica server are closed before they cost a thread."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from monitor.memory import replica_server
from monitor.memory.replica_server import ReplicaServer, ReplicaStore
from tests.support.peering import KEY, LOCAL


def test_no_thread_is_made_for_a_connection_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class Counted(threading.Thread):
        def start(self) -> None:
            made.append(self.name)
            super().start()

    monkeypatch.setattr(replica_server, "_MAX_CONNECTIONS", 2)
    monkeypatch.setattr(replica_server.threading, "Thread", Counted)
    server = ReplicaServer(LOCAL, KEY, ReplicaStore(2), 60.0)
    guests = [socket.create_connection(server.endpoint[1:]) for _ in range(8)]
    try:
        closed = 0
        for guest in guests:  # served ones are sent a nonce; the others are closed
            guest.settimeout(60.0)
            try:
                closed += not guest.recv(1)
            except ConnectionResetError:
                closed += 1
        assert closed == 6
        assert made.count("driftpoint-replica") == 2
        guests.pop(0).close()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and len(server._connections) > 1:
            time.sleep(0.01)
        guests.append(socket.create_connection(server.endpoint[1:]))
        guests[-1].settimeout(60.0)
        assert guests[-1].recv(1), "a place that a guest left is free again"
    finally:
        for guest in guests:
            guest.close()
        server.close()
