"""Optimizer state in the store, for parameters that the rebuilt optimizer does not hold, is never dropped silently.

The usual way there: layers that are unfrozen by ``add_param_group`` in mid-run. A restarted script builds the optimizer
that it began with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monitor
from store.errors import ModelMismatchError


class Unfreezing:
    """Two layers; the optimizer begins with the second one, and the first one is added later."""

    def __init__(self, store: Path, optimizer: type[torch.optim.Optimizer], **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.model[0].requires_grad_(False)
        self.optimizer = optimizer(self.model[1].parameters(), lr=0.01)
        config = {"store": str(store), "every": 1, "metrics": {"enabled": False}, **settings}
        self.ckpt = monitor.attach((self.model, self.optimizer), config)

    def unfreeze(self) -> None:
        self.model[0].requires_grad_(True)
        self.optimizer.add_param_group({"params": list(self.model[0].parameters()), "lr": 0.001})

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(3, 4)).square().mean().backward()
        self.optimizer.step()
        self.ckpt.step()
        self.ckpt.flush()

    def moments(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        state = self.optimizer.state
        return {name: dict(state[one]) for name, one in self.model.named_parameters() if one in state}


@pytest.fixture(params=[torch.optim.AdamW, torch.optim.Adafactor])
def optimizer(request: pytest.FixtureRequest) -> type[torch.optim.Optimizer]:
    """State of the parameter's shape, and state of other shapes alone."""
    kind: type[torch.optim.Optimizer] = request.param
    return kind


@pytest.fixture
def store(tmp_path: Path, optimizer: type[torch.optim.Optimizer]) -> Path:
    """A store with a commit made after the first layer was unfrozen."""
    one = Unfreezing(tmp_path / "store", optimizer)
    one.ckpt.resume()
    one.step()
    one.unfreeze()
    one.step()
    one.ckpt.close()
    return tmp_path / "store"


def test_refused_by_name_and_nothing_changed(store: Path, optimizer: type[torch.optim.Optimizer]) -> None:
    one = Unfreezing(store, optimizer)
    before = {name: value.clone() for name, value in one.model.state_dict().items()}
    with pytest.raises(ModelMismatchError, match=r"0\.bias, 0\.weight.*add_param_group.*unused_state: drop"):
        one.ckpt.resume()
    assert all(torch.equal(before[name], value) for name, value in one.model.state_dict().items())
    assert not one.optimizer.state
    one.ckpt.close()


def test_a_group_added_before_the_resume_takes_its_state(store: Path, optimizer: type[torch.optim.Optimizer]) -> None:
    one = Unfreezing(store, optimizer)
    one.unfreeze()
    assert one.ckpt.resume() == 2
    assert one.ckpt.certificate is not None and one.ckpt.certificate.exact
    assert one.moments().keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert all(bool(state["step"] == 1) for name, state in one.moments().items() if name.startswith("0"))
    assert [group["lr"] for group in one.optimizer.param_groups] == [0.01, 0.001]
    one.ckpt.close()


def test_dropped_if_asked_for_and_not_exact(store: Path, optimizer: type[torch.optim.Optimizer]) -> None:
    one = Unfreezing(store, optimizer, resume={"unused_state": "drop"})
    assert one.ckpt.resume() == 2
    assert one.ckpt.certificate is not None and not one.ckpt.certificate.exact
    assert any("0.weight" in problem for problem in one.ckpt.certificate.problems)
    assert one.ckpt.resumed is not None and any("0.weight" in note for note in one.ckpt.resumed.notes)
    one.ckpt.close()


# ---- which parameters are trained, and in which groups


class Grouped(Unfreezing):
    """Two layers, each in a group of its own, or the second alone, trained without any state of the optimizer."""

    def __init__(self, store: Path, *, alone: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        groups = [{"params": list(layer.parameters())} for layer in self.model[int(alone) :]]
        self.optimizer = torch.optim.SGD(groups, lr=0.01)
        config = {"store": str(store), "every": 1, "metrics": {"enabled": False}}
        self.ckpt = monitor.attach((self.model, self.optimizer), config)


def take_out(one: Grouped) -> None:
    one.optimizer.param_groups[0]["params"].pop()


def add(one: Grouped) -> None:
    one.optimizer.add_param_group({"params": list(one.model[0].parameters())})


@pytest.mark.parametrize(
    ("change", "alone", "problem"),
    [
        (take_out, False, "the optimizer has 0.bias, and that of the save did not"),
        (add, True, "the optimizer of the save had 0.bias, 0.weight, and this one does not"),
    ],
)
def test_parameters_that_training_gave_or_took_are_not_exact_in_a_script_that_did_not(
    tmp_path: Path, change: Callable[[Grouped], None], alone: bool, problem: str
) -> None:
    one = Grouped(tmp_path / "store", alone=alone)
    one.ckpt.resume()
    one.step()
    change(one)
    one.step()
    one.ckpt.close()
    two = Grouped(tmp_path / "store", alone=alone)
    assert two.ckpt.resume() == 2
    assert two.ckpt.certificate is not None and two.ckpt.certificate.problems == (problem,)
    assert two.ckpt.resumed is not None and problem in two.ckpt.resumed.notes
    two.ckpt.close(save=False)
    three = Grouped(tmp_path / "store", alone=alone)
    change(three)
    assert three.ckpt.resume() == 2
    assert three.ckpt.certificate is not None and three.ckpt.certificate.exact and not three.ckpt.resumed.notes
    three.ckpt.close(save=False)


def test_another_requires_grad_is_told_and_the_state_is_exact(tmp_path: Path) -> None:
    """A loop that trains two models in turn sets it at every step."""
    one = Grouped(tmp_path / "store")
    one.ckpt.resume()
    one.step()
    one.model[0].requires_grad_(False)
    one.step()
    one.ckpt.close()
    two = Grouped(tmp_path / "store")
    assert two.ckpt.resume() == 2
    assert two.ckpt.certificate is not None and two.ckpt.certificate.exact
    assert two.ckpt.resumed is not None
    (note,) = two.ckpt.resumed.notes
    assert note.startswith("requires_grad of 0.bias, 0.weight is not as saved")
    two.ckpt.close(save=False)
