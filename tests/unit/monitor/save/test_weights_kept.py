"""A job retains the weights of commits that it deletes, in a thread that no save waits for."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from store import retention, weights
from store.catalog import open_catalog
from store.errors import StorageError
from store.names import STORE
from store.retention import Retention, execute, keep_named_weights, plan_prune
from store.session import claim_epoch, newest_epoch
from store.storage.local import LocalFiles
from store.weights import open_weights, verify_all, weights_only_saves
from tests.support.jobs import committed_steps, job

RULE = {"keep_last": 1, "log_spaced": False, "weights_every": 2, "weights_last": 2}


def copied() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("driftpoint-weights-"):
            thread.join()


def test_the_newest_of_them_are_there_beside_the_commit(tmp_path: Path) -> None:
    with job(tmp_path / "store", retention=RULE) as made:
        weights = {}
        for step in range(1, 9):
            made.step()
            copied()
            weights[step] = made.weights()
    files = LocalFiles(tmp_path / "store")
    catalog = open_catalog(files)
    assert [save.step for save in weights_only_saves(files)] == [6, 4]
    assert committed_steps(tmp_path / "store") == [8]
    assert verify_all(catalog).ok
    for save in weights_only_saves(files):
        manifest = open_weights(catalog, save).manifest(save)
        assert {unit.slot for unit in manifest.units} == {"fp32"}
    with job(tmp_path / "store", retention=RULE) as again:
        assert again.ckpt.resume() == 8
        assert all(torch.equal(value, weights[8][name]) for name, value in again.weights().items())


def test_no_save_waits_and_the_commit_stays_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on, real, calls = threading.Event(), retention.keep_weights, []

    def once(*given: object) -> None:
        calls.append(given)
        assert go_on.wait(60)
        if len(calls) == 1:
            raise StorageError("the disk is gone")
        real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(retention, "keep_weights", once)
    with job(tmp_path / "store", retention=RULE) as made, caplog.at_level(logging.WARNING, "driftpoint"):
        began = time.monotonic()
        for _ in range(4):
            made.step()
        assert time.monotonic() - began < 30 and len(calls) == 1, "one copy at a time"
        assert committed_steps(tmp_path / "store") == [1, 2, 3, 4], "3 beside 2, whose weights were not read yet"
        go_on.set()
        copied()
        assert "the weights of commit 00000001-000001 are not kept: the disk is gone" in caplog.text
        made.step()
        copied()
        made.step()
        assert committed_steps(tmp_path / "store")[-1] == 6 and len(committed_steps(tmp_path / "store")) <= 2
    assert verify_all(open_catalog(LocalFiles(tmp_path / "store"))).ok


def test_one_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with job(store, retention=RULE) as made:
        for _ in range(8):
            made.step()
            copied()
    newest, older = weights_only_saves(LocalFiles(store))

    class Unreadable(LocalFiles):
        def read(self, path: str, limit: int) -> bytes:
            if self.root.name == newest.name:
                raise StorageError(f"cannot read {path}: input/output error")
            return super().read(path, limit)

        def below(self, folder: str) -> LocalFiles:
            return Unreadable(self.root / folder)

    report = verify_all(open_catalog(Unreadable(store)))
    states = {one.save: one.state for one in report.commits}
    assert states.pop(newest) == "damaged"
    assert set(states.values()) == {"ok"}
    assert older in states and len(states) == 2


def test_a_prune_leaves_alone_what_is_being_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a commit that another rule retains by then: its directory has no manifest yet, and is not what an older
    configuration left."""
    with job(tmp_path, retention={"keep_last": 3, "log_spaced": False}) as one:
        for _ in range(6):
            one.step()
    files, write_new = LocalFiles(tmp_path), weights.write_new
    plan = plan_prune(open_catalog(files), Retention(keep_last=1, log_spaced=False, weights_every=100))
    (save,) = plan.to_copy

    def beside(inner: Any, name: str, *more: Any, **options: Any) -> Any:
        if name == STORE:
            other = Retention(keep_last=3, log_spaced=False, weights_every=100)
            execute(files, plan_prune(open_catalog(files), other))
        return write_new(inner, name, *more, **options)

    monkeypatch.setattr(weights, "write_new", beside)
    assert keep_named_weights(open_catalog(files), plan) == []
    assert weights_only_saves(files) == [save]
    assert verify_all(open_catalog(files)).ok


