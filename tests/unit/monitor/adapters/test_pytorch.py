"""PyTorchAdapter in one process: slots, run state, and unsupported models and optimizers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import monitor
from monitor.adapters import adapter_for
from monitor.adapters.base import Adapter
from monitor.adapters.module_tensors import dtype_name
from store.errors import ModelMismatchError, UnstorableError, UnsupportedError
from store.names import Fragment

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Net(nn.Module):
    """A convolution with batch norm, a tied pair, a parameter without dimensions, a frozen one, an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5, bias=False)
        self.conv = nn.Conv1d(1, 3, 2)
        self.norm = nn.BatchNorm1d(3)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.empty(0))
        self.out = nn.Linear(12, 4)
        self.out.bias.requires_grad_(False)
        self.last = nn.Linear(5, 5, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.last(self.first(x)).unsqueeze(1)
        return (self.out(self.norm(self.conv(x)).flatten(1)) * self.gain).square().mean()


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def adafactor(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.01)


def amsgrad(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, amsgrad=True, foreach=False)


def start(seed: int, make: Make = adamw) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net()
    return net, make(list(net.parameters()))


def train(net: Net, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = net(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def copy_of(adapter: Adapter) -> tuple[dict[Fragment, torch.Tensor], dict[str, Any]]:
    return {piece.fragment: piece.tensor.clone() for piece in adapter.owned()}, adapter.run_state()


def load(adapter: Adapter, pieces: dict[Fragment, torch.Tensor], run_state: dict[str, Any]) -> None:
    slots: dict[str, dict[str, str]] = {}
    for fragment, tensor in pieces.items():
        slots.setdefault(fragment.fqn, {})[fragment.slot] = dtype_name(tensor.dtype)
    adapter.prepare_load(slots)
    held = {piece.fragment: piece.tensor for piece in adapter.held()}
    assert held.keys() == pieces.keys()
    for fragment, tensor in held.items():
        tensor.copy_(pieces[fragment])
    adapter.load_run_state(run_state)
    adapter.finish_load()


@pytest.mark.parametrize("make", [adamw, sgd, adafactor, amsgrad])
def test_resume_is_bitwise(make: Make) -> None:
    net, optimizer = start(0, make)
    train(net, optimizer, range(3))
    pieces, run_state = copy_of(adapter_for((net, optimizer)))
    losses = train(net, optimizer, range(3, 8))
    fresh, other = start(1, make)
    load(adapter_for((fresh, other)), pieces, run_state)
    assert train(fresh, other, range(3, 8)) == losses
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), fresh.state_dict().values(), strict=True))


def test_every_tensor_once_under_its_slot() -> None:
    net, optimizer = start(0)
    train(net, optimizer, range(1))
    found = {(p.fragment.fqn, p.fragment.slot): p.fragment.numel for p in adapter_for((net, optimizer)).owned()}
    assert found["first.weight", "fp32"] == found["first.weight", "exp_avg"] == 25
    assert found["gain", "fp32"] == found["gain", "exp_avg_sq"] == 1
    assert found["out.bias", "frozen"] == 4
    assert found["norm.running_mean", "buffer"] == 3
    assert found["norm.num_batches_tracked", "buffer"] == 1
    assert not {fqn for fqn, _ in found} & {"last.weight", "scratch", "empty"}
    assert ("gain", "step") not in found and ("out.bias", "fp32") not in found


def test_tensors_names_ties_and_kinds() -> None:
    infos = adapter_for(start(0)).tensors()
    assert infos["first.weight"].aliases == ("last.weight",)
    assert infos["out.bias"].kind == "frozen" and infos["out.weight"].kind == "trainable"
    assert infos["norm.num_batches_tracked"].shape == () and infos["norm.num_batches_tracked"].dtype == "I64"
    assert "scratch" not in infos and "last.weight" not in infos


def test_weights_outside_the_optimizer_are_kept() -> None:
    net = Net()
    adapter = adapter_for((net, adamw([net.gain])))
    slots = {p.fragment.fqn: p.fragment.slot for p in adapter.owned()}
    assert slots["out.weight"] == "fp32"


def test_pieces_are_views() -> None:
    net, optimizer = start(0)
    for piece in adapter_for((net, optimizer)).held():
        if piece.fragment.fqn == "out.weight":
            piece.tensor.fill_(7)
    assert (net.out.weight == 7).all()


def test_factored_moments_and_steps_keep_kind_and_dtype() -> None:
    net, optimizer = start(0, adafactor)
    train(net, optimizer, range(2))
    scalars = adapter_for((net, optimizer)).run_state()["scalars"]["out.weight"]
    state = optimizer.state[net.out.weight]
    assert scalars.keys() == state.keys()
    assert all(torch.equal(scalars[key], state[key]) and scalars[key].dtype == state[key].dtype for key in state)


def test_run_state_is_a_copy() -> None:
    net, optimizer = start(0)
    train(net, optimizer, range(1))
    run_state = adapter_for((net, optimizer)).run_state()
    train(net, optimizer, range(1, 3))
    assert run_state["scalars"]["out.weight"]["step"] == 1


