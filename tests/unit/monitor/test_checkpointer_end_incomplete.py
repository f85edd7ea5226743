"""Ends of a job that are easily told wrong: steps that nobody counted, layers left out, branches that were left."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from monitor.api import attach_counted
from monitor.events import SaveListener
from store.catalog import open_catalog
from store.certificate import certify
from store.errors import SaveError, UnsupportedError
from store.memory.layout import parse_record
from store.resolve import resolve
from store.storage.local import LocalFiles
from tests.support.hooked import nothing
from tests.support.internals import listen, note_difference, wait_for_snapshot
from tests.support.jobs import Job, Model, committed_steps, job, same
from tests.support.kept import memory
from tests.unit.monitor.test_checkpointer_end import full_disk

PREEMPTED = {"preemption": {"exit": False, "grace_seconds": 20}}


def spoil_head(one: Job) -> None:
    with torch.no_grad():
        one.model.head.weight[0, 0] = float("nan")


# ---- steps that the framework counts


class Counted:
    """A training whose framework counts the steps."""

    def __init__(self, store: Path, **more: Any) -> None:
        self.model, self.done = Model(), 0
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        settings = {"store": str(store), "every": 1, "metrics": {"enabled": False}, **more}
        self.ckpt = attach_counted((self.model, self.optimizer), settings, (), lambda: self.done)

    def update(self) -> None:
        self.model(torch.randn(4, 3)).square().mean().backward()
        self.optimizer.step()
        self.done += 1


def test_steps_since_the_last_call_of_step_are_committed(tmp_path: Path) -> None:
    one = Counted(tmp_path / "store")
    one.update()
    one.ckpt.step()
    one.ckpt.flush()
    for _ in range(4):
        one.update()
    one.ckpt.close()
    assert committed_steps(tmp_path / "store") == [1, 5]


def test_steps_of_a_loop_that_only_calls_save_are_committed(tmp_path: Path) -> None:
    one = Counted(tmp_path / "store")
    for step in range(1, 6):
        one.update()
        if step == 2:
            one.ckpt.save(wait=True)
    one.ckpt.close()
    assert committed_steps(tmp_path / "store") == [2, 5]


def test_a_loop_that_never_counted_a_step_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = Job(tmp_path / "store")
    one.update()
    one.ckpt.close()
    assert "call ckpt.step() after every optimizer.step()" in caplog.text


# ---- layers that were left out


def test_a_last_step_without_a_layer_is_not_told_as_committed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = Job(tmp_path / "store", every=2)
    for _ in range(4):
        one.step()
    one.update()
    spoil_head(one)
    one.ckpt.step()
    ends = listen(one.ckpt, Ends())
    with caplog.at_level(logging.INFO, "driftpoint"):
        assert not one.ckpt.commit_last_step()
        one.ckpt.close()
    assert ends.clean == [False]
    assert "the last step 5 is committed" not in caplog.text
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert any("step 5" in text and "head" in text for text in errors)


def test_a_preempted_save_does_not_name_a_layer_that_was_left_out(tmp_path: Path) -> None:
    with job(tmp_path / "store", every=100, **PREEMPTED) as one:
        one.step()
        one.ckpt.save(wait=True)
        one.update()
        spoil_head(one)
        one.ckpt.preempt()
        report = one.ckpt.step()
        assert report is not None
        assert report.saved
        assert not any(unit.layer == "head" and unit.slot == "fp32" for unit in report.saved)


# ---- preemption


def test_a_loop_that_went_on_after_a_preemption_is_committed_to_its_end(tmp_path: Path) -> None:
    one = Job(tmp_path / "store", every=100, **PREEMPTED)
    one.step()
    one.ckpt.preempt()
    for _ in range(6):
        one.step()
    one.ckpt.close()
    assert committed_steps(tmp_path / "store") == [2, 7]


def test_a_preempted_save_that_failed_is_made_up_for_at_the_end(tmp_path: Path) -> None:
    one = Job(tmp_path / "store", every=100, **PREEMPTED)
    one.step()
    files = one.hook()
    files.before = full_disk
    one.ckpt.preempt()
    report = one.step()
    assert report is not None
    assert (report.preempted, report.skipped) == (True, "failed")
    files.before = nothing
    one.ckpt.close()
    assert committed_steps(tmp_path / "store") == [2]


class Failing:
    """An object whose state cannot be captured once ``failing`` is set."""

    failing = False

    def state_dict(self) -> dict[str, Any]:
        if self.failing:
            raise RuntimeError("boom")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing."""


