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
