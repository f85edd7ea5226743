"""Run state with right checksums and wrong types: the commit is not used, and nothing changes before that is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from store.errors import DamagedError, ModelMismatchError, NothingToResumeError
from tests.support.forged import forge_part, saves_of
from tests.support.jobs import Job, same

Change = Callable[[dict[str, Any]], Any]


def framework(change: Change) -> Change:
    return lambda state: change(state["framework"])


def first_scalars(state: dict[str, Any]) -> dict[str, Any]:
    scalars: dict[str, Any] = next(iter(state["framework"]["scalars"].values()))
    return scalars


WRONG: dict[str, Change] = {
    "framework null": lambda state: state.update(framework=None),
    "framework a list": lambda state: state.update(framework=[]),
    "slots null": framework(lambda one: one.update(slots=None)),
    "slots of a parameter a number": framework(lambda one: one["slots"].update({"head.weight": 3})),
    "scalars a list": framework(lambda one: one.update(scalars=[])),
    "scalars of a parameter null": framework(lambda one: one["scalars"].update({"head.weight": None})),
    "step a list": lambda state: first_scalars(state).update(step=[1]),
    "param groups a mapping": framework(lambda one: one.update(param_groups={})),
    "params a number": framework(lambda one: one["param_groups"][0].update(params=1)),
    "hyper a list": framework(lambda one: one["param_groups"][0].update(hyper=[])),
    "counters a list": framework(lambda one: one.update(counters=[1])),
    "loss scaler without class": framework(lambda one: one.update(loss_scaler={"cur_scale": 1.0})),
    "rng a list": lambda state: state.update(rng=[]),
    "rng without numpy": lambda state: state["rng"].pop("numpy"),
    "torch's generator a number": lambda state: state["rng"].update(torch=1),
    "user a number": lambda state: state.update(user=4),
    "objects a number": lambda state: state.update(objects=4),
    "more objects than states": lambda state: state["objects"].append([None, "Late"]),
    "an object without a class": lambda state: state.update(objects=[[None]]),
    "modules a list": lambda state: state.update(modules=[]),
    "buffers numbers": lambda state: state.update(buffers={"a": 1}),
    "no user": lambda state: state.pop("user"),
    "a leaf that is not there": lambda state: state["rng"].update(torch={"$": "tensor", "v": 999}),
}


class Loader:
    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def trained(store: Path, steps: int) -> None:
    torch.manual_seed(1)
    job = Job(store, [Loader()])
    for at in range(steps):
        job.ckpt._job.user.objects[0].at = at + 1
        job.step()
    job.ckpt.close()


def change_run_state(store: Path, change: Change) -> None:
    forge_part(store, saves_of(store)[-1], lambda part: change(part["run_state"]))


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_a_commit_with_wrong_types_is_passed_over(change: Change, tmp_path: Path) -> None:
    store = tmp_path / "store"
    trained(store, 2)
    change_run_state(store, change)
    job = Job(store, [Loader()])
    with job.ckpt:
        assert job.ckpt.resume() == 1
        assert job.ckpt._job.user.objects[0].at == 1
        assert job.ckpt.certificate is not None and job.ckpt.certificate.step == 1
        assert job.ckpt.resumed is not None and any("rank 0: " in note for note in job.ckpt.resumed.notes)
        job.update()


@pytest.mark.parametrize("name", ["slots null", "scalars a list", "framework a list", "step a list"])
def test_without_another_commit_nothing_changes(name: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    trained(store, 1)
    change_run_state(store, WRONG[name])
    torch.manual_seed(7)
    job = Job(store, [Loader()])
    with job.ckpt:
        before, generator = job.weights(), torch.get_rng_state()
        with pytest.raises((NothingToResumeError, DamagedError)):
            job.ckpt.resume()
        assert same(job.weights(), before) and torch.equal(torch.get_rng_state(), generator)
        assert not job.optimizer.state and job.ckpt._job.user.objects[0].at == 0


def test_a_run_state_that_is_no_mapping_is_passed_over(tmp_path: Path) -> None:
    store = tmp_path / "store"
    trained(store, 2)
    forge_part(store, saves_of(store)[-1], lambda part: part.update(run_state=[1, 2]))
    job = Job(store, [Loader()])
    with job.ckpt:
        assert job.ckpt.resume() == 1


@pytest.mark.parametrize("value", ["fast", [0.1], {"rate": 0.1}], ids=["text", "list", "mapping"])
def test_a_hyperparameter_of_another_kind_is_refused_before_anything_changes(value: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    trained(store, 1)
    change_run_state(store, framework(lambda one: one["param_groups"][0]["hyper"].update(lr=value)))
    job = Job(store, [Loader()])
    with job.ckpt:
        before = job.weights()
        with pytest.raises(ModelMismatchError, match="hyperparameter lr = "):
            job.ckpt.resume()
        assert same(job.weights(), before) and job.optimizer.param_groups[0]["lr"] == 1e-2