class Held:
    """Holds up the first copy of weights until told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.go_on, self._real = threading.Event(), threading.Event(), retention.keep_weights
        monkeypatch.setattr(retention, "keep_weights", self)

    def __call__(self, *given: Any) -> None:
        if not self.began.is_set():
            self.began.set()
            assert self.go_on.wait(60)
        self._real(*given)

    def finish(self) -> None:
        self.go_on.set()
        copied()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


def test_the_next_epoch_of_the_job_itself_is_no_other_job(
    tmp_path: Path, held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    """A job that saves a step again, as at its end, claims another epoch while weights are copied."""
    with job(tmp_path, retention=RULE) as made:
        made.step()
        made.step()
        assert held.began.wait(60)
        made.ckpt.save(wait=True)
        assert newest_epoch(LocalFiles(tmp_path)) == 2
        held.finish()
        made.step()
        copied()
    assert "took it over" not in caplog.text and "not kept" not in caplog.text
    assert [save.step for save in weights_only_saves(LocalFiles(tmp_path))] == [2, 1]


def test_the_next_job_is_no_other_job_to_one_that_ended(
    tmp_path: Path, held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    with job(tmp_path, retention=RULE) as ended:
        ended.step()
        ended.step()
        assert held.began.wait(60)
    with job(tmp_path, retention=RULE) as following:
        assert following.ckpt.resume() == 2
        held.finish()
        following.step()
        copied()
    assert "took it over" not in caplog.text and "not kept" not in caplog.text
    assert [save.step for save in weights_only_saves(LocalFiles(tmp_path))] == [1]


def test_a_job_that_took_the_store_over_is_told(tmp_path: Path, held: Held, caplog: pytest.LogCaptureFixture) -> None:
    with job(tmp_path, retention=RULE) as made:
        made.step()
        made.step()
        assert held.began.wait(60)
        claim_epoch(LocalFiles(tmp_path), open_catalog(LocalFiles(tmp_path)).store_id)
        held.finish()
        assert "the weights of commit 00000001-000001 are not kept: epoch 1 lost the store to epoch 2" in caplog.text
        assert "another job took it over" in caplog.text
    assert weights_only_saves(LocalFiles(tmp_path)) == []


def test_after_a_rollback_the_weights_of_the_running_branch_are_kept(tmp_path: Path) -> None:
    rule = {**RULE, "weights_last": 9}
    with job(tmp_path, retention=rule) as made:
        for step in range(1, 9):
            made.step()
            copied()
            if step == 3:
                shutil.copytree(tmp_path, tmp_path.with_name("early"))
    assert weights_only_saves(LocalFiles(tmp_path))[0].name == "00000006-000001"
    for folder in ("manifests", "segments"):  # back to step 3, from a copy of the store
        shutil.rmtree(tmp_path / folder)
        shutil.copytree(tmp_path.with_name("early") / folder, tmp_path / folder)
    with job(tmp_path, retention=rule) as again:
        assert again.ckpt.resume() == 3
        for _ in range(5):
            again.step()
            copied()
    files = LocalFiles(tmp_path)
    assert [save.name for save in sorted(weights_only_saves(files), key=lambda save: save.step)] == [
        *(f"0000000{step}-000001" for step in (1, 2)), *(f"0000000{step}-000002" for step in (4, 6)),
    ]  # fmt: skip
    assert verify_all(open_catalog(files)).ok
