"""The memory tier on two ranks: other worlds, two nodes, a rank that lacks a version, has no room, raises or dies.

Whatever happens to one rank, both resume the same state, it is a whole one, and training never waits for good.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from monitor.adapters.module_tensors import torch_dtype
from store.memory.index import assemble_version, rank_share, scan_node
from store.memory.layout import Tier
from store.memory.overlay import Overlay
from store.names import SaveId
from store.storage.local import LocalFiles
from tests.support.entries import read_entry
from tests.support.launch import torchrun
from tests.support.memory_places import DDP, FSDP2, ZERO2, ZERO3, Place, hashes, resumed, said
from tests.support.mounts import shared_memory

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with shared_memory() as shared:
        yield Place(tmp_path, shared)


def in_memory(tier: Tier, save: SaveId) -> dict[tuple[str, str], torch.Tensor]:
    """Whole parameters as the version has them, flattened; every byte checked."""
    node = scan_node(tier)
    version = assemble_version(save, [rank_share(node.versions[save])], node)
    files, found = Overlay(LocalFiles(tier.base), version), {}
    for part in version.records.values():
        for entry in part.entries:
            data = bytearray(entry.nbytes)
            read_entry(files, part, entry, memoryview(data))
            total = 1
            for length in version.manifest.tensors[entry.fqn].shape:
                total *= length
            dtype = torch_dtype(entry.dtype)
            whole = found.setdefault((entry.fqn, entry.slot), torch.zeros(total, dtype=dtype))
            whole[entry.start : entry.stop] = torch.frombuffer(data, dtype=dtype)
    return found


@pytest.mark.parametrize(
    ("before", "after", "case"), [(2, 1, ZERO2), (1, 2, ZERO2), (2, 1, ZERO3), (1, 2, DDP), (2, 1, FSDP2)]
)
def test_another_world_on_one_machine_reads_it(place: Place, before: int, after: int, case: dict[str, Any]) -> None:
    first = place.life("first", before, steps=8, case=case)
    wanted = in_memory(place.tier(), SaveId(8, 1))
    again = place.life("second", after, case=case, dump=str(place.directory))
    assert resumed(again, after) == (8, True)
    compared = 0
    for rank in range(after):
        for fqn, slot, start, tensor in torch.load(place.directory / f"rank{rank}.pt", weights_only=True):
            if (fqn, slot) in wanted:
                assert torch.equal(wanted[fqn, slot][start : start + tensor.numel()], tensor), (fqn, slot)
                compared += tensor.numel()
    assert compared == sum(value.numel() for value in wanted.values())
    assert first.of("kept")
    place.ended_well(again)


def test_ranks_on_two_nodes_read_their_own_memory(place: Place) -> None:
    """What one rank keeps no other can read; ZeRO-2 ranks need only their own, and rank 0's counters."""
    first = place.life("first", steps=8, nodes="own")
    assert [len(scan_node(place.tier(f"node{rank}")).versions[SaveId(8, 1)]) for rank in (0, 1)] == [1, 1]
    again = place.life("second", nodes="own")
    assert resumed(again) == (8, True)
    assert [again.one("resumed", rank=rank)["hashes"] for rank in (0, 1)] == hashes(first, 8)
    place.ended_well(again)


def test_where_ranks_need_each_others_memory_and_have_it_not_the_store_serves(place: Place) -> None:
    place.life("first", steps=8, nodes="own", case=DDP)
    again = place.life("second", nodes="own", case=DDP)
    assert resumed(again) == (6, False)
    assert said(again, "not every rank finds the bytes that it needs on its own node")
    place.ended_well(again)


def test_ranks_that_changed_nodes_are_served_by_the_store(place: Place) -> None:
    place.life("first", steps=8, nodes="own")
    (place.shared / "node0").rename(place.shared / "x")
    (place.shared / "node1").rename(place.shared / "node0")
    (place.shared / "x").rename(place.shared / "node1")
    again = place.life("second", nodes="own")
    assert resumed(again) == (6, False)
    assert again.of("end")


