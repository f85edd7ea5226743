"""A resume that is refused has changed nothing: no weight, no slot, no hyperparameter, no object, no generator."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import monitor
from monitor.adapters.pytorch import PyTorchAdapter
from store.errors import ConfigError, DriftpointError, ModelMismatchError, UsageError
from tests.support.fingerprint import differing, of_job

Groups = Callable[[nn.Module], Any]


class Counter:
    """A user's object: a number, a list, a tensor. ``broken``: what its load_state_dict does before it raises."""

    def __init__(self, start: int, broken: Callable[[], object] | None = None) -> None:
        self.count, self.seen, self.tensor = start, [start], torch.full((3,), float(start))
        self._broken = broken

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "seen": self.seen, "tensor": self.tensor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]
        self.seen[:] = state["seen"]
        self.tensor.copy_(state["tensor"])
        if self._broken is not None and self.count == 7:
            self._broken()
            raise KeyError("epoch")


class Job:
    """Two linear layers and a batch norm under AdamW. groups: the optimizer's param groups from the model."""

    def __init__(self, store: Path, groups: Groups, state: list[Any], trained: int = 0, **optimizer: Any) -> None:
        self.model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        self.optimizer = torch.optim.AdamW(groups(self.model), **{"lr": 0.1, **optimizer})
        for _ in range(trained):
            self.update()
        self.state = state
        settings = {"store": str(store), "every": 1, "metrics": {"enabled": False}}
        self.ckpt = monitor.attach((self.model, self.optimizer), settings, state=state)

    def update(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(5, 6)).square().sum().backward()
        self.optimizer.step()

    def fingerprint(self) -> dict[str, Any]:
        return of_job(self.model, self.optimizer, *self.state)


def apart(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and the rest, with different settings."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return [
        {"params": matrices, "weight_decay": 0.5},
        {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 0.02, "betas": (0.5, 0.6)},
    ]


