"""Who may be in shared memory, and whom a process that lives or sleeps keeps out."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from store.errors import StorageError
from store.memory.arena import Arena, Owner, is_owned
from store.memory.index import scan_node
from store.memory.layout import Tier, home
from store.names import SaveId
from tests.support.made_versions import abandon, keep, tier_at, values, wanted
from tests.support.processes import living


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return tier_at(tmp_path / "shm")


# ---- permissions


def test_nobody_else_may_read_it(tier: Tier) -> None:
    arena = Arena(tier, 1, 0)
    keep(arena, 0, SaveId(5, 1))
    modes = {path.name: path.lstat().st_mode & 0o077 for path in (tier.home, *tier.home.rglob("rank-*"))}
    assert len(modes) == 4 and set(modes.values()) == {0}
    arena.close(remove=True)


def require_refused(use: Callable[[], object]) -> None:
    """The folder is refused because others can reach it."""
    with pytest.raises(StorageError, match="is not a folder that only user"):
        use()


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701])
def test_a_folder_that_others_may_enter_is_refused(tier: Tier, mode: int) -> None:
    tier.home.mkdir()
    tier.home.chmod(mode)
    require_refused(lambda: Arena(tier, 1, 0))
    require_refused(lambda: scan_node(tier))


def test_a_link_is_refused(tier: Tier, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    tier.home.symlink_to(tmp_path / "elsewhere")
    require_refused(lambda: Arena(tier, 1, 0))
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.needs_root
def test_a_folder_of_another_user_is_refused(tier: Tier) -> None:
    if os.getuid() != 0:
        pytest.skip("only root gives folders away: a folder of another user is NOT tested")
    tier.home.mkdir(mode=0o700)
    os.chown(tier.home, 12345, 12345)
    require_refused(lambda: Arena(tier, 1, 0))


def test_a_file_in_its_place_is_refused(tier: Tier) -> None:
    tier.home.write_text("")
    with pytest.raises(StorageError):
        Arena(tier, 1, 0)
    with pytest.raises(StorageError):
        scan_node(tier)


@pytest.mark.parametrize("name", ["owner", "0.payload", "0.new"])
def test_links_are_not_followed(tier: Tier, tmp_path: Path, name: str) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    place = tier.generation(1)
    place.make()
    (place.folder / f"rank-00000.{name}").symlink_to(target)
    with pytest.raises(StorageError):
        keep(Arena(tier, 1, 0), 0, SaveId(5, 1))
    assert target.read_text() == "precious"


def test_a_record_that_is_a_link_is_no_version(tier: Tier, tmp_path: Path) -> None:
    arena = Arena(tier, 1, 0)
    keep(arena, 0, SaveId(5, 1))
    record = tier.generation(1).record(0, 0)
    record.rename(tmp_path / "record")
    record.symlink_to(tmp_path / "record")
    node = scan_node(tier)
    assert not node.versions and len(node.problems) == 1
    arena.close(remove=True)


def test_strange_names_are_left_alone(tier: Tier) -> None:
    arena = Arena(tier, 1, 0)
    keep(arena, 0, SaveId(5, 1))
    strange = [tier.folder / "notes.txt", tier.folder / "7", tier.generation(1).folder / "rank-1.0.json"]
    for path in strange:
        path.write_text("")
    assert list(scan_node(tier).versions) == [SaveId(5, 1)]
    arena.close(remove=True)
    assert all(path.exists() for path in strange)


# ---- owners


def test_a_process_that_lives_or_sleeps_owns_its_memory(tier: Tier) -> None:
    with living(tier, SaveId(5, 1)) as process:
        path = tier.generation(1).owner(0)
        assert is_owned(path)
        with pytest.raises(StorageError, match="held by another process"):
            Owner(path)
        process.send_signal(signal.SIGSTOP)
        assert is_owned(path)
        process.kill()
        process.wait()
        assert not is_owned(path)


def test_asking_takes_nothing(tier: Tier) -> None:
    """Whoever only asks must never make the owner itself fail, nor lose it its lock."""
    place = tier.generation(1)
    place.make()
    path = place.owner(0)
    path.touch(0o600)
    assert not is_owned(path)
    readers = [os.open(path, os.O_RDWR) for _ in range(2)]
    owner = Owner(path)
    assert is_owned(path)
    owner.release()
    assert not is_owned(path)
    for reader in readers:
        os.close(reader)


def test_asking_is_never_in_the_way_of_an_owner(tier: Tier) -> None:
    """Another process asks all the time, as a job does that begins on the same node."""
    place = tier.generation(1)
    place.make()
    path = place.owner(0)
    path.touch(0o600)
    asking = os.fork()
    if asking == 0:
        while True:
            is_owned(path)
    try:
        for _ in range(2000):
            Owner(path).release()
    finally:
        os.kill(asking, signal.SIGKILL)
        os.waitpid(asking, 0)


def test_a_forked_child_neither_owns_nor_frees(tier: Tier) -> None:
    arena = Arena(tier, 1, 0)
    keep(arena, 0, SaveId(5, 1))
    path = tier.generation(1).owner(0)
    child = os.fork()
    if child == 0:
        os._exit(0 if is_owned(path) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert is_owned(path)
    with living(tier, SaveId(7, 2)):
        pass
    assert is_owned(path)
    arena.close(remove=True)


def test_a_second_checkpointer_in_this_process_is_refused(tier: Tier) -> None:
    arena = Arena(tier, 1, 0)
    with pytest.raises(StorageError, match="held by this process"):
        Arena(tier, 1, 0)
    keep(arena, 0, SaveId(5, 1))
    assert values(tier, SaveId(5, 1)) == wanted(SaveId(5, 1))
    arena.close(remove=True)


def test_a_folder_that_is_cleaned_away_in_between_is_made_again(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between making the folder and locking a file in it another job's cleaning may find it empty."""
    made = type(tier.generation(1)).make
    emptied = []

    def make(place: object) -> None:
        made(place)  # type: ignore[arg-type]
        if not emptied:
            emptied.append(place)
            tier.generation(1).folder.rmdir()
            tier.folder.rmdir()

    monkeypatch.setattr(type(tier.generation(1)), "make", make)
    arena = Arena(tier, 1, 0)
    assert emptied and is_owned(tier.generation(1).owner(0))
    arena.close(remove=True)
    assert not list(home(tier.base).iterdir())