def test_an_object_that_fails_is_no_rank_that_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    item = Failing()
    with job(tmp_path / "store", state=[item], every=100, **PREEMPTED) as one:
        item.failing = True
        one.update()
        one.ckpt.preempt()
        report = one.ckpt.step()
        assert report is not None
        assert (report.preempted, report.skipped) == (True, "failed")
    assert "boom" in caplog.text
    assert "another rank is gone" not in caplog.text


def test_a_disk_that_is_full_for_one_save_of_a_preemption_gets_another(tmp_path: Path) -> None:
    with job(tmp_path / "store", every=100, **PREEMPTED) as one:
        one.step()
        files, failed = one.hook(), list[str]()

        def full_once(operation: str, path: str) -> None:
            if operation == "write" and not failed:
                failed.append(path)
                full_disk(operation, path)

        files.before = full_once
        one.ckpt.preempt()
        report = one.step()
        assert report is not None
        assert failed
        assert report.skipped is None
    assert committed_steps(tmp_path / "store") == [2]


# ---- trouble that may pass


def test_trouble_that_may_pass_does_not_end_training(tmp_path: Path) -> None:
    """The first step of a gradient scaler is skipped, and weights are clipped: that looks like another optimizer."""
    with job(tmp_path / "store") as one:
        with torch.no_grad():
            for parameter in one.model.parameters():
                parameter.clamp_(-0.1, 0.1)
        report = one.ckpt.step()
        assert report is not None
        assert report.skipped == "unsupported"
        assert one.step().skipped is None  # type: ignore[union-attr]


def test_a_state_that_cannot_be_stored_is_refused_after_trouble_that_passed(tmp_path: Path) -> None:
    item = Failing()
    with job(tmp_path / "store", state=[item]) as one:
        with torch.no_grad():
            for parameter in one.model.parameters():
                parameter.clamp_(-0.1, 0.1)
        assert one.ckpt.step().skipped == "unsupported"  # type: ignore[union-attr]
        item.failing = True
        with pytest.raises((UnsupportedError, RuntimeError), match="boom"):
            one.step()


# ---- what a self-check found


