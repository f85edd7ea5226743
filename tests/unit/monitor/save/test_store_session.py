"""A job's hold on its store: made, locked, an epoch claimed; refused where another process has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from monitor.distributed import Group
from monitor.save.store_session import open_existing_store, open_store
from store.errors import StorageError, StoreInUseError
from store.session import lock_holder, newest_epoch
from tests.support.jobs import Job, job
from tests.support.processes import holding_lock


def test_each_hold_claims_the_next_epoch(tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "store")
    for epoch in (1, 2, 3):
        opened = open_store(path, Group(), 0)
        assert opened.epoch == epoch == newest_epoch(opened.files)
        assert opened.newest is None
        opened.release()


def test_a_hold_is_let_go_once(tmp_path: Path) -> None:
    opened = open_store(str(tmp_path / "store"), Group(), 0)
    assert lock_holder(tmp_path / "store") is not None
    opened.release()
    opened.release()
    assert lock_holder(tmp_path / "store") is None


def test_a_store_with_commits_says_so(tmp_path: Path) -> None:
    with job(tmp_path / "store") as one:
        one.step()
    opened = open_store(str(tmp_path / "store"), Group(), 0)
    assert opened.newest is not None
    opened.release()


def test_a_home_directory_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    open_store("~/store", Group(), 0).release()
    assert (tmp_path / "store" / "STORE.json").exists()
    assert open_existing_store("~/store", Group()) is not None


def test_another_process_that_holds_the_store_is_named(tmp_path: Path) -> None:
    with job(tmp_path / "store") as one:
        one.step()
    with holding_lock(tmp_path / "store") as pid, pytest.raises(StoreInUseError, match=f"in use by process {pid}"):
        Job(tmp_path / "store", timeouts={"lock": 0.1})
    with job(tmp_path / "store") as again:
        assert again.ckpt.resume() == 1


def test_no_store_is_none_to_read(tmp_path: Path) -> None:
    assert open_existing_store(str(tmp_path / "nothing"), Group()) is None
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_a_store_lets_go_of_nothing_it_holds(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in ("file", "file/below"):
        with pytest.raises(StorageError):
            open_store(str(tmp_path / path), Group(), 0)
    assert (tmp_path / "file").read_text() == "x"
