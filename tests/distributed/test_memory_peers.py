"""Replicas on other nodes: a node is lost with its memory, and the job goes on from what its peer kept of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from store.memory.held import look
from store.names import SaveId
from tests.support.memory_places import DDP, Place, hashes, resumed, said

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as shared:
        yield Place(tmp_path, Path(shared), {"peers": True})


def kept(place: Place, node: str, step: int) -> dict[int, bool]:
    """By rank, whose share of a version lies on a node: whether as a replica."""
    held = look(place.tier(node)).versions.get(SaveId(step, 1), {})
    return {rank: one.record.replica for rank, one in held.items()}


def test_a_lost_node_comes_back_from_its_peer(place: Place) -> None:
    """Two ranks of three share a node; that one is lost, and all that they had comes from replicas."""
    first = place.life("first", 3, steps=8, nodes=[0, 0, 1], case=DDP)
    assert kept(place, "node0", 8) == {0: False, 1: False, 2: True}
    assert kept(place, "node1", 8) == {0: True, 1: True, 2: False}
    shutil.rmtree(place.shared / "node0")
    again = place.life("second", 3, nodes=[0, 0, 1], case=DDP)
    assert resumed(again, 3) == (8, True)
    assert [again.one("resumed", rank=rank)["hashes"] for rank in range(3)] == hashes(first, 8, 3)
    assert all("peer" in one["sources"] for one in again.of("resumed"))
    assert said(again, "2 of its ranks from what peers had kept")
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
    again = place.life("second", 3, every=5, nodes="own")  # node 1 is a new one, and the others changed places
    assert resumed(again, 3) == (13, True)
    assert [again.one("resumed", rank=rank)["hashes"] for rank in range(3)] == hashes(first, 13, 3)
    place.ended_well(again)
