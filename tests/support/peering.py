"""One rank that keeps another one's replicas, in this process or in one of its own, and versions to send to it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from monitor.peers.door import Door
from monitor.peers.replicas import Replicas
from monitor.peers.sender import Sender
from monitor.peers.wire import Place
from store.memory.arena import Arena
from store.memory.held import look
from store.memory.record import READER, VersionRecord
from store.memory.tier import Tier
from store.names import RAW, SaveId
from store.record import digest
from store.schema import Entry
from tests.support.cli import environment
from tests.support.made_versions import CLAIM, head_of, part_of, tier_at

TOKEN = b"t" * 32
LOCAL = (2, "127.0.0.1")


@dataclass
class Keeper:
    """What keeps replicas, in this process. tier: of its node."""

    tier: Tier
    replicas: Replicas
    door: Door

    def versions(self, rank: int = 0) -> list[int]:
        """Steps of which there is a replica of the rank."""
        found = look(self.tier).versions
        return sorted(save.step for save, held in found.items() if rank in held and held[rank].record.replica)


@contextmanager
def keeper(base: Path, nbytes: int = 256, wards: tuple[int, ...] = (0,), silence: float = 60.0) -> Iterator[Keeper]:
    replicas = Replicas(2)
    tier = tier_at(base)
    assert replicas.take(tier, 1, dict.fromkeys(wards, nbytes), None) is None
    door = Door(LOCAL, TOKEN, replicas.receive, silence)
    try:
        yield Keeper(tier, replicas, door)
    finally:
        door.close()
        replicas.close(remove=True)


_KEEPER = """
import json, sys
from pathlib import Path
from tests.support.peering import keeper
with keeper(Path(sys.argv[1]), int(sys.argv[2])) as one:
    print(json.dumps(one.door.place), flush=True)
    sys.stdin.read()
"""


@dataclass
class Living:
    """A keeper in a process of its own."""

    tier: Tier
    place: Place
    process: subprocess.Popen[str]


@contextmanager
def living_keeper(base: Path, nbytes: int) -> Iterator[Living]:
    process = subprocess.Popen(
        [sys.executable, "-c", _KEEPER, str(base), str(nbytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        family, host, port = json.loads(process.stdout.readline())
        yield Living(tier_at(base), (family, host, port), process)
    finally:
        process.kill()
        process.wait(timeout=180)
        process.stdin.close()
        process.stdout.close()


def sender_to(place: Place, timeout: float = 120.0, token: bytes = TOKEN) -> Sender:
    """Of rank 0; rank 1 keeps its replica."""
    return Sender(0, 1, place, token, timeout)


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


def sent(sender: Sender, arena: Arena, slot: int, save: SaveId, keep: SaveId | None = None) -> bool:
    """Send a version and wait for what becomes of it."""
    sender.offer(save, *arena.files(slot), keep)
    assert sender._writer.join(180)
    return sender.sent == save
