"""Versions that go to a peer and are kept there: real sockets and files, and real processes where one is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

import monitor.memory.replica_client
from monitor.memory.replica_client import RemoteNode
from monitor.memory.replica_server import ReplicaStore
from monitor.memory.transport import Answer, Put, Request
from store.errors import MissingError
from store.memory.arena import Arena
from store.memory.index import scan_node
from store.memory.layout import Tier, VersionRecord, parse_record
from store.names import SaveId
from store.schema import READER
from tests.support.made_versions import CLAIM, NBYTES, content, head_of, keep, part_of, tier_at
from tests.support.mounts import tmpfs
from tests.support.peering import (
    KEY,
    ReplicaTarget,
    connected,
    large,
    pattern,
    replica_target,
    sender_to,
    sent,
    target_process,
)

LARGE = 48 << 20
"""More than sockets hold by themselves."""


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena(tier_at(tmp_path / "mine"), 1, 0)
    yield arena
    arena.close(remove=True)


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[ReplicaTarget]:
    with replica_target(tmp_path / "theirs") as one:
        yield one


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 180
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def replica(tier: Tier, save: SaveId, nbytes: int = NBYTES) -> bytes:
    return scan_node(tier).versions[save][0].payload.read_bytes()[:nbytes]


def test_versions_arrive_and_take_turns(mine: Arena, theirs: ReplicaTarget) -> None:
    """The one that all ranks count on stays; the other one is written over."""
    sender = sender_to(theirs.server.endpoint)
    before = None
    for step in range(1, 6):
        save = SaveId(step, 1)
        keep(mine, step % 2, save)
        assert sent(sender, mine, step % 2, save, before)
        assert theirs.versions() == sorted({max(1, step - 1), step})
        assert replica(theirs.tier, save) == content(save, 0)
        before = save
    record = scan_node(theirs.tier).versions[SaveId(5, 1)][0].record
    assert record == parse_record(mine.files(1)[0].read_bytes(), "").replace(replica=True)
    sender.close()


def test_a_changed_byte_is_refused_and_the_older_replica_stays(
    mine: Arena, theirs: ReplicaTarget, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor.memory.replica_client, "_RETRY_DELAYS", (0.0,))
    sender = sender_to(theirs.server.endpoint)
    keep(mine, 0, SaveId(1, 1))
    assert sent(sender, mine, 0, SaveId(1, 1))
    for step in (2, 3):
        keep(mine, 1, SaveId(step, 1))
        mine.write_at(1, 7, b"?")
        assert not sent(sender, mine, 1, SaveId(step, 1), SaveId(1, 1))
        assert theirs.versions() == [1]
        assert sender.collect() == ([pytest.approx(0, abs=60)] if step == 2 else [], True)
    assert len([one for one in caplog.records if "did not arrive" in one.message]) == 1
    keep(mine, 1, SaveId(4, 1))
    assert sent(sender, mine, 1, SaveId(4, 1), SaveId(1, 1))
    assert theirs.versions() == [1, 4] and "again" in caplog.text
    sender.close()


def test_what_is_not_its_to_keep_is_refused(mine: Arena, theirs: ReplicaTarget, tmp_path: Path) -> None:
    """Another store's version, another rank's, one of another job: none of it is taken, and the door stays open."""
    save, store_id = SaveId(1, 1), "cd" * 16
    other = Arena(Tier(tmp_path / "mine", store_id), 1, 0)
    part = part_of(save, 0, 1, store_id=store_id)
    other.room(0, NBYTES)
    other.seal(0, VersionRecord(reader=READER, claim=CLAIM, part=part, head=head_of(save, 1, store_id=store_id)))
    assert not sent(sender_to(theirs.server.endpoint), other, 0, SaveId(1, 1))
    keep(mine, 0, SaveId(2, 1), rank=3, world=4)
    assert not sent(sender_to(theirs.server.endpoint), mine, 0, SaveId(2, 1))
    keep(mine, 0, SaveId(1, 1))
    stranger = sender_to(theirs.server.endpoint, key=b"x" * 32)
    assert not sent(stranger, mine, 0, SaveId(1, 1))
    assert theirs.versions() == []
    assert sent(sender_to(theirs.server.endpoint), mine, 0, SaveId(1, 1))
    other.close(remove=True)


def test_without_room_nothing_is_kept_and_why_is_said(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "4M") as small:
        replicas = ReplicaStore(2)
        problem = replicas.take(tier_at(small), 1, {0: 3 << 20}, None)
        assert problem is not None and "no room in memory" in problem
        replicas.close(remove=True)
        assert not list(small.rglob("*.payload"))


def test_a_version_that_grew_too_large_is_refused(mine: Arena, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "8M") as small, replica_target(small) as theirs:
        sender = sender_to(theirs.server.endpoint)
        keep(mine, 0, SaveId(1, 1))
        assert sent(sender, mine, 0, SaveId(1, 1))
        large(mine, 1, SaveId(2, 1), 16 << 20)
        assert not sent(sender, mine, 1, SaveId(2, 1), SaveId(1, 1))
        assert theirs.versions() == [1]


@pytest.mark.slow
def test_a_stopped_peer_costs_the_replica_only(
    mine: Arena, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped in mid-transfer; whoever offers never waits, the replica before stays, and later ones arrive."""
    monkeypatch.setattr(monitor.memory.replica_client, "_RETRY_DELAYS", (0.0,))
    with target_process(tmp_path / "theirs", LARGE) as theirs:
        sender = sender_to(theirs.endpoint, timeout=120.0)
        large(mine, 0, SaveId(1, 1), LARGE)
        assert sent(sender, mine, 0, SaveId(1, 1))
        sender._timeout = 1.5
        large(mine, 1, SaveId(2, 1), LARGE)
        os.kill(theirs.process.pid, signal.SIGSTOP)
        sender.offer(SaveId(2, 1), *mine.files(1), SaveId(1, 1))
        assert sender.busy
        assert sender.wait(180)
        assert sender.sent == SaveId(1, 1) and sender.collect()[1]
        assert "silent, or too slow" in caplog.text
        with pytest.raises(MissingError, match="silent"):  # nor does a resume wait for it
            RemoteNode(theirs.endpoint, KEY, 0.3).read(SaveId(1, 1), 0, 0, memoryview(bytearray(8)))
        assert SaveId(1, 1) in scan_node(theirs.tier).versions
        os.kill(theirs.process.pid, signal.SIGCONT)
        sender._timeout = 600.0
        until(lambda: sent(sender, mine, 1, SaveId(2, 1), SaveId(1, 1)))
        assert replica(theirs.tier, SaveId(2, 1), LARGE) == pattern(SaveId(2, 1), LARGE)

        os.kill(theirs.process.pid, signal.SIGSTOP)  # nobody who ends waits for it
        sender.offer(SaveId(2, 1), *mine.files(1), SaveId(1, 1))
        until(lambda: sender._connection is not None)
        thread = threading.Thread(target=sender.close)
        thread.start()
        thread.join(180)
        assert not thread.is_alive() and not sender.busy
        assert sender.collect()[1] is False  # who ends has nothing to complain of


