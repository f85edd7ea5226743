"""What the supervisor sees of a store: real ones, none, damaged ones, ones that hang, and what lies in memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deploy.supervisor.restart_policy import StoreSnapshot
from deploy.supervisor.store_probe import StoreProbe
from store.catalog import open_catalog
from store.errors import StorageError
from store.names import manifest_path
from store.session import lock_holder
from store.storage.local import LocalFiles
from tests.support.stores import StoreBuilder
from tests.support.supervised import PYTHON, supervised, training


def test_a_store_that_is_not_there_yet_is_an_empty_one(tmp_path: Path) -> None:
    seen = StoreProbe(tmp_path / "store")
    assert seen.look() == StoreSnapshot()
    assert seen.holder() is None
    assert not (tmp_path / "store").exists()


def test_commits_and_epochs(tmp_path: Path) -> None:
    store = StoreBuilder(tmp_path)
    assert StoreProbe(tmp_path).look() == StoreSnapshot(epoch=1)
    first = store.save(10)
    assert StoreProbe(tmp_path).look() == StoreSnapshot(first, 10, first, None, 1)
    second = store.save(20)
    assert StoreProbe(tmp_path).look() == StoreSnapshot(second, 20, second, first, 1)
    store.restart()
    third = store.save(15)
    seen = StoreProbe(tmp_path).look()
    assert (seen.newest, seen.step, seen.resumes, seen.epoch) == (third, 20, third, 2)


def test_marks_change_what_is_resumed_from_until_they_are_withdrawn(tmp_path: Path) -> None:
    store = StoreBuilder(tmp_path)
    saves = [store.save(step) for step in (10, 20, 30)]
    seen = StoreProbe(tmp_path)
    assert seen.mark(saves[2], "exit code 1") == ""
    snapshot = seen.look()
    assert (snapshot.newest, snapshot.resumes, snapshot.instead) == (saves[2], saves[1], saves[0])
    seen.mark(saves[1], "exit code 1")
    assert (seen.look().resumes, seen.look().instead) == (saves[0], None), "nothing is left below it"
    seen.withdraw(saves[2])
    assert seen.look().resumes == saves[2]


def test_a_commit_that_a_job_went_on_from_is_not_to_blame(tmp_path: Path) -> None:
    store = StoreBuilder(tmp_path)
    store.save(10)
    good = store.save(20)
    store.restart()
    after = store.save(30)
    assert open_catalog(LocalFiles(tmp_path)).manifest(after).previous == good.name
    seen = StoreProbe(tmp_path)
    seen.mark(after, "exit code 1")
    assert (seen.look().resumes, seen.look().instead) == (good, None)


def test_a_damaged_commit_is_not_what_is_resumed_from(tmp_path: Path) -> None:
    store = StoreBuilder(tmp_path)
    first, second = store.save(10), store.save(20)
    (tmp_path / manifest_path(second)).write_bytes(b"garbage")
    seen = StoreProbe(tmp_path).look()
    assert (seen.newest, seen.resumes, seen.instead) == (second, first, None)


@pytest.mark.parametrize("lost", [False, True])
def test_a_store_that_cannot_be_read_is_told(tmp_path: Path, lost: bool) -> None:
    store = StoreBuilder(tmp_path)
    save = store.save(10)
    (tmp_path / "STORE.json").write_bytes(b"garbage")
    if lost:
        (tmp_path / "STORE.json").unlink()
    seen = StoreProbe(tmp_path)
    troubles = seen.look().trouble, seen.mark(save, "exit code 1"), seen.withdraw(save)
    assert all("STORE.json" in trouble for trouble in troubles)


def test_storage_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    """A reader of a pipe that nobody writes hangs as one of a dead file server does."""
    save = StoreBuilder(tmp_path).save(10)
    seen = StoreProbe(tmp_path, patience=0.2)
    with pytest.raises(StorageError, match=r"did not answer within 0\.2 s"):
        os.mkfifo(tmp_path / "LOCK")
        seen._with_timeout(lambda: lock_holder(tmp_path))
    assert seen.holder() is None
    assert seen.look().newest == save


@pytest.mark.slow
def test_a_version_in_memory_that_kills_is_passed_over(tmp_path: Path) -> None:
    """The job dies where it resumes from memory, at step 6, and not where it resumes from the commit, at step 4."""
    shared = tmp_path / "shm"
    shared.mkdir()
    memory = {"enabled": True, "every": 1, "path": str(shared)}
    (tmp_path / "job.yaml").write_text(f"store: {tmp_path / 'store'}\nmemory: {{enabled: true, path: {shared}}}\n")
    spec = {"every": 4, "total": 10, "settled": True, "settings": {"memory": memory}, "poison_now": [6]}
    command = PYTHON + training(tmp_path, dies=[[1, 6, "kill"]], **spec)
    with supervised(tmp_path, command, "-c", tmp_path / "job.yaml") as run:
        assert run.ends() == 0, run.said
        assert run.starts == [0, 6, 6, 4], run.said
        assert [one["commit"] for one in run.events if one["event"] == "suspect"] == ["00000006-000001"]
    seen = StoreProbe(tmp_path / "store", shared).look()
    assert seen.newest is not None and seen.newest.step == 10
