"""Refuse a store, a model, an optimizer, settings or state that do not fit, and change nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import yaml

import monitor
from store.errors import (
    ConfigError,
    DamagedError,
    ModelMismatchError,
    NewerFormatError,
    NothingToResumeError,
    StorageError,
    StoreInUseError,
    UnsupportedError,
)
from store.schema import READER, seal
from store.session import lock_holder
from tests.support.jobs import Job, Model, committed_steps, job, same
from tests.support.records import unseal


def test_a_closed_checkpointer_is_refused(store: Path) -> None:
    with job(store) as one:
        one.step()
    for call in (one.ckpt.step, one.ckpt.save):
        with pytest.raises(ConfigError, match="closed"):
            call()
    one.ckpt.close(save=False)


def test_step_without_resume_is_refused_if_the_store_has_commits(store: Path) -> None:
    with job(store) as one:
        one.step()
    with job(store) as other:
        other.update()
        for call in (other.ckpt.step, other.ckpt.save):
            with pytest.raises(ConfigError, match="resume\\(\\) was not called"):
                call()
    assert committed_steps(store) == [1]


def test_a_store_with_other_shapes_is_refused_and_unchanged(store: Path) -> None:
    with job(store) as one:
        one.step()
        saved = one.weights()
    with job(store, width=9) as other:
        before = other.weights()
        with pytest.raises(ModelMismatchError, match=r"another model: other shapes .*: blocks\.0\.0\.bias"):
            other.ckpt.resume()
        assert same(other.weights(), before)
    with job(store) as third:
        assert third.ckpt.resume() == 1
        assert same(third.weights(), saved)


def test_a_store_with_other_parameter_names_is_refused(store: Path) -> None:
    with job(store) as one:
        one.step()
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = monitor.attach((model, optimizer), {"store": str(store), "metrics": {"enabled": False}})
    with ckpt, pytest.raises(ModelMismatchError, match=r"only in the store: .*only in this model: 0\.bias, 0\.weight"):
        ckpt.resume()


def test_another_optimizer_is_refused(store: Path) -> None:
    with job(store) as one:
        one.step()
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ckpt = monitor.attach((model, optimizer), {"store": str(store), "metrics": {"enabled": False}})
    with ckpt, pytest.raises(ModelMismatchError, match="optimizer AdamW, this job has SGD"):
        ckpt.resume()


def test_another_number_of_state_objects_is_refused(store: Path) -> None:
    with job(store) as one:
        one.step()
    with job(store, state=[torch.Generator()]) as other:
        before = other.weights()
        with pytest.raises(ModelMismatchError, match="state of 0 objects"):
            other.ckpt.resume()
        now = other.weights()
        assert same({name: now[name] for name in before}, before)


def test_a_store_attached_twice_is_refused(store: Path) -> None:
    with job(store) as one:
        with pytest.raises(StoreInUseError):
            Job(store)
        assert lock_holder(store) == os.getpid()
        one.step()
    with job(store) as after:
        assert after.ckpt.resume() == 1


def test_a_store_of_a_newer_format_is_refused(store: Path) -> None:
    with job(store) as one:
        one.step()
    path = store / "STORE.json"
    body = unseal(path.read_bytes(), "STORE.json")
    path.write_bytes(seal({**body, "format": READER + 1, "reader": READER + 1}))
    with pytest.raises(NewerFormatError, match="pip install --upgrade"):
        Job(store)


def test_a_store_with_damaged_manifests_only_is_refused(store: Path) -> None:
    with job(store) as one:
        one.step()
    for path in (store / "manifests").iterdir():
        path.write_bytes(path.read_bytes()[:-2])
    with job(store) as other, pytest.raises(NothingToResumeError, match="driftpoint verify"):
        other.ckpt.resume()


def test_a_store_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(StorageError, match="file"):
        Job(tmp_path / "file")
    with pytest.raises(StorageError, match="file"):
        Job(tmp_path / "file" / "below")


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"notes\.txt"):
        Job(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_unknown_key_in_a_yaml_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "driftpoint.yaml"
    path.write_text(yaml.safe_dump({"store": str(tmp_path / "store"), "evrey": 5}))
    model = Model()
    with pytest.raises(ConfigError, match="'every'"):
        monitor.attach((model, torch.optim.AdamW(model.parameters())), path)
    assert not (tmp_path / "store").exists()


def test_state_without_state_dict_is_refused(store: Path) -> None:
    with pytest.raises(ConfigError, match=r"state\[1\]"):
        Job(store, state=[torch.Generator(), object()])
    assert not store.exists()


class StateWithFunction:
    """State that contains a function after `fine` calls."""

    def __init__(self, fine: int) -> None:
        self._fine = fine

    def state_dict(self) -> dict[str, object]:
        self._fine -= 1
        return {"n": 1} if self._fine >= 0 else {"rule": lambda step: step}

    def load_state_dict(self, state: dict[str, object]) -> None:
        assert state == {"n": 1}


def test_state_that_cannot_be_stored_is_refused_at_attach(store: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"\['user'\]\[0\]\['rule'\]"):
        Job(store, state=[StateWithFunction(0)])
    assert not store.exists()


def test_state_that_becomes_unstorable_fails_the_save_only(store: Path) -> None:
    with job(store, state=[StateWithFunction(3)]) as one:
        for _ in range(3):
            one.step()
        assert one.metric("driftpoint_failures_total", reason="UnsupportedError") == 1
    assert committed_steps(store) == [1]


def test_a_damaged_store_record_is_refused(store: Path) -> None:
    with job(store) as one:
        one.step()
    path = store / "STORE.json"
    path.write_bytes(path.read_bytes().replace(b"store_id", b"store_iD"))
    with pytest.raises(DamagedError, match=r"STORE\.json"):
        Job(store)
