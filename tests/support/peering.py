"""A rank that keeps another one's replicas, in this process or in one of its own, and versions to send to it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from monitor.memory.replica_client import ReplicaSender
from monitor.memory.replica_server import ReplicaServer, ReplicaStore
from monitor.memory.transport import Connection, Endpoint, new_connection
from store.memory.arena import Arena
from store.memory.index import scan_node
from store.memory.layout import READER, Tier, VersionRecord
from store.names import RAW, SaveId
from store.schema import Entry, digest
from tests.support.made_versions import CLAIM, head_of, part_of, tier_at
from tests.support.processes import script

KEY = b"t" * 32
LOCAL = (2, "127.0.0.1")


@dataclass
class ReplicaTarget:
    """Keeps replicas in this process. tier: of its node."""

    tier: Tier
    replicas: ReplicaStore
    server: ReplicaServer

    def versions(self, rank: int = 0) -> list[int]:
        """Steps of which there is a replica of the rank."""
        found = scan_node(self.tier).versions
        return sorted(save.step for save, held in found.items() if rank in held and held[rank].record.replica)


@contextmanager
def replica_target(
    base: Path, nbytes: int = 256, sources: tuple[int, ...] = (0,), silence: float = 60.0
) -> Iterator[ReplicaTarget]:
    replicas = ReplicaStore(2)
    tier = tier_at(base)
    assert replicas.take(tier, 1, dict.fromkeys(sources, nbytes), None) is None
    server = ReplicaServer(LOCAL, KEY, replicas, silence)
    try:
        yield ReplicaTarget(tier, replicas, server)
    finally:
        server.close()
        replicas.close(remove=True)


_TARGET = """
import json, sys
from pathlib import Path
from tests.support.peering import replica_target
with replica_target(Path(sys.argv[1]), int(sys.argv[2])) as one:
    print(json.dumps(one.server.endpoint), flush=True)
    sys.stdin.read()
"""


@dataclass
class TargetProcess:
    """A replica target in a process of its own."""

    tier: Tier
    endpoint: Endpoint
    process: subprocess.Popen[str]


@contextmanager
def target_process(base: Path, nbytes: int) -> Iterator[TargetProcess]:
    with script(_TARGET, base, nbytes) as (process, line):
        family, host, port = json.loads(line)
        yield TargetProcess(tier_at(base), (family, host, port), process)


def sender_to(endpoint: Endpoint, timeout: float = 120.0, key: bytes = KEY) -> ReplicaSender:
    """Of rank 0; rank 1 keeps its replica."""
    return ReplicaSender(0, 1, endpoint, key, timeout)


def connected(endpoint: Endpoint, key: bytes = KEY, silence: float = 60.0) -> Connection:
    """An authenticated connection. PeerError."""
    connection = new_connection(endpoint, silence)
    connection.connect(endpoint, key)
    return connection


def pattern(save: SaveId, nbytes: int) -> bytes:
    """What rank 0 holds in a large version."""
    word = digest(save.name.encode()).encode()
    return (word * (nbytes // len(word) + 1))[:nbytes]


def large(arena: Arena, slot: int, save: SaveId, nbytes: int) -> None:
    """Rank 0's share of a version with a payload of so many bytes, whole."""
    data = pattern(save, nbytes)
    entry = Entry(
        layer="w", slot="fp32", fqn="w", start=0, numel=nbytes // 4, dtype="F32", encoding=RAW,
        offset=0, nbytes=nbytes, xxh3_128=digest(data),
    )  # fmt: skip
    part = part_of(save, 0, 1, entries=(entry,), payload_bytes=nbytes)
    arena.room(slot, nbytes)
    arena.write_at(slot, 0, data)
    arena.seal(slot, VersionRecord(reader=READER, claim=CLAIM, part=part, head=head_of(save, 1, parts=[part])))


def sent(sender: ReplicaSender, arena: Arena, slot: int, save: SaveId, keep: SaveId | None = None) -> bool:
    """Send a version and wait for what becomes of it."""
    sender.offer(save, *arena.files(slot), keep)
    assert sender.wait(180)
    return sender.sent == save
