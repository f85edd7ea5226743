"""What lies in memory is believed only if every byte of it is right: garbage, flips, other stores, half versions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from store.catalog import Catalog
from store.errors import DamagedError, NewerFormatError, StorageError
from store.memory.arena import Arena
from store.memory.index import RankShare, assemble_version, rank_share, scan_node
from store.memory.layout import Tier, VersionRecord, parse_record
from store.memory.overlay import Overlay
from store.names import SaveId
from store.schema import READER, PartRecord, StoreRecord, seal, to_bytes
from store.storage.local import LocalFiles
from tests.support.made_versions import (
    CLAIM,
    NBYTES,
    STORE,
    abandon,
    content,
    head_of,
    keep,
    part_of,
    record_of,
    tier_at,
    together,
    values,
    wanted,
    whole,
)

SAVE = SaveId(5, 1)


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return tier_at(tmp_path / "shm")


def kept(tier: Tier, world: int = 1) -> None:
    for rank in range(world):
        arena = Arena(tier, 1, rank)
        keep(arena, 0, SAVE, rank, world)
        abandon(arena)


def replaced(tier: Tier, record: VersionRecord, rank: int = 0) -> None:
    tier.generation(1).record(rank, 0).write_bytes(to_bytes(record))


# ---- one record


@pytest.mark.parametrize("data", [b"", b"{}", b"\0" * 4096, b"not a record", b"[" * 100_000])
def test_garbage_is_told_and_is_no_version(tier: Tier, data: bytes) -> None:
    kept(tier)
    tier.generation(1).record(0, 0).write_bytes(data)
    node = scan_node(tier)
    assert not node.versions
    assert len(node.problems) == 1 and "rank-00000.0.json" in node.problems[0]


def test_every_flipped_byte_of_a_record_is_found(tier: Tier) -> None:
    kept(tier)
    path = tier.generation(1).record(0, 0)
    data = path.read_bytes()
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        with pytest.raises(DamagedError):
            parse_record(bytes(flipped), str(path))


def test_every_truncated_record_is_found(tier: Tier) -> None:
    kept(tier)
    path = tier.generation(1).record(0, 0)
    data = path.read_bytes()
    for length in range(len(data)):
        with pytest.raises(DamagedError):
            parse_record(data[:length], str(path))


@pytest.mark.slow
def test_every_flipped_byte_of_a_payload_is_found_where_it_is_read(tier: Tier) -> None:
    kept(tier)
    payload = tier.generation(1).payload(0, 0)
    data = payload.read_bytes()
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        payload.write_bytes(flipped)
        if position < NBYTES:
            with pytest.raises(DamagedError):
                values(tier, SAVE)
        else:
            assert values(tier, SAVE) == wanted(SAVE), "beyond what the record names"


@pytest.mark.parametrize("length", [0, 1, NBYTES - 1])
def test_a_payload_that_is_too_short_is_told(tier: Tier, length: int) -> None:
    kept(tier)
    payload = tier.generation(1).payload(0, 0)
    payload.write_bytes(payload.read_bytes()[:length])
    node = scan_node(tier)
    assert not node.versions and f"has {length} bytes instead of {NBYTES}" in node.problems[0]


def test_a_payload_that_is_gone_is_told(tier: Tier) -> None:
    kept(tier)
    tier.generation(1).payload(0, 0).unlink()
    node = scan_node(tier)
    assert not node.versions and "is not there, though" in node.problems[0]


def test_a_record_for_a_later_release_says_so(tier: Tier) -> None:
    kept(tier)
    record = record_of(SAVE, 0, 1).replace(reader=READER + 1)
    replaced(tier, record)
    with pytest.raises(NewerFormatError):
        parse_record(to_bytes(record), "it")
    node = scan_node(tier)
    assert not node.versions and "newer release" in node.problems[0]


def test_a_folder_where_a_record_should_be_is_told(tier: Tier) -> None:
    kept(tier)
    tier.generation(1).record(0, 0).unlink()
    tier.generation(1).record(0, 0).mkdir()
    node = scan_node(tier)
    assert not node.versions and "is not a regular file" in node.problems[0]


OTHERS: dict[str, Callable[[], VersionRecord]] = {
    "another store": lambda: VersionRecord(
        reader=READER,
        claim=CLAIM,
        part=part_of(SAVE, 0, 1, store_id="cd" * 16),
        head=head_of(SAVE, 1, store_id="cd" * 16),
    ),
    "another rank": lambda: VersionRecord(reader=READER, claim=CLAIM, part=part_of(SAVE, 1, 2)),
    "a head of another save": lambda: VersionRecord(
        reader=READER, claim=CLAIM, part=part_of(SAVE, 0, 1), head=head_of(SaveId(6, 1), 1)
    ),
    "a head of another world": lambda: VersionRecord(
        reader=READER, claim=CLAIM, part=part_of(SAVE, 0, 1), head=head_of(SAVE, 2)
    ),
    "a payload with a header": lambda: VersionRecord(
        reader=READER, claim=CLAIM, part=part_of(SAVE, 0, 1, header_bytes=8, payload_bytes=NBYTES + 8)
    ),
    "bytes beyond its payload": lambda: VersionRecord(
        reader=READER, claim=CLAIM, part=part_of(SAVE, 0, 1, payload_bytes=NBYTES - 1), head=head_of(SAVE, 1)
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_sound_record_in_the_wrong_place_is_told(tier: Tier, what: str) -> None:
    kept(tier)
    replaced(tier, OTHERS[what]())
    node = scan_node(tier)
    assert not node.versions and len(node.problems) == 1


# ---- all ranks' records


@pytest.mark.parametrize(
    "part", [part_of(SAVE, 1, 2, plan="0" * 32), part_of(SAVE, 1, 3)], ids=["another decision", "another world size"]
)
def test_records_of_different_saves_are_not_one_version(tier: Tier, part: PartRecord) -> None:
    kept(tier, 2)
    replaced(tier, VersionRecord(reader=READER, claim=CLAIM, part=part), rank=1)
    with pytest.raises(DamagedError, match="do not belong together"):
        together(tier, SAVE)


def test_a_rank_without_its_share_of_a_tensor_makes_no_version(tier: Tier) -> None:
    """As a rank of FSDP2 that has not stepped yet, when others have optimizer state."""
    kept(tier, 2)
    part = part_of(SAVE, 1, 2)
    replaced(tier, VersionRecord(reader=READER, claim=CLAIM, part=part.replace(entries=())), rank=1)
    with pytest.raises(DamagedError, match="in memory holds 64 elements of w/fp32, whose shape is"):
        together(tier, SAVE)


def test_without_rank_0s_head_there_is_no_version(tier: Tier) -> None:
    kept(tier, 2)
    replaced(tier, VersionRecord(reader=READER, claim=CLAIM, part=part_of(SAVE, 0, 2)))
    with pytest.raises(DamagedError, match="lacks rank 0's head"):
        together(tier, SAVE)


def test_two_nodes_that_tell_of_other_bytes_of_one_rank_do_not_make_a_version(tier: Tier) -> None:
    kept(tier)
    share = rank_share(scan_node(tier).versions[SAVE])
    lying = RankShare({0: to_bytes(part_of(SAVE, 0, 1, facts={"a": 1}))}, None)
    with pytest.raises(DamagedError, match="two versions"):
        assemble_version(SAVE, [share, lying], scan_node(tier))


def test_what_differs_on_any_rank_is_told_of_the_version(tier: Tier) -> None:
    parts = {rank: to_bytes(part_of(SAVE, rank, 2).replace(differs=(f"of rank {rank}", "of all"))) for rank in (0, 1)}
    head = to_bytes(head_of(SAVE, 2).replace(differs=("of rank 0", "of all")))
    version = assemble_version(SAVE, [RankShare(parts, head)], scan_node(tier))
    assert version.manifest.differs == ("of rank 0", "of all", "of rank 1")


def test_two_heads_do_not_make_a_version(tier: Tier) -> None:
    kept(tier)
    share = rank_share(scan_node(tier).versions[SAVE])
    other = to_bytes(head_of(SAVE, 1).replace(policy="another"))
    with pytest.raises(DamagedError, match="two heads"):
        assemble_version(SAVE, [share, RankShare({}, other)], scan_node(tier))


def test_nodes_put_the_same_version_together_and_read_what_they_hold(tmp_path: Path) -> None:
    tiers = [tier_at(tmp_path / "one"), tier_at(tmp_path / "two")]
    for rank, tier in enumerate(tiers):
        arena = Arena(tier, 1, rank)
        keep(arena, 0, SAVE, rank, 2)
        abandon(arena)
    nodes = [scan_node(tier) for tier in tiers]
    shares = [rank_share(node.versions[SAVE]) for node in nodes]
    versions = [assemble_version(SAVE, shares, node) for node in nodes]
    assert versions[0].manifest == versions[1].manifest and versions[0].parts == versions[1].parts
    assert [list(version.payloads) for version in versions] == [[0], [1]]
    for rank, version in enumerate(versions):
        files = Overlay(LocalFiles(tmp_path), version)
        target = bytearray(NBYTES)
        files.read_into(f"segments/{SAVE.name}/rank-{rank:05d}.safetensors", 0, memoryview(target))
        assert bytes(target) == content(SAVE, rank)
        with pytest.raises(StorageError, match="another node"):
            files.read_into(f"segments/{SAVE.name}/rank-{1 - rank:05d}.safetensors", 0, memoryview(target))


def test_a_payload_of_another_attempt_is_not_read(tier: Tier) -> None:
    """This node's own record is another than the one that was told of its rank."""
    kept(tier)
    node = scan_node(tier)
    replaced(
        tier, VersionRecord(reader=READER, claim=CLAIM, part=part_of(SAVE, 0, 1, facts={"a": 1}), head=head_of(SAVE, 1))
    )
    version = assemble_version(SAVE, [rank_share(node.versions[SAVE])], scan_node(tier))
    assert not version.payloads