def test_state_saved_before_the_first_step_removes_live_state() -> None:
    net, optimizer = start(0)
    adapter = adapter_for((net, optimizer))
    pieces, run_state = copy_of(adapter)
    losses = train(net, optimizer, range(3))
    load(adapter, pieces, run_state)
    assert not optimizer.state
    assert train(net, optimizer, range(3)) == losses


def test_parameters_without_loaded_moments_start_fresh() -> None:
    net, optimizer = start(0)
    train(net, optimizer, range(3))
    pieces, run_state = copy_of(adapter_for((net, optimizer)))
    weights = {fragment: tensor for fragment, tensor in pieces.items() if not fragment.slot.startswith("exp_")}
    fresh, other = start(1)
    load(adapter_for((fresh, other)), weights, run_state)
    assert not other.state
    train(fresh, other, range(3, 4))


def test_a_single_missing_moment_becomes_zero() -> None:
    net, optimizer = start(0)
    train(net, optimizer, range(3))
    pieces, run_state = copy_of(adapter_for((net, optimizer)))
    kept = {fragment: tensor for fragment, tensor in pieces.items() if fragment.slot != "exp_avg"}
    fresh, other = start(1)
    load(adapter_for((fresh, other)), kept, run_state)
    assert not other.state[fresh.out.weight]["exp_avg"].any()
    assert other.state[fresh.out.weight]["step"] == 3
    train(fresh, other, range(3, 4))


def adagrad(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.01)


def test_state_of_a_parameter_without_elements_stays() -> None:
    """Nothing of it is stored; Adagrad, which makes it once, would not find it at its next step."""
    net, optimizer = start(0, adagrad)
    train(net, optimizer, range(1))
    fresh, other = start(1, adagrad)
    load(adapter_for((fresh, other)), *copy_of(adapter_for((net, optimizer))))
    assert other.state[fresh.empty].keys() == optimizer.state[net.empty].keys() == {"step", "sum"}


def two_groups(net: Net, swapped: bool = False) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [net.out.weight, net.gain], "lr": 0.5},
        {"params": [net.first.weight], "betas": (0.5, 0.6)},
    ]
    return torch.optim.AdamW(groups[::-1] if swapped else groups, lr=0.1)


def test_groups_are_matched_by_their_parameters() -> None:
    net = Net()
    run_state = adapter_for((net, two_groups(net))).run_state()
    optimizer = two_groups(net, swapped=True)
    for group in optimizer.param_groups:
        group["lr"], group["betas"], group["foreach"] = 9.0, (0.1, 0.2), True
    adapter_for((net, optimizer)).load_run_state(run_state)
    first, second = optimizer.param_groups
    assert (first["lr"], first["betas"]) == (0.1, (0.5, 0.6))
    assert (second["lr"], second["betas"]) == (0.5, (0.9, 0.999))
    assert first["foreach"] is True  # how it is computed is the live configuration's


def test_a_group_that_joins_different_ones_is_refused_unchanged() -> None:
    net = Net()
    run_state = adapter_for((net, two_groups(net))).run_state()
    optimizer = torch.optim.AdamW([net.out.weight, net.first.weight], lr=3.0)
    with pytest.raises(ModelMismatchError, match=r"out\.weight and first\.weight.*lr, betas"):
        adapter_for((net, optimizer)).load_run_state(run_state)
    assert optimizer.param_groups[0]["lr"] == 3.0


def test_a_learning_rate_in_a_tensor_stays_that_tensor() -> None:
    net = Net()
    run_state = adapter_for((net, adamw([net.gain]))).run_state()
    lr = torch.tensor(5.0)
    adapter_for((net, torch.optim.AdamW([net.gain], lr=lr, foreach=False))).load_run_state(run_state)
    assert lr == torch.tensor(0.01)


def test_steps_of_another_optimizer_keep_counting() -> None:
    """A class that counts in tensors would never increase a plain number."""
    net, optimizer = start(0)
    train(net, optimizer, range(2))
    pieces, run_state = copy_of(adapter_for((net, optimizer)))
    run_state["optimizer"] = "FusedAdam"
    for scalars in run_state["scalars"].values():
        scalars |= {key: int(value) for key, value in scalars.items()}
    load(adapter_for((net, optimizer)), pieces, run_state)
    fresh, other = start(1)
    load(adapter_for((fresh, other)), pieces, run_state)
    train(fresh, other, range(2, 3))
    assert other.state[fresh.out.weight]["step"] == 3


def test_a_parameter_with_gaps_in_memory_is_refused_by_name(tmp_path: Path) -> None:
    net = Net()
    net.out.weight.data = torch.zeros(4, 24)[:, ::2]
    with pytest.raises(UnsupportedError, match=r"out\.weight .*contiguous"):
        monitor.attach((net, adamw(list(net.parameters()))), {"store": str(tmp_path / "s")})
    assert not (tmp_path / "s").exists()


