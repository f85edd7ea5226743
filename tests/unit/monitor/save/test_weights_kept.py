"""A job retains the weights of commits that it deletes, in a thread that no save waits for."""

from __future__ import annotations

import logging
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
        assert committed_steps(tmp_path / "store") == [1, 2, 4], "those that the rule names, and the newest"
        go_on.set()
        copied()
        assert "the weights of commit 00000001-000001 are not kept: the disk is gone" in caplog.text
        made.step()
        copied()
        made.step()
        assert committed_steps(tmp_path / "store")[-1] == 6 and len(committed_steps(tmp_path / "store")) <= 2
    assert verify_all(open_catalog(LocalFiles(tmp_path / "store"))).ok


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
