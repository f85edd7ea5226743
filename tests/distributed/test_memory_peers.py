"""Replicas on other nodes: a node is lost with its memory, and the job goes on from what its peer kept of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from store.memory.index import scan_node
from store.names import SaveId
from tests.support.memory_places import DDP, Place, hashes, resumed, said
from tests.support.mounts import shared_memory, tmpfs
from tests.support.netns import two_networks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with shared_memory() as shared:
        yield Place(tmp_path, shared, {"peers": True})


def kept(place: Place, node: str, step: int) -> dict[int, bool]:
    """By rank, whose share of a version lies on a node: whether as a replica."""
    held = scan_node(place.tier(node)).versions.get(SaveId(step, 1), {})
    return {rank: one.record.replica for rank, one in held.items()}


def flipped(place: Place, node: str, step: int, slot: str) -> set[str]:
    """Change a byte of rank 0's replica, in this slot of a layer. Parameters of that layer, whichever rank has them."""
    version = scan_node(place.tier(node)).versions[SaveId(step, 1)]
    held = version[0]
    entry = next(one for one in held.record.part.entries if one.slot == slot)
    with held.payload.open("r+b") as file:
        file.seek(entry.offset)
        byte = file.read(1)
        file.seek(entry.offset)
        file.write(bytes([byte[0] ^ 1]))
    return {one.fqn for each in version.values() for one in each.record.part.entries if one.layer == entry.layer}


@pytest.mark.core
def test_a_lost_node_comes_back_from_its_peer_but_for_what_is_damaged_there(place: Place) -> None:
    """Two ranks of three share a node; that one is lost, and all that they had comes from replicas. The layer of which
    a byte is wrong comes from the store, on all ranks."""
    first = place.life("first", 3, steps=8, nodes=[0, 0, 1], case=DDP)
    assert kept(place, "node0", 8) == {0: False, 1: False, 2: True}
    assert kept(place, "node1", 8) == {0: True, 1: True, 2: False}
    shutil.rmtree(place.shared / "node0")
    damaged = flipped(place, "node1", 8, "exp_avg")
    again = place.life("second", 3, nodes=[0, 0, 1], case=DDP)
    assert resumed(again, 3) == (8, True)
    older = 0
    for rank, (new, old) in enumerate(zip(hashes(first, 8, 3), hashes(first, 6, 3), strict=True)):
        for name, found in again.one("resumed", rank=rank)["hashes"].items():
            fqn, slot = name.split("|")[:2]
            aged = fqn in damaged and slot == "exp_avg"
            assert found == (old if aged else new)[name], name
            older += aged and old[name] != new[name]
    assert older and not any(one["exact"] for one in again.of("resumed"))
    assert all("peer" in one["sources"] for one in again.of("resumed"))
    assert said(again, "2 of its ranks from replicas on other nodes")
    place.ended_well(again)


def test_there_is_always_a_version_that_all_have_at_home_and_at_their_peers(place: Place) -> None:
    """Three nodes. From step 13 on nothing gets through to node 1, which keeps rank 0's replica: steps go on, version
    12 stays where it is, and so node 0 may be lost, with 12 as the newest that can be had of it, or node 1, with 13."""
    silent = {"relayed": 1, "silent_from": 13, "peer_seconds": 600.0}
    first = place.life("first", 3, steps=14, every=5, nodes="own", **silent)
    assert [one["busy"] for one in first.of("sent", rank=0) if one["step"] >= 12] == [False, True, True]
    assert {one["newest"] for one in first.of("kept", step=14)} == {13}
    saved = place.directory / "saved"
    for name in ("store", "store.trace.jsonl"):
        found = place.directory / name
        (shutil.copytree if found.is_dir() else shutil.copy2)(found, saved.with_name(f"saved-{name}"))
    shutil.copytree(place.shared, saved)

    shutil.rmtree(place.shared / "node0")
    again = place.life("second", 3, every=5, nodes="own")
    assert resumed(again, 3) == (12, True)
    assert [again.one("resumed", rank=rank)["hashes"] for rank in range(3)] == hashes(first, 12, 3)
    place.ended_well(again)

    for name in ("store", "store.trace.jsonl"):
        found = saved.with_name(f"saved-{name}")
        if found.is_dir():
            shutil.rmtree(place.directory / name)
        found.replace(place.directory / name)
    shutil.copytree(saved / "node0", place.shared / "node2", dirs_exist_ok=True)
    shutil.copytree(saved / "node2", place.shared / "node0", dirs_exist_ok=True)
    again = place.life(
        "second", 3, every=5, nodes="own", back=True
    )  # node 1 is a new one, and the others changed places
    assert resumed(again, 3) == (13, True)
    assert [again.one("resumed", rank=rank)["hashes"] for rank in range(3)] == hashes(first, 13, 3)
    back = again.one("back", rank=0)["step"]  # and once more, in the same processes
    assert back > 13 and [again.one("back", rank=rank)["hashes"] for rank in range(3)] == hashes(again, back, 3)
    assert {one["save"] for one in again.of("sent_again")} == {f"{back + 4:08d}-000002"}
    place.ended_well(again)


@pytest.mark.needs_root
def test_without_room_for_replicas_there_are_none_and_memory_works_at_home(place: Place) -> None:
    with tmpfs(place.directory / "small", "5M") as small:
        first = place.life("first", steps=8, case=DDP, paths={"1": str(small)})
        assert not [path for path in small.rglob("rank-00000.*") if path.suffix != ".owner"]
    assert said(first, "nothing is replicated to other nodes: rank 1: no room in memory")
    assert {(one["newest"], one["off"]) for one in first.of("kept", step=8)} == {(7, False)}
    assert kept(place, "", 8) == {0: False}


@pytest.mark.needs_root
def test_a_node_on_another_network_is_lost(place: Place) -> None:
    """Ranks reach each other at the address of an interface that is not the loopback's."""
    with two_networks() as place.networks:
        first = place.life("first", steps=8, nodes="own")
        shutil.rmtree(place.shared / "node1")
        again = place.life("second", nodes="own")
    assert resumed(again) == (8, True)
    assert [again.one("resumed", rank=rank)["hashes"] for rank in range(2)] == hashes(first, 8)
    place.ended_well(again)
