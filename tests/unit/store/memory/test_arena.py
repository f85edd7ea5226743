"""Two payloads by turns, and how a later incarnation takes them: files only, of real processes where one must live."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from store.errors import DamagedError, StorageError
from store.memory.arena import Arena
from store.memory.index import scan_node
from store.memory.layout import SLOTS, Tier
from store.names import SaveId
from tests.support.made_versions import (
    NBYTES,
    abandon,
    content,
    keep,
    record_of,
    tier_at,
    together,
    values,
    wanted,
    whole,
)
from tests.support.processes import living


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return tier_at(tmp_path / "shm")


def payloads(tier: Tier) -> list[str]:
    return sorted(str(path.relative_to(tier.folder)) for path in tier.folder.rglob("*.payload"))


def left(tier: Tier) -> list[Path]:
    return [path for path in tier.base.rglob("*") if path != tier.home]


def dead_job(tier: Tier, epoch: int, world: int, *steps: int) -> None:
    """A job of so many ranks that kept versions of these steps, in turn, and died."""
    for rank in range(world):
        arena = Arena(tier, epoch, rank)
        for number, step in enumerate(steps):
            keep(arena, number % 2, SaveId(step, epoch), rank, world)
        abandon(arena)


# ---- switching


def test_versions_take_turns(tier: Tier) -> None:
    arena = Arena(tier, 1, 0)
    for step in range(1, 6):
        keep(arena, step % 2, SaveId(step, 1))
        found = whole(tier)
        assert found[SaveId(step, 1)] == wanted(SaveId(step, 1))
        assert sorted(save.step for save in found) == ([step - 1, step] if step > 1 else [1])
    arena.close(remove=True)
    assert not left(tier)


def test_a_payload_under_way_is_no_version(tier: Tier) -> None:
    arena = Arena(tier, 1, 0)
    keep(arena, 0, SaveId(1, 1))
    keep(arena, 1, SaveId(2, 1))
    arena.room(0, NBYTES)
    assert list(scan_node(tier).versions) == [SaveId(2, 1)]
    arena.write_at(0, 0, content(SaveId(3, 1), 0)[: NBYTES // 2])
    assert whole(tier) == {SaveId(2, 1): wanted(SaveId(2, 1))}
    arena.close(remove=True)


def test_with_one_version_there_is_none_while_it_is_replaced(tier: Tier) -> None:
    arena = Arena(tier, 1, 0, versions=1)
    assert arena.slots == (0,)
    keep(arena, 0, SaveId(1, 1))
    arena.room(0, NBYTES)
    assert not scan_node(tier).versions
    keep(arena, 0, SaveId(2, 1))
    assert whole(tier) == {SaveId(2, 1): wanted(SaveId(2, 1))}
    assert payloads(tier) == ["000001/rank-00000.0.payload"]
    arena.close(remove=True)
    assert not left(tier)


def test_a_version_grows_and_the_other_stays(tier: Tier) -> None:
    arena = Arena(tier, 1, 0)
    keep(arena, 0, SaveId(1, 1))
    memory = arena.room(1, 1 << 20)
    assert len(memory) >= 1 << 20
    memory[(1 << 20) - 1] = 7
    assert whole(tier) == {SaveId(1, 1): wanted(SaveId(1, 1))}
    bigger = arena.room(1, 1 << 21)
    assert len(bigger) >= 1 << 21 and bigger[(1 << 20) - 1] == 7
    assert tier.generation(1).payload(0, 1).stat().st_blocks * 512 >= 1 << 21
    arena.close(remove=True)


def test_what_is_given_back_is_gone_and_the_other_stays(tier: Tier) -> None:
    arena = Arena(tier, 1, 0)
    keep(arena, 0, SaveId(1, 1))
    keep(arena, 1, SaveId(2, 1))
    arena.give_back(1)
    assert payloads(tier) == ["000001/rank-00000.0.payload"]
    assert whole(tier) == {SaveId(1, 1): wanted(SaveId(1, 1))}
    keep(arena, 1, SaveId(3, 1))
    assert len(whole(tier)) == 2
    arena.close(remove=True)
    assert not left(tier)


def test_a_record_that_cannot_be_written_leaves_the_other_version(tier: Tier) -> None:
    arena = Arena(tier, 1, 0)
    keep(arena, 0, SaveId(1, 1))
    arena.room(1, NBYTES)
    record = tier.generation(1).record(0, 1)
    tier.generation(1).unsealed(0, 1).mkdir()
    with pytest.raises(StorageError, match=str(record)):
        arena.seal(1, record_of(SaveId(2, 1), 0, 1))
    assert whole(tier) == {SaveId(1, 1): wanted(SaveId(1, 1))}
    tier.generation(1).unsealed(0, 1).rmdir()
    arena.close(remove=True)


# ---- taking over


def test_what_the_job_stands_on_is_left_until_there_is_a_newer_one(tier: Tier) -> None:
    dead_job(tier, 1, 1, 4, 5)
    inodes = {path.stat().st_ino for path in tier.folder.rglob("*.payload")}
    arena = Arena(tier, 2, 0)
    arena.take_over(SaveId(5, 1))
    assert payloads(tier) == ["000001/rank-00000.1.payload", "000002/rank-00000.0.payload"]
    assert whole(tier) == {SaveId(5, 1): wanted(SaveId(5, 1))}
    keep(arena, 0, SaveId(6, 2))
    assert set(whole(tier)) == {SaveId(5, 1), SaveId(6, 2)}
    arena.take_rest(1)
    assert payloads(tier) == ["000002/rank-00000.0.payload", "000002/rank-00000.1.payload"]
    assert {path.stat().st_ino for path in tier.folder.rglob("*.payload")} == inodes, "renamed, never copied"
    assert whole(tier) == {SaveId(6, 2): wanted(SaveId(6, 2))}
    assert not tier.generation(1).folder.exists()
    arena.close(remove=True)
    assert not left(tier)


def test_jobs_that_die_before_their_first_version_lose_none(tier: Tier) -> None:
    dead_job(tier, 1, 1, 4, 5)
    for epoch in range(2, 9):
        arena = Arena(tier, epoch, 0)
        arena.take_over(SaveId(5, 1))
        arena.room(0, NBYTES)
        arena.write_at(0, 0, b"x" * NBYTES)
        abandon(arena)
        assert whole(tier) == {SaveId(5, 1): wanted(SaveId(5, 1))}
        assert len(payloads(tier)) == 2, "never more than two payloads"
    arena = Arena(tier, 9, 0)
    arena.take_over(SaveId(5, 1))
    keep(arena, 0, SaveId(6, 9))
    arena.take_rest(1)
    arena.close(remove=True)
    assert not left(tier)


def test_with_nothing_to_stand_on_all_is_taken(tier: Tier) -> None:
    dead_job(tier, 1, 1, 4, 5)
    arena = Arena(tier, 2, 0)
    arena.take_over(None)
    assert payloads(tier) == ["000002/rank-00000.0.payload", "000002/rank-00000.1.payload"]
    assert not scan_node(tier).versions
    arena.close(remove=True)


def test_one_version_takes_one_payload_and_removes_the_other(tier: Tier) -> None:
    dead_job(tier, 1, 1, 4, 5)
    arena = Arena(tier, 2, 0, versions=1)
    arena.take_over(None)
    assert payloads(tier) == ["000002/rank-00000.0.payload"]
    arena.take_rest(1)
    arena.close(remove=True)
    assert not left(tier)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (3, 1), (1, 3), (4, 4)])
def test_another_world_leaves_nothing_behind(tier: Tier, before: int, after: int) -> None:
    dead_job(tier, 1, before, 4, 5)
    stands = SaveId(5, 1)
    arenas = [Arena(tier, 2, rank) for rank in range(after)]
    for arena in arenas:
        arena.take_over(stands)
    assert values(tier, stands) == wanted(stands, before)
    for rank, arena in enumerate(arenas):
        keep(arena, 0, SaveId(6, 2), rank, after)
    assert values(tier, stands) == wanted(stands, before), "until every rank has its own"
    for arena in arenas:
        arena.take_rest(after)
    assert list(whole(tier)) == [SaveId(6, 2)]
    assert values(tier, SaveId(6, 2)) == wanted(SaveId(6, 2), after)
    assert not tier.generation(1).folder.exists()
    for arena in arenas:
        arena.close(remove=True)
    assert not left(tier)


def test_what_ranks_left_that_are_on_other_nodes_now_goes_too(tier: Tier) -> None:
    """Ranks 0 and 1 were on this node; after a restart it has ranks 2 and 3 of the same world."""
    dead_job(tier, 1, 2, 4, 5)
    arenas = {rank: Arena(tier, 2, rank) for rank in (2, 3)}
    for rank, arena in arenas.items():
        arena.take_over(None)
        keep(arena, 0, SaveId(6, 2), rank, 4)
    for arena in arenas.values():
        arena.take_rest(4)
    assert not tier.generation(1).folder.exists()
    for arena in arenas.values():
        arena.close(remove=True)
    assert not left(tier)


def test_records_that_were_never_named_are_cleaned_up(tier: Tier) -> None:
    """Killed between writing a record and naming it."""
    arena = Arena(tier, 1, 0)
    keep(arena, 0, SaveId(5, 1))
    arena.room(1, NBYTES)
    tier.generation(1).unsealed(0, 1).write_text("half a rec")
    abandon(arena)
    assert whole(tier) == {SaveId(5, 1): wanted(SaveId(5, 1))}
    second = Arena(tier, 2, 0)
    second.take_over(SaveId(5, 1))
    keep(second, 0, SaveId(6, 2))
    second.take_rest(1)
    assert not tier.generation(1).folder.exists()
    tier.generation(2).unsealed(0, 1).write_text("another")
    second.close(remove=True)
    assert not left(tier)


# ---- never from the never from the later


@pytest.mark.parametrize("stopped", [False, True])
def test_memory_of_a_living_process_is_never_taken(tier: Tier, stopped: bool) -> None:
    with living(tier, SaveId(5, 1)) as process:
        if stopped:
            process.send_signal(signal.SIGSTOP)
        before = {path: path.stat().st_ino for path in tier.generation(1).folder.iterdir()}
        arena = Arena(tier, 2, 0)
        arena.take_over(None)
        keep(arena, 0, SaveId(3, 2))
        arena.take_rest(1)
        arena.take_rest(2)
        assert {path: path.stat().st_ino for path in tier.generation(1).folder.iterdir()} == before
        assert values(tier, SaveId(5, 1)) == wanted(SaveId(5, 1))
        process.kill()
        process.wait()
        arena.take_rest(1)
        assert not tier.generation(1).folder.exists()
        arena.close(remove=True)


def test_other_ranks_of_a_living_job_are_left_alone(tier: Tier) -> None:
    dead_job(tier, 1, 1, 5)
    with living(tier, SaveId(5, 1), rank=1, world=2):
        arena = Arena(tier, 2, 0)
        arena.take_over(None)
        arena.take_rest(1)
        assert tier.generation(1).payload(1, 0).exists()
        arena.close(remove=True)


def test_one_that_wakes_up_takes_nothing_from_a_later_incarnation(tier: Tier) -> None:
    """A job slept; a later one took the store, kept a version and died. What it left is for the next one."""
    sleeper = Arena(tier, 3, 0)
    keep(sleeper, 0, SaveId(10, 3))
    dead_job(tier, 5, 2, 12)
    sleeper.take_over(None)
    keep(sleeper, 1, SaveId(11, 3))
    sleeper.take_rest(1)
    assert values(tier, SaveId(12, 5)) == wanted(SaveId(12, 5), 2)
    sleeper.close(remove=True)
    assert values(tier, SaveId(12, 5)) == wanted(SaveId(12, 5), 2)


# ---- letting go


def test_closing_twice_is_closing(tier: Tier) -> None:
    arena = Arena(tier, 1, 0)
    keep(arena, 0, SaveId(1, 1))
    arena.close(remove=True)
    arena.close(remove=True)
    assert not left(tier)


def test_giving_back_is_never_half_a_version(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records go before payloads, so that what is half gone is no version."""
    arena = Arena(tier, 1, 0)
    for slot in SLOTS:
        keep(arena, slot, SaveId(slot + 1, 1))
    order: list[str] = []
    real = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.exists():
            order.append(path.suffix)
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    arena.close(remove=True)
    assert order == [".json", ".json", ".payload", ".payload", ".owner"]