@pytest.mark.slow
def test_a_peer_that_is_killed_in_mid_transfer_leaves_the_older_replica(mine: Arena, tmp_path: Path) -> None:
    with target_process(tmp_path / "theirs", LARGE) as theirs:
        sender = sender_to(theirs.endpoint)
        for slot, step in ((0, 1), (1, 2)):
            large(mine, slot, SaveId(step, 1), LARGE)
            assert sent(sender, mine, slot, SaveId(step, 1), SaveId(1, 1) if step > 1 else None)
        large(mine, 0, SaveId(3, 1), LARGE)
        record, _ = mine.files(0)
        connection = connected(theirs.endpoint, silence=120.0)
        data = record.read_bytes()
        connection.send(Request(request=Put(rank=0, keep=SaveId(2, 1).name, record=len(data), payload=LARGE)))
        connection.send_bytes(data)
        assert connection.receive(Answer).ok
        connection.send_bytes(pattern(SaveId(3, 1), LARGE)[: LARGE // 2])
        place = theirs.tier.generation(1)
        half = pattern(SaveId(3, 1), 64)
        until(lambda: any(place.payload(0, slot).open("rb").read(64) == half for slot in (0, 1)))
        theirs.process.kill()
        theirs.process.wait(180)
        left = scan_node(theirs.tier)
        assert [save.step for save in left.versions] == [2] and not left.problems
        assert replica(theirs.tier, SaveId(2, 1), LARGE) == pattern(SaveId(2, 1), LARGE)
        connection.close()
        sender.close()


def test_payloads_are_read_from_afar_as_long_as_they_are_shown(mine: Arena, theirs: ReplicaTarget) -> None:
    save = SaveId(4, 1)
    keep(mine, 0, save)
    theirs.server.serve({(save, 0): mine.files(0)[1]})
    node = RemoteNode(theirs.server.endpoint, KEY, 120.0)
    read, target = partial(node.read, save, 0), bytearray(100)
    read(50, memoryview(target))
    assert bytes(target) == content(save, 0)[50:150]
    theirs.server.break_off()  # between two pieces: it connects anew
    read(0, memoryview(target))
    assert bytes(target) == content(save, 0)[:100]
    theirs.server.serve({})
    with pytest.raises(MissingError, match="not here"):
        read(0, memoryview(target))
    theirs.server.serve({(save, 0): mine.files(0)[1]})
    with pytest.raises(MissingError):  # what failed once is not asked again
        read(0, memoryview(target))
    node.close()


def test_threads_read_from_one_node_at_once(mine: Arena, theirs: ReplicaTarget) -> None:
    save = SaveId(4, 1)
    keep(mine, 0, save)
    theirs.server.serve({(save, 0): mine.files(0)[1]})
    node = RemoteNode(theirs.server.endpoint, KEY, 120.0)

    def read(offset: int) -> bytes:
        target = bytearray(50)
        node.read(save, 0, offset, memoryview(target))
        return bytes(target)

    offsets = [50 * (turn % 2) for turn in range(200)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(read, offsets))
    assert found == [content(save, 0)[offset : offset + 50] for offset in offsets]
    node.close()


def test_an_end_beyond_the_payload_is_not_read(mine: Arena, theirs: ReplicaTarget) -> None:
    save = SaveId(4, 1)
    keep(mine, 0, save)
    theirs.server.serve({(save, 0): mine.files(0)[1]})
    node = RemoteNode(theirs.server.endpoint, KEY, 120.0)
    with pytest.raises(MissingError, match="not so long"):
        node.read(save, 0, 0, memoryview(bytearray(1 << 20)))
    node.close()