def test_a_place_that_its_owner_gives_back_in_between_is_taken_anew(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening the file that is to be locked and locking it a job on a copy of the store closes: a lock on a
    file that has no name any more keeps nobody out."""
    path = tier.generation(1).owner(0)
    locked, closed = fcntl.lockf, []

    def lockf(descriptor: int, operation: int) -> None:
        if not closed:
            closed.append(path)
            path.unlink()
        locked(descriptor, operation)

    monkeypatch.setattr(fcntl, "lockf", lockf)
    arena = Arena(tier, 1, 0)
    assert closed and os.path.samestat(path.stat(), os.fstat(arena._owner._descriptor))
    with living(tier, SaveId(7, 2)):
        assert is_owned(path)
    monkeypatch.undo()
    arena.close(remove=True)


def test_the_file_that_is_locked_is_removed_before_it_is_let_go(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards it may be another's, who would be there unseen."""
    arena, path = Arena(tier, 1, 0), tier.generation(1).owner(0)
    there, release = [], Owner.release
    monkeypatch.setattr(Owner, "release", lambda owner: (there.append(path.exists()), release(owner)))
    arena.close(remove=True)
    assert there == [False]


def test_what_was_let_go_is_another_incarnations(tier: Tier) -> None:
    abandon(Arena(tier, 1, 0))
    assert not is_owned(tier.generation(1).owner(0))