def test_a_parameter_of_another_module_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"shape \(3,\).*not in the model"):
        adapter_for((Net(), adamw([nn.Parameter(torch.zeros(3))])))


@pytest.mark.parametrize("target", [None, Net(), (Net(),), (Net(), "adam"), {"model": Net()}])
def test_other_targets_are_refused_with_the_accepted_ones(target: Any) -> None:
    with pytest.raises(UnsupportedError, match="pass a DeepSpeed engine"):
        adapter_for(target)


def test_compiled_modules_keep_their_names() -> None:
    net = Net()
    assert "out.weight" in adapter_for((torch.compile(net), adamw(list(net.parameters())))).tensors()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know:UserWarning")
def test_hooks_run_outside_a_compiled_step() -> None:
    model = nn.Linear(2, 2)
    optimizer, traced = adamw(list(model.parameters())), list[bool]()
    adapter_for((model, optimizer)).before_update(lambda: traced.append(torch.compiler.is_compiling()))
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        model(torch.randn(1, 2)).sum().backward()
        step()
    assert traced == [False] * 3


def test_blocks_that_are_checkpointed_or_compiled_keep_their_names() -> None:
    net, optimizer = start(0)
    bare, names = adapter_for((net, optimizer)).tensors(), list(net.state_dict())
    net.conv = checkpoint_wrapper(net.conv)  # type: ignore[assignment]
    net.norm = torch.compile(net.norm, backend="eager")  # type: ignore[assignment]
    adapter = adapter_for((net, optimizer))
    assert adapter.tensors() == bare
    assert adapter.layout_facts()["state_dict_names"] == names
    assert {piece.fragment.fqn for piece in adapter.owned()} <= bare.keys()


def test_a_wrapped_optimizer_is_unwrapped() -> None:
    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    net, optimizer = start(0)
    assert adapter_for((net, Wrapper(optimizer))).layout_facts()["optimizer"] == "AdamW"


class Lookahead(torch.optim.Optimizer):
    """Around another optimizer, with slow weights of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("slow", parameter.clone()).lerp_(parameter, 0.5)


def test_a_wrapper_with_state_of_its_own_is_refused_once_it_has_any() -> None:
    net, optimizer = start(0)
    wrapper = Lookahead(optimizer)
    adapter = adapter_for((net, wrapper))
    adapter.check_attached()
    train(net, wrapper, range(1))
    with pytest.raises(UnsupportedError, match="Lookahead around AdamW keeps state of its own"):
        adapter.check_attached()
    with pytest.raises(UnsupportedError, match="Lookahead around AdamW"):
        adapter_for((net, wrapper))


class Normed(nn.Module):
    """One module under two names, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.again = self.norm


def test_buffers_of_a_module_with_two_names_have_both() -> None:
    net = Normed()
    adapter = adapter_for((net, adamw(list(net.parameters()))))
    infos = adapter.tensors()
    assert infos["norm.running_mean"].aliases == ("again.running_mean",)
    known = {*infos, *(alias for info in infos.values() for alias in info.aliases)}
    assert set(adapter.layout_facts()["state_dict_names"]) == set(net.state_dict()) == known
    assert len([piece for piece in adapter.owned() if piece.fragment.slot == "buffer"]) == 3


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("where", ["weights", "state"])
def test_a_sparse_tensor_is_refused_by_name(tmp_path: Path, where: str) -> None:
    net, sparse = Net(), torch.eye(4).to_sparse_csr()
    net.s = nn.Parameter(sparse if where == "weights" else torch.eye(4))
    optimizer = adamw(list(net.parameters()))
    if where == "state":
        optimizer.state[net.s]["exp_avg"] = sparse
    with pytest.raises(UnstorableError, match=r"\bs\b.*sparse_csr"):
        monitor.attach((net, optimizer), {"store": str(tmp_path / "s")})
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("place", ["out", "norm"])
def test_uninitialized_tensors_are_refused_by_name(tmp_path: Path, place: str) -> None:
    net = Net()
    getattr(net, place).to("meta")
    with pytest.raises(UnsupportedError, match=rf"{place}\.\w+ .*meta device and has no values yet.*to_empty"):
        monitor.attach((net, adamw(list(net.parameters()))), {"store": str(tmp_path / "s")})
    assert not (tmp_path / "s").exists()


def test_layout_facts_and_steps() -> None:
    adapter = adapter_for(start(0))
    facts = adapter.layout_facts()
    assert facts["framework"] == adapter.framework == "torch"
    assert facts["shared_params"] == {"last.weight": "first.weight"}
    assert set(facts["state_dict_names"]) == set(Net().state_dict())
    assert facts["state_dict_names"] == list(Net().state_dict())
    assert adapter.completed_steps() is None


@pytest.mark.slow
def test_deepspeed_is_not_imported() -> None:
    program = (
        "import sys, torch; from monitor.adapters import adapter_for; m = torch.nn.Linear(2, 2);"
        "adapter_for((m, torch.optim.SGD(m.parameters(), lr=1))); sys.exit('deepspeed' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