def test_a_damaged_version_does_not_hide_the_other(tier: Tier) -> None:
    arena = Arena(tier, 1, 0)
    keep(arena, 0, SaveId(4, 1))
    keep(arena, 1, SAVE)
    tier.generation(1).record(0, 1).write_bytes(b"rubbish")
    assert whole(tier) == {SaveId(4, 1): wanted(SaveId(4, 1))}
    arena.close(remove=True)


# ---- the store on top


def test_an_overlay_is_only_read_and_shows_what_is_below(tier: Tier, tmp_path: Path) -> None:
    kept(tier)
    below = LocalFiles(tmp_path / "store")
    (tmp_path / "store" / "manifests").mkdir(parents=True)
    (tmp_path / "store" / "manifests" / "00000004-000001.json").write_bytes(seal({}))
    (tmp_path / "store" / "segments" / SAVE.name).mkdir(parents=True)
    (tmp_path / "store" / "segments" / SAVE.name / "rank-00000.json").write_text("of a save that was not committed")
    files = Overlay(below, together(tier, SAVE))
    catalog = Catalog(files, StoreRecord(format=1, reader=1, store_id=STORE))
    assert catalog.saves() == [SAVE, SaveId(4, 1)]
    assert catalog.manifest(SAVE).save == SAVE
    assert files.list_dir(f"segments/{SAVE.name}") == ["rank-00000.json", "rank-00000.safetensors"]
    group = catalog.group(SAVE, catalog.manifest(SAVE).groups[SAVE.name])
    assert not group.problems and group.parts[0].save == SAVE
    for refused in (
        lambda: files.create("x"),
        lambda: files.link("x", "y"),
        lambda: files.rename("x", "y"),
        lambda: files.unlink("x"),
        lambda: files.make_dir("x"),
        lambda: files.remove_dir("x"),
        lambda: files.sync_dir("x"),
    ):
        with pytest.raises(StorageError, match="read-only"):
            refused()


def test_a_payload_that_vanishes_while_it_is_read_is_a_typed_error(tier: Tier, tmp_path: Path) -> None:
    kept(tier)
    version = together(tier, SAVE)
    tier.generation(1).payload(0, 0).unlink()
    target = memoryview(bytearray(NBYTES))
    path = f"segments/{SAVE.name}/rank-00000.safetensors"
    with pytest.raises(StorageError, match="cannot read"):
        Overlay(LocalFiles(tmp_path), version).read_into(path, 0, target)
    short = replace(version, payloads={0: tmp_path / "short"})
    (tmp_path / "short").write_bytes(b"x")
    with pytest.raises(DamagedError, match="ends at byte 1"):
        Overlay(LocalFiles(tmp_path), short).read_into(path, 0, target)