def joined(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store as two param groups and one object of the user left it, at step 2."""
    path = tmp_path / "store"
    torch.manual_seed(1)
    one = Job(path, apart, [Counter(7)])
    one.ckpt.resume()
    for _ in range(2):
        one.update()
        one.ckpt.step()
        one.ckpt.flush()
    one.ckpt.close()
    return path


def require_refused(job: Job, error: type[Exception], words: str) -> None:
    """It is refused with these words, nothing has changed, and training without saving is not confused with more."""
    before = job.fingerprint()
    with job.ckpt:
        with pytest.raises(error, match=words):
            job.ckpt.resume()
        assert differing(before, job.fingerprint()) == []
        assert job.ckpt.certificate is None


TRAINED = pytest.mark.parametrize("trained", [0, 3])
"""A refusal finds an optimizer without any state, or one that has gone another way."""


def test_without_a_reason_to_refuse_everything_comes_back(store: Path) -> None:
    job = Job(store, apart, [Counter(1)], trained=3)
    before = job.fingerprint()
    with job.ckpt:
        assert job.ckpt.resume() == 2
    changed = {place.split("/")[1] for place in differing(before, job.fingerprint())}
    assert changed == {"model", "optimizer", "gradients", "objects", "generators"}


@TRAINED
def test_param_groups_that_join_different_ones(store: Path, trained: int) -> None:
    require_refused(Job(store, joined, [Counter(1)], trained), ModelMismatchError, "param group 0 joins")


@TRAINED
def test_a_param_group_that_nobody_saved(tmp_path: Path, trained: int) -> None:
    """Part of the model had no optimizer when it was saved."""
    one = Job(tmp_path / "store", lambda model: list(model[0].parameters()), [])
    one.ckpt.resume()
    one.update()
    one.ckpt.step()
    one.ckpt.close()
    groups: Groups = lambda model: [{"params": list(part.parameters())} for part in model]  # noqa: E731
    job = Job(tmp_path / "store", groups, [], trained)
    require_refused(job, ModelMismatchError, "no parameter in the saved state")


@TRAINED
@pytest.mark.parametrize("saved", [torch.zeros(3), None, [1, 2]])
def test_a_hyperparameter_in_a_tensor_that_cannot_take_it(tmp_path: Path, trained: int, saved: Any) -> None:
    one = Job(tmp_path / "store", apart, [])
    one.optimizer.param_groups[1]["scale"] = saved
    one.ckpt.resume()
    one.update()
    one.ckpt.step()
    one.ckpt.close()
    job = Job(tmp_path / "store", apart, [], trained)
    job.optimizer.param_groups[1]["scale"] = torch.ones(2)
    require_refused(job, ModelMismatchError, "'scale' of param group 1 is a tensor of shape")


def spoil(job_of: Callable[[], Job]) -> None:
    """Everything that a load_state_dict can reach besides its own object."""
    torch.randn(3), np.random.rand(3), random.random()
    for group in job_of().optimizer.param_groups:
        group["lr"] = 77.0


@TRAINED
def test_an_object_that_raises_half_way(store: Path, trained: int) -> None:
    """It has changed itself, drawn random numbers and set the learning rates by then; so has the one before it."""
    made: list[Job] = []
    job = Job(store, apart, [Counter(1, lambda: spoil(lambda: made[0]))], trained)
    made.append(job)
    require_refused(job, UsageError, r"state\[0\] \(a Counter\).*KeyError\('epoch'\)")


@TRAINED
def test_an_object_before_the_one_that_raises(tmp_path: Path, trained: int) -> None:
    path = tmp_path / "store"
    one = Job(path, apart, [Counter(5), Counter(7)])
    one.ckpt.resume()
    one.update()
    one.ckpt.step()
    one.ckpt.close()
    job = Job(path, apart, [Counter(1), Counter(2, lambda: None)], trained)
    require_refused(job, UsageError, r"state\[1\] \(a Counter\)")


def test_an_object_of_another_kind(store: Path) -> None:
    """Another object in the same place: a generator cannot take a counter's state."""
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(8)
    job = Job(store, apart, [], trained=1)
    job.ckpt.close()
    job.ckpt = monitor.attach(
        (job.model, job.optimizer), {"store": str(store), "metrics": {"enabled": False}}, state=[generator]
    )
    drawn = generator.get_state()
    require_refused(job, UsageError, r"state\[0\] \(a Generator\)")
    assert torch.equal(generator.get_state(), drawn)


@TRAINED
def test_another_number_of_objects(store: Path, trained: int) -> None:
    require_refused(Job(store, apart, [Counter(1), Counter(2)], trained), ModelMismatchError, "state of 1 objects")


@TRAINED
def test_another_optimizer(store: Path, trained: int) -> None:
    job = Job(store, apart, [Counter(1)])
    job.ckpt.close()
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(trained):
        job.update()
    job.ckpt = monitor.attach(
        (job.model, job.optimizer), {"store": str(store), "metrics": {"enabled": False}}, state=job.state
    )
    require_refused(job, ModelMismatchError, "optimizer AdamW, this job has SGD")


def test_values_that_the_model_cannot_hold(tmp_path: Path) -> None:
    path = tmp_path / "store"
    one = Job(path, apart, [])
    one.ckpt.resume()
    one.update()
    with torch.no_grad():
        one.model[2].weight[0, 0] = 1e30
    one.ckpt.step()
    one.ckpt.close()
    job = Job(path, apart, [])
    job.model.half()
    require_refused(job, ModelMismatchError, r"2\.weight")


def test_generators_of_another_make(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a change of the library's own format: the last thing that a resume puts back is the first to fail."""
    captured = monitor.run_state.capture_rng  # type: ignore[attr-defined]
    monkeypatch.setattr("monitor.run_state.capture_rng", lambda: {**captured(), "python": (99, (1, 2, 3), None)})
    one = Job(store, apart, [Counter(1)])
    one.ckpt.resume()
    one.update()
    one.ckpt.step()
    one.ckpt.close()
    monkeypatch.undo()
    require_refused(Job(store, apart, [Counter(1)], trained=1), UsageError, "random generators")


def test_what_breaks_off_half_way_says_that_nothing_is_left_to_go_on_from(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that is left to fail then can be known before; the job must not train on with what it has."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory on a device")

    job = Job(store, apart, [Counter(1)])
    monkeypatch.setattr(PyTorchAdapter, "prepare_load", full)
    with job.ckpt:
        with pytest.raises(DriftpointError, match=r"failed midway.*mixture of old and new.*Restart the job"):
            job.ckpt.resume()
        with pytest.raises(ConfigError, match="resume"):
            job.ckpt.step()


class Always(Counter):
    """Raises on any state, its own as well."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise RuntimeError("not today")


def test_an_object_that_cannot_be_put_back_is_told(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    require_refused(Job(store, apart, [Always(1)], trained=1), UsageError, "not today")
    assert "state[0] (a Always) cannot load its state from before the resume either" in caplog.text


class Silent(Counter):
    """Its state can be had once, when it is attached."""

    def state_dict(self) -> dict[str, Any]:
        self.count += 1
        if self.count > 2:
            raise RuntimeError("the workers are not started")
        return super().state_dict()


def test_an_object_whose_present_state_cannot_be_had_is_not_touched(store: Path) -> None:
    job = Job(store, apart, [Silent(1)], trained=1)
    tensor = job.state[0].tensor.clone()
    with job.ckpt, pytest.raises(UsageError, match=r"the state of state\[0\] \(a Silent\) cannot be captured"):
        job.ckpt.resume()
    assert torch.equal(job.state[0].tensor, tensor)


class Shrinking(Counter):
    """Loading it changes the model's dtype, and loading its former state changes that back."""

    def __init__(self, start: int, model: nn.Module) -> None:
        super().__init__(start)
        self._model = model

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._model.to(torch.float16 if self.count == 7 else torch.float32)


def test_an_object_that_changes_the_model_so_that_it_fits_no_more(store: Path) -> None:
    job = Job(store, apart, [], trained=1)
    job.ckpt.close()
    shrinking = Shrinking(1, job.model)
    settings = {"store": str(store), "metrics": {"enabled": False}}
    job.ckpt = monitor.attach((job.model, job.optimizer), settings, state=[shrinking])
    with job.ckpt, pytest.raises(ModelMismatchError, match=r"Remove objects that change the shape or dtype"):
        job.ckpt.resume()
    assert {p.dtype for p in job.model.parameters()} == {torch.float32}
    assert shrinking.count == 1


def test_the_optimizer_itself_may_be_among_the_objects(tmp_path: Path) -> None:
    """It replaces its own tensors when it loads: what is loaded here goes into the new ones."""

    def made(seed: int) -> Job:
        torch.manual_seed(seed)
        job = Job(tmp_path / "store", apart, [], trained=1)
        job.ckpt.close()
        settings = {"store": str(tmp_path / "store"), "every": 1, "metrics": {"enabled": False}}
        job.ckpt = monitor.attach((job.model, job.optimizer), settings, state=[job.optimizer])
        return job

    one = made(1)
    with one.ckpt:
        one.ckpt.resume()
        one.update()
        one.ckpt.step()
        saved = one.fingerprint()
    other = made(2)
    with other.ckpt:
        assert other.ckpt.resume() == 1
    for name in ("model", "optimizer", "generators"):
        found, wanted = other.fingerprint()[name], saved[name]
        assert differing(wanted, {**found, "members": wanted.get("members")}) == [], name


def test_after_a_refusal_the_right_objects_resume(store: Path) -> None:
    """The same process may try again."""
    job = Job(store, apart, [Counter(1), Counter(2)], trained=2)
    with job.ckpt:
        with pytest.raises(ModelMismatchError):
            job.ckpt.resume()
        job.ckpt._job.user.objects.pop()
        assert job.ckpt.resume() == 2
        assert job.ckpt.certificate is not None and job.ckpt.certificate.exact
    assert job.state[0].count == 7
