"""What is removed from memory, and what never is: what lives, and what no commit outranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from store.memory.arena import Arena, boot_seconds
from store.memory.cleanup import KEEP_SECONDS, clear, clear_old, committed, used_bytes
from store.memory.index import scan_node
from store.memory.layout import Tier, home, tiers
from store.names import SaveId, epoch_path
from store.schema import EpochRecord, to_bytes
from store.storage.local import LocalFiles
from tests.support.made_versions import CLAIM, STORE, abandon, head_of, keep, tier_at, values, wanted
from tests.support.processes import living


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return tier_at(tmp_path / "shm")


def dead(tier: Tier, epoch: int, *steps: int, world: int = 1) -> None:
    for rank in range(world):
        arena = Arena(tier, epoch, rank)
        for number, step in enumerate(steps):
            keep(arena, number % 2, SaveId(step, epoch), rank, world)
        abandon(arena)


def at(seconds: float) -> Callable[[], float]:
    return lambda: boot_seconds() + seconds


def test_all_that_is_dead_goes_when_asked(tier: Tier) -> None:
    dead(tier, 1, 4, 5, world=2)
    used = used_bytes(tier)
    assert used > 0
    assert clear(tier) == used
    assert used_bytes(tier) == 0 and not tier.folder.exists()


def test_what_is_newer_than_a_layer_of_a_composite_commit_is_not_covered(tier: Tier, tmp_path: Path) -> None:
    dead(tier, 1, 4, 6)
    files = LocalFiles(tmp_path / "store")
    claim = EpochRecord(store_id=STORE, epoch=1, token=CLAIM, host="here", pid=1, started="")
    files.make_dir("")
    files.make_dir("epochs")
    (files.root / epoch_path(1)).write_bytes(to_bytes(claim))
    (place,) = tier.generations()

    def covered(*oldest: int) -> bool:
        commit = head_of(SaveId(8, 1), 1)
        unit = commit.units[0].replace(save=SaveId(*oldest, 1).name)
        return committed(tier, files, commit.replace(units=(unit,)))(place, 0)

    assert [covered(step) for step in (4, 5, 6, 8)] == [False, False, True, True]
    assert not committed(tier, files, None)(place, 0)


@pytest.mark.parametrize("stopped", [False, True])
def test_what_lives_or_sleeps_is_never_removed(tier: Tier, stopped: bool) -> None:
    with living(tier, SaveId(5, 1)) as process:
        if stopped:
            process.send_signal(signal.SIGSTOP)
        assert clear(tier) == 0
        assert clear_old(tier.base, clock=at(10 * KEEP_SECONDS)) == 0
        assert values(tier, SaveId(5, 1)) == wanted(SaveId(5, 1))
        process.kill()
        process.wait()
        assert clear(tier) > 0


def test_the_old_of_every_store_goes_and_the_new_stays(tier: Tier) -> None:
    other = Tier(tier.base, "cd" * 16)
    dead(tier, 1, 4)
    dead(other, 1, 4)
    assert clear_old(tier.base, clock=at(KEEP_SECONDS - 60)) == 0
    assert len(tiers(tier.base)) == 2
    assert clear_old(tier.base, clock=at(KEEP_SECONDS + 60)) > 0
    assert tiers(tier.base) == []


def test_a_clock_that_went_back_removes_nothing(tier: Tier) -> None:
    dead(tier, 1, 4)
    assert clear_old(tier.base, clock=lambda: 0.0) == 0
    assert scan_node(tier).versions


def test_a_clock_that_was_set_forward_removes_nothing(tier: Tier) -> None:
    """To whoever looks at the clock, all files were written ten days ago."""
    dead(tier, 1, 4)
    for path, *_ in tier.generation(1).files():
        written = path.stat().st_mtime
        if written > time.time() - 3600:
            os.utime(path, (written - 10 * KEEP_SECONDS,) * 2)
    assert clear_old(tier.base) == 0
    assert scan_node(tier).versions


def test_what_no_one_dated_goes_by_the_clock(tier: Tier) -> None:
    """As releases before this one left it, and as a copy of the folder has it."""
    dead(tier, 1, 4)
    dead(tier, 2, 4)
    for path, *_ in tier.generation(1).files():
        os.utime(path, (time.time() - 2 * KEEP_SECONDS,) * 2)
    for path, *_ in tier.generation(2).files():
        os.utime(path)
    assert clear_old(tier.base) > 0
    assert set(scan_node(tier).versions) == {SaveId(4, 2)}


def test_nothing_there_is_nothing_to_do(tmp_path: Path) -> None:
    assert clear_old(tmp_path) == 0
    assert clear(Tier(tmp_path, "ab" * 16)) == 0
    assert used_bytes(Tier(tmp_path, "ab" * 16)) == 0


def test_records_without_names_and_orphans_go_too(tier: Tier) -> None:
    dead(tier, 1, 4)
    place = tier.generation(1)
    place.unsealed(0, 1).write_text("half")
    place.owner(0).unlink()
    place.payload(7, 1).write_bytes(b"an orphan")
    clear(tier)
    assert not tier.folder.exists()


def test_what_is_not_ours_stays(tier: Tier) -> None:
    dead(tier, 1, 4)
    strange = tier.generation(1).folder / "notes.txt"
    strange.write_text("")
    (home(tier.base) / "somebody").mkdir()
    clear(tier)
    clear_old(tier.base, clock=at(10 * KEEP_SECONDS))
    assert strange.exists() and (home(tier.base) / "somebody").exists()


def test_many_clean_at_once(tier: Tier) -> None:
    """Every rank of a node cleans when its job begins."""
    for epoch in range(1, 9):
        dead(tier, epoch, 4, 5, world=3)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            clear_old(tier.base, clock=at(10 * KEEP_SECONDS))
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert not tier.folder.exists()