@pytest.mark.parametrize("versions", [1, 2])
def test_a_rank_that_lacks_versions_takes_all_ranks_back_to_what_all_have(place: Place, versions: int) -> None:
    first = place.life("first", steps=8)
    for step in (8, 7)[:versions]:
        held = scan_node(place.tier()).versions[SaveId(step, 1)][1]
        held.payload.with_suffix(".json").unlink()
    again = place.life("second")
    assert resumed(again) == ((7, True) if versions == 1 else (6, False))
    assert [again.one("resumed", rank=rank)["hashes"] for rank in (0, 1)] == hashes(first, 7 if versions == 1 else 6)
    place.ended_well(again)


def test_a_node_that_was_lost_takes_all_ranks_to_the_store(place: Place) -> None:
    place.life("first", steps=8, nodes="own")
    (place.shared / "node1").rename(place.shared / "gone")
    again = place.life("second", nodes="own")
    assert resumed(again) == (6, False)
    assert again.of("end")


@pytest.mark.needs_root
def test_one_rank_without_room_turns_it_off_on_all(place: Place) -> None:
    small = place.directory / "small"
    small.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here, so a rank without room is NOT tested: {done.stderr.strip()}")
    try:
        first = place.life("first", steps=8, paths={"1": str(small)})
        again = place.life("second", paths={"1": str(small)})
    finally:
        subprocess.run(["umount", "-l", small], check=True)
    assert all(one["off"] for one in first.of("kept"))
    assert said(first, "rank 1: ")
    assert resumed(again) == (6, False)
    place.ended_well(again)


def test_one_rank_that_raises_takes_the_version_from_all(place: Place) -> None:
    first = place.life("first", steps=11, moody=1, fails=[8, 10])
    assert {one["newest"] for one in first.of("kept", step=11)} == {9}, "the save of step 9 is one, too"
    again = place.life("second")
    assert resumed(again) == (11, True)
    assert [again.one("resumed", rank=rank)["hashes"] for rank in (0, 1)] == hashes(first, 11)
    place.ended_well(again)


def test_one_rank_that_raises_again_and_again_turns_it_off_on_all(place: Place) -> None:
    first = place.life("first", steps=14, moody=1, fails=list(range(8, 15)), every=3, commit_seconds=3.0)
    assert {one["off"] for one in first.of("kept", step=14)} == {True}
    again = place.life("second")
    step, from_memory = resumed(again)
    assert step == 7 and from_memory, "saves fail as well: the last version that all ranks had is the newest state"
    assert [again.one("resumed", rank=rank)["hashes"] for rank in (0, 1)] == hashes(first, 7)
    place.ended_well(again)


@pytest.mark.parametrize("mutant", [False, True])
def test_that_ranks_agree_is_what_keeps_a_version_for_all(place: Place, mutant: bool) -> None:
    """Two versions in a row fail on one rank. Taken out, the agreement leaves none that both ranks have."""
    place.life("first", steps=11, moody=1, fails=[10, 11], every=4, mutant=mutant)
    again = place.life("second", every=4)
    assert resumed(again) == ((8, False) if mutant else (9, True))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_while_it_keeps_a_version(place: Place, rank: int, when: str) -> None:
    first = place.life("first", steps=12, dies=rank, dies_at=8, dies_when=when)
    again = place.life("second")
    step, from_memory = resumed(again)
    assert from_memory and step in (7, 8)
    if when == "before":
        assert step == 7, "no version that one rank lacks"
    assert [again.one("resumed", rank=rank)["hashes"] for rank in (0, 1)] == hashes(first, step)
    place.ended_well(again)


@pytest.mark.parametrize("setting", [{"enabled": False}, {"enabled": True, "every": 3}])
def test_ranks_that_are_configured_otherwise_are_refused_instead_of_waiting(
    place: Place, setting: dict[str, Any]
) -> None:
    settings = {"1": {"memory": {"path": str(place.shared), **setting}}}
    done = torchrun(
        "memory_ranks.py",
        2,
        {"case": DDP, "shared": str(place.shared), "life": "second", "settings": settings},
        place.directory,
        timeout=180,
    )
    assert done.code not in (0, -1)
    assert "ConfigError" in done.output