class Growing:
    """An object whose state gets another shape."""

    def __init__(self) -> None:
        self.values = {"a": 1}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing."""


def test_what_a_self_check_found_stays_until_another_is_complete(tmp_path: Path) -> None:
    item = Growing()
    with job(tmp_path / "store", state=[item]) as one:
        one.step()
        note_difference(one.ckpt, "head.weight/fp32, F32, comes back with other values")
        one.step()
        item.values["b"] = 2  # so the next save is checked again
        one.step()
        one.step()
    catalog = open_catalog(LocalFiles(tmp_path / "store"))
    exact = {save.step: certify(resolve(catalog, save)).exact for save in catalog.saves()}
    assert [exact[step] for step in (2, 3, 4)] == [False, False, True]


def test_what_a_self_check_found_is_told_in_memory(tmp_path: Path) -> None:
    (shared := tmp_path / "shm").mkdir()
    found = "head.weight/fp32, F32, comes back with other values"
    with job(tmp_path / "store", every=100, memory={"enabled": True, "every": 1, "path": str(shared)}) as one:
        one.step()
        one.ckpt.save(wait=True)  # of the frozen layers, which no version in memory holds
        note_difference(one.ckpt, found)
        one.step()
        wait_for_snapshot(one.ckpt)
        records = [parse_record(path.read_bytes(), "it") for path in shared.rglob("rank-00000.?.json")]
    (record,) = [one for one in records if one.save.step == 2]
    assert record.part.differs == (found,) == (record.head and record.head.differs)
    assert record.reader == 2


# ---- a branch that was left


@pytest.mark.slow
def test_a_save_of_a_branch_that_was_left_is_not_the_last_step_of_the_new_one(tmp_path: Path) -> None:
    one = Job(tmp_path / "store", every=100, timeouts={"close": 5.0})
    for _ in range(5):
        one.step()
    one.ckpt.save(wait=True)
    files, let_go = one.hook(), threading.Event()

    def stuck(operation: str, path: str) -> None:
        if operation == "create" and "manifests" in path:
            assert let_go.wait(60)

    files.before = stuck
    for _ in range(2):
        one.step()
    one.ckpt.save()
    assert one.ckpt.resume() == 5
    let_go.set()
    torch.manual_seed(99)
    for _ in range(2):
        one.step()
    one.ckpt.close()
    with job(tmp_path / "store") as other:
        assert other.ckpt.resume() == 7
        assert same(other.weights(), one.weights())


# ---- memory


def remembering(tmp_path: Path, **settings: Any) -> Job:
    (tmp_path / "shm").mkdir(exist_ok=True)
    memory = {"enabled": True, "every": 1, "path": str(tmp_path / "shm")}
    return Job(tmp_path / "store", every=5, memory=memory, daemon={"enabled": False}, **settings)


def test_memory_stays_where_the_newest_commit_has_older_layers(tmp_path: Path) -> None:
    one = remembering(tmp_path, policy={"name": "parity", "k": 3})
    for _ in range(20):
        one.step()
        wait_for_snapshot(one.ckpt)
    weights = one.weights()
    one.ckpt.finish(clean=False)
    other = remembering(tmp_path, policy={"name": "parity", "k": 3})
    try:
        step = other.ckpt.resume()
        assert step >= 19
        assert other.ckpt.certificate is not None
        assert other.ckpt.certificate.exact
        assert step == 19 or same(other.weights(), weights)
    finally:
        other.ckpt.close(save=False)


class Ends(SaveListener):
    """Notes how ends were told."""

    def __init__(self) -> None:
        self.clean: list[bool] = []

    def on_close(self, clean: bool, timeout: float) -> None:
        self.clean.append(clean)


def test_an_end_that_is_not_committed_is_not_told_as_a_clean_one(tmp_path: Path) -> None:
    one = remembering(tmp_path)
    for _ in range(8):
        one.step()
        wait_for_snapshot(one.ckpt)
    one.ckpt.finish(clean=False)
    other = remembering(tmp_path)
    other.ckpt.resume()
    ends = listen(other.ckpt, Ends())
    other.hook().before = full_disk
    with pytest.raises(SaveError):
        other.ckpt.close()
    assert ends.clean == [False]


@pytest.mark.parametrize("policy", ["full", {"name": "parity", "k": 3}])
def test_a_job_that_is_preempted_at_the_first_step_after_going_back(tmp_path: Path, policy: Any) -> None:
    """Its framework loads a checkpoint of its own: commits of the steps after that are of a branch that it left."""
    settings = {"policy": policy, **PREEMPTED}
    one = Counted(tmp_path / "store", **settings)
    for _ in range(6):
        one.update()
        one.ckpt.step()
        one.ckpt.flush()
    one.done = 4
    one.ckpt.preempt()
    one.update()
    one.ckpt.step()
    one.ckpt.close()
    two = Counted(tmp_path / "store", **settings)
    assert two.ckpt.resume() == 5
    assert all(map(torch.equal, one.model.parameters(), two.model.parameters()))
    two.ckpt.close()


def test_a_job_that_goes_back_while_a_save_is_written_saves_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version in memory that follows claims an epoch of its own, which fences that save, and not the job."""
    more = {"memory": memory(tmp_path / "store"), "timeouts": {"close": 1}}
    one, real, held = Counted(tmp_path / "store", **more), os.fsync, threading.Event()
    one.ckpt.resume()
    for _ in range(4):
        one.update()
        one.ckpt.step()
        one.ckpt.flush()

    def slow(descriptor: int) -> None:
        if threading.current_thread().name.startswith("driftpoint-writer"):
            held.wait(60)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    one.update()
    one.ckpt.step()
    one.ckpt.copied()
    one.done = 2
    for _ in range(2):
        one.update()
        one.ckpt.step()
        wait_for_snapshot(one.ckpt)
    held.set()
    for _ in range(3):
        one.ckpt.flush()
        one.update()
        one.ckpt.step()
    one.ckpt.close()
    two = Counted(tmp_path / "store", memory=memory(tmp_path / "store"))
    assert two.ckpt.resume() == 7
    assert all(map(torch.equal, one.model.parameters(), two.model.parameters()))
    two.ckpt.close()
