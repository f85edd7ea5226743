"""Tensors that are more than their elements are refused by name: a store holds elements, not classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monitor
from store.catalog import open_catalog
from store.errors import UnstorableError
from store.storage.local import LocalFiles

CONFIG = {"every": 1, "metrics": {"enabled": False}}


class Tagged(torch.Tensor):
    """A subclass with the storage of a plain tensor."""


class Packed(torch.Tensor):
    """Eight-bit codes and a scale that behave as float32, like the state of optimizers with 8 bits."""

    codes: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: float) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: float) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        if func is torch.ops.aten.view.default:
            return cls(args[0].codes.view(args[1]), args[0].scale)
        plain = [one.codes.float() * one.scale if isinstance(one, cls) else one for one in args]
        return func(*plain, **(kwargs or {}))


class Memory(torch.optim.Optimizer):
    """Gradient descent that keeps, after its first step, an entry ``memory`` made by ``make`` of each parameter."""

    def __init__(self, parameters: Any, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self._make = make

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"])
                self.state[parameter].setdefault("memory", self._make(parameter))


def tagged(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().clone().as_subclass(Tagged)


def packed(parameter: torch.Tensor) -> torch.Tensor:
    return Packed(torch.ones_like(parameter, dtype=torch.uint8), 0.5)


def tagged_scalar(parameter: torch.Tensor) -> torch.Tensor:
    return torch.ones(3).as_subclass(Tagged)


def nested(parameter: torch.Tensor) -> list[Any]:
    return [1, {"factor": torch.ones(3).as_subclass(Tagged)}]


def python_object(parameter: torch.Tensor) -> object:
    return object()


KINDS = {tagged: "Tagged", packed: "Packed", tagged_scalar: "Tagged", nested: "Tagged", python_object: "object"}


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("make", KINDS)
def test_optimizer_state_is_refused_at_the_first_decision(tmp_path: Path, make: Any) -> None:
    model = nn.Linear(4, 4)
    optimizer = Memory(model.parameters(), make)
    with monitor.attach((model, optimizer), {**CONFIG, "store": str(tmp_path / "store")}) as ckpt:
        train(model, optimizer)
        with pytest.raises(UnstorableError, match=rf"Memory keeps 'memory' of weight as .*{KINDS[make]}"):
            ckpt.step()
        ckpt.close(save=False)
    assert not open_catalog(LocalFiles(tmp_path / "store")).saves()


@pytest.mark.parametrize("make", KINDS)
def test_optimizer_state_is_refused_at_attach_where_it_exists(tmp_path: Path, make: Any) -> None:
    model = nn.Linear(4, 4)
    optimizer = Memory(model.parameters(), make)
    train(model, optimizer)
    with pytest.raises(UnstorableError, match=rf"'memory' of weight as .*{KINDS[make]}"):
        monitor.attach((model, optimizer), {**CONFIG, "store": str(tmp_path / "store")})


def test_state_that_changes_its_class_after_a_save_does_not_end_training(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = Memory(model.parameters(), torch.clone)
    with monitor.attach((model, optimizer), {**CONFIG, "store": str(tmp_path / "store")}) as ckpt:
        train(model, optimizer)
        ckpt.step()
        ckpt.flush()
        optimizer.state[model.weight]["memory"] = tagged(model.weight)
        report = ckpt.step()
        assert report is not None and report.skipped == "unsupported"
        assert report.problem is not None and "'memory' of weight" in report.problem
        ckpt.close(save=False)


def test_a_hyperparameter_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["scale"] = torch.ones(()).as_subclass(Tagged)
    with pytest.raises(UnstorableError, match=r"'scale' of param group 0 as .*Tagged"):
        monitor.attach((model, optimizer), {**CONFIG, "store": str(tmp_path / "store")})


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("make", [tagged, packed])
def test_a_parameter_is_refused(tmp_path: Path, make: Any, frozen: bool) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD([model.bias], lr=0.1)
    model.weight = nn.Parameter(make(model.weight), requires_grad=not frozen)
    with pytest.raises(UnstorableError, match=f"weight is a .*{type(model.weight).__name__}"):
        monitor.attach((model, optimizer), {**CONFIG, "store": str(tmp_path / "store")})


def test_a_subclass_of_parameter_is_refused_unless_it_is_left_out(tmp_path: Path) -> None:
    class Quantized(nn.Parameter):
        """As quantizing libraries make them: codes in a parameter, and what they mean in attributes of it."""

    model = nn.Linear(4, 4)
    model.weight = Quantized(torch.ones(4, 4), requires_grad=False)
    optimizer = torch.optim.SGD([model.bias], lr=0.1)
    config = {**CONFIG, "store": str(tmp_path / "store")}
    with pytest.raises(UnstorableError, match=r"weight is a .*Quantized.*`frozen: skip`"):
        monitor.attach((model, optimizer), config)
    with monitor.attach((model, optimizer), {**config, "frozen": "skip"}) as ckpt:
        train(model, optimizer)
        ckpt.step()
    assert len(open_catalog(LocalFiles(tmp_path / "store")).saves()) == 1


def test_a_subclass_that_is_left_out_may_be_in_the_optimizer(tmp_path: Path) -> None:
    class Quantized(nn.Parameter):
        """As above."""

    settings = {**CONFIG, "store": str(tmp_path / "store"), "frozen": "skip"}

    def job() -> tuple[nn.Linear, torch.optim.Optimizer, monitor.Checkpointer]:
        torch.manual_seed(1)
        model = nn.Linear(4, 4)
        model.weight = Quantized(torch.ones(4, 4), requires_grad=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, monitor.attach((model, optimizer), settings)

    model, optimizer, ckpt = job()
    train(model, optimizer)
    ckpt.step()
    ckpt.close()
    resumed, optimizer, ckpt = job()
    ckpt.resume()
    assert ckpt.certificate is not None
    assert ckpt.certificate.exact
    assert torch.equal(resumed.bias, model.bias)
    assert set(optimizer.state[resumed.bias]) == {"step", "exp_avg", "exp_avg_sq"}
    ckpt.close()


def test_a_buffer_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("mean", torch.ones(4).as_subclass(Tagged))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnstorableError, match=r"mean is a .*Tagged"):
        monitor.attach((model, optimizer), {**CONFIG, "store": str(tmp_path / "store")})


def test_plain_tensors_parameters_and_buffers_are_accepted(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    model.mean = nn.Buffer(torch.ones(4))
    optimizer = Memory(model.parameters(), lambda parameter: nn.Parameter(parameter.detach().clone()))
    with monitor.attach((model, optimizer), {**CONFIG, "store": str(tmp_path / "store")}) as ckpt:
        train(model, optimizer)
        ckpt.step()
    assert len(open_catalog(LocalFiles(tmp_path / "store")).saves()) == 1