def test_what_cannot_be_removed_is_a_typed_error(tier: Tier) -> None:
    arena = Arena(tier, 1, 0)
    tier.generation(1).payload(0, 0).mkdir()
    with pytest.raises(StorageError, match="cannot remove"):
        arena.close(remove=True)
    tier.generation(1).payload(0, 0).rmdir()
    os.close(os.open(tier.generation(1).owner(0), os.O_RDWR))
    Arena(tier, 1, 0).close(remove=True)


def test_half_a_world_is_no_version(tier: Tier) -> None:
    for rank in (0, 1):
        arena = Arena(tier, 1, rank)
        keep(arena, 0, SaveId(4, 1), rank, 3)
        abandon(arena)
    with pytest.raises(DamagedError, match="2 of 3 ranks"):
        together(tier, SaveId(4, 1))


def test_what_stays_of_an_earlier_incarnation_needs_no_room(tier: Tier) -> None:
    """Its payload is taken later; where it lies on another node there is nothing to wait for."""
    dead_job(tier, 1, 1, 7, 8)
    arena = Arena(tier, 2, 0)
    assert arena.take_over(SaveId(8, 1)) == arena.slots[:-1]
    assert arena.take_over(SaveId(8, 1)) == arena.slots[:-1]
    arena.take_rest(1)
    assert arena.take_over(SaveId(8, 1)) == arena.take_over(SaveId(9, 1)) == arena.take_over(None) == arena.slots
    arena.close(remove=True)
