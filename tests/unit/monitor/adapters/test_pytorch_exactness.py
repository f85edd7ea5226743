"""A resume restores the state of the commit exactly; state that cannot be saved is refused, never called exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monitor
from merger.merge import merge
from store.catalog import open_catalog
from store.errors import ModelMismatchError, UnsupportedError
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.jobs import same

PARITY = {"name": "parity", "k": 2}


class Trained:
    """Any model, an optimizer, and a checkpointer."""

    def __init__(
        self, store: Path, model: nn.Module, state: list[Any] | None = None, *, adam: bool = False, **settings: Any
    ) -> None:
        self.model = model
        self.optimizer: Any = (torch.optim.AdamW if adam else torch.optim.SGD)(model.parameters(), lr=0.1)
        values = {"store": str(store), "every": 1, "metrics": {"enabled": False}, **settings}
        self.ckpt = monitor.attach((model, self.optimizer), values, state=state or [])

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 8, dtype=next(self.model.parameters()).dtype)).square().mean().backward()
            self.optimizer.step()
            report = self.ckpt.step()
            assert report is not None and report.skipped is None
            self.ckpt.flush()

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    @property
    def exact(self) -> bool:
        assert self.ckpt.certificate is not None
        return self.ckpt.certificate.exact

    def __enter__(self) -> Trained:
        return self

    def __exit__(self, *_: object) -> None:
        self.ckpt.close()


# ---- tensors that change places


class Twins(nn.Module):
    """One layer with two equally large weights, of which one is frozen."""

    def __init__(self, frozen: str) -> None:
        super().__init__()
        self.block = nn.Module()
        self.block.a, self.block.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 1)
        self.freeze(frozen)

    def freeze(self, frozen: str) -> None:
        for name, linear in self.block.named_children():
            linear.weight.requires_grad_(name != frozen)
            linear.weight.grad = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block.b(self.block.a(x).tanh()))


@pytest.mark.parametrize("order", ["aba", "abb"])
@pytest.mark.parametrize("later", [3, 12])
def test_frozen_twins_swapped_between_runs(store: Path, order: str, later: int) -> None:
    first, second, third = order
    with Trained(store, Twins(first)) as one:
        one.ckpt.resume()
        one.steps(3)
        saved = one.tensors()
    with Trained(store, Twins(second)) as two:
        assert two.ckpt.resume() == 3
        assert same(two.tensors(), saved)
        two.steps(later)
        saved = two.tensors()
    with Trained(store, Twins(third)) as three:
        assert three.ckpt.resume() == 3 + later
        assert same(three.tensors(), saved)


def test_frozen_twins_swapped_in_mid_run(store: Path) -> None:
    with Trained(store, Twins("a")) as one:
        one.ckpt.resume()
        one.steps(3)
        one.model.freeze("b")  # type: ignore[operator]
        one.steps(1)
        at_once = one.tensors()
        merged = merge(store, store.with_name("at-once"))
        one.steps(4)
        saved = one.tensors()
    assert same(torch.load(merged.out / "model.pt"), at_once)
    for frozen in "ab":
        with Trained(store, Twins(frozen)) as other:
            assert other.ckpt.resume() == 8
            assert same(other.tensors(), saved)


@pytest.mark.parametrize("policy", ["full", PARITY])
def test_patterns_swapped_between_runs(store: Path, policy: Any) -> None:
    retention = {"keep_last": 1, "log_spaced": False}
    names = (r"0\..*", r"1\..*")
    saved: dict[str, torch.Tensor] = {}
    for end, (x, y) in ((3, names), (4, names[::-1]), (5, names[::-1]), (6, names)):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        layers = {"patterns": {"x": x, "y": y}}
        with Trained(store, model, policy=policy, layers=layers, retention=retention) as one:
            one.optimizer.param_groups[0]["lr"] = 0.0  # so that a unit's older version is as good under parity
            start = one.ckpt.resume()
            assert not saved or same(one.tensors(), saved)
            one.steps(end - start)
            report = verify(open_catalog(LocalFiles(store)))
            assert report.ok and report.commits[0].save.step == end
            saved = one.tensors()


def test_a_layer_unfrozen_in_mid_run_can_be_merged(store: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    with Trained(store, model) as one:
        one.ckpt.resume()
        one.steps(2)
        model[0].requires_grad_(True)
        one.steps(3)
        saved = one.tensors()
    result = merge(store, store.with_name("merged"))
    assert result.certificate.exact
    assert same(torch.load(result.out / "model.pt"), saved)


# ---- dtypes


class Held:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.tensor = state["tensor"]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint64])
def test_state_of_rare_dtypes_comes_back(store: Path, dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, 1.5, 3.0]).to(dtype)
    with Trained(store, nn.Linear(8, 8), state=[Held(values)]) as one:
        one.ckpt.resume()
        one.steps(2)
    held = Held(torch.zeros(1))
    with Trained(store, nn.Linear(8, 8), state=[held]) as other:
        assert other.ckpt.resume() == 2
    assert held.tensor.dtype == dtype
    assert torch.equal(held.tensor.view(torch.uint8), values.view(torch.uint8))


class WithBuffer(nn.Module):
    """A linear layer, a persistent buffer, and what a forward does to it."""

    def __init__(self, buffer: torch.Tensor, change: Callable[[nn.Module], None] = lambda _: None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(128, 128).tril())
        self.register_buffer("value", buffer.clone())
        self._change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._change(self)
        return self.linear(x)


def test_a_complex_buffer_is_exact_or_refused_at_attach(store: Path) -> None:
    turns = torch.polar(torch.ones(4), torch.arange(4.0))
    try:
        one = Trained(store, WithBuffer(turns))
    except UnsupportedError as error:
        assert "value" in str(error)
        return
    with one:
        one.ckpt.resume()
        one.steps(2)
    with Trained(store, WithBuffer(torch.zeros_like(turns))) as other:
        assert other.ckpt.resume() == 2
        assert other.exact
        assert torch.equal(other.tensors()["value"], turns)


@pytest.mark.parametrize("values", [torch.tensor([[0.5, -1.25], [0.0, 3.0]]), torch.tensor([[0.1, 1.0], [1.0, 1.0]])])
def test_only_values_that_are_not_rounded_count_as_exact(store: Path, values: torch.Tensor) -> None:
    with Trained(store, nn.Linear(2, 2, bias=False)) as one:
        one.ckpt.resume()
        one.model.weight.data.copy_(values)  # type: ignore[operator]
        one.ckpt.save(wait=True)
    with Trained(store, nn.Linear(2, 2, bias=False).bfloat16()) as other:
        other.ckpt.resume()
        found = other.tensors()["weight"]
        assert torch.equal(found, values.bfloat16())
        assert other.exact == torch.equal(found.float(), values)


@pytest.mark.parametrize(("saved", "live"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_state_in_the_dtype_of_its_weights_follows_them(store: Path, saved: torch.dtype, live: torch.dtype) -> None:
    """So that the optimizer can take a step. Widening is exact."""
    with Trained(store, nn.Linear(8, 8).to(saved), adam=True) as one:
        one.ckpt.resume()
        one.steps(3)
        moments = {fqn: one.optimizer.state[parameter]["exp_avg"] for fqn, parameter in one.model.named_parameters()}
    with Trained(store, nn.Linear(8, 8).to(live), adam=True) as other:
        assert other.ckpt.resume() == 3
        assert other.exact is (live == torch.float32)
        for fqn, parameter in other.model.named_parameters():
            state = other.optimizer.state[parameter]
            assert torch.equal(state["exp_avg"], moments[fqn].to(live)) and state["exp_avg_sq"].dtype == live
        other.steps(2)
    with Trained(store, nn.Linear(8, 8).to(live), adam=True) as last:
        assert last.ckpt.resume() == 5 and last.exact


def test_state_in_a_dtype_of_its_own_keeps_it(store: Path) -> None:
    """As of optimizers that keep moments in bfloat16."""
    with Trained(store, nn.Linear(8, 8), adam=True) as one:
        one.ckpt.resume()
        one.steps(1)
        for state in one.optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].bfloat16()
        one.ckpt.save(wait=True)
    with Trained(store, nn.Linear(8, 8).double(), adam=True) as other:
        other.ckpt.resume()
        assert {str(state["exp_avg"].dtype) for state in other.optimizer.state.values()} == {"torch.bfloat16"}
        assert {str(state["exp_avg_sq"].dtype) for state in other.optimizer.state.values()} == {"torch.float64"}


def test_values_too_large_for_the_dtype_are_refused(store: Path) -> None:
    with Trained(store, nn.Linear(8, 8).bfloat16()) as one:
        one.ckpt.resume()
        one.model.weight.data.fill_(1e6)  # type: ignore[operator]
        one.ckpt.save(wait=True)
    with Trained(store, nn.Linear(8, 8).half()) as other:
        before = other.tensors()
        with pytest.raises(ModelMismatchError, match="weight"):
            other.ckpt.resume()
        assert same(other.tensors(), before)


# ---- buffers


@pytest.mark.parametrize("start", [torch.tensor(2_000_000_000_000), torch.tensor(1e-4)])
def test_a_small_buffer_beside_a_large_one_is_up_to_date(store: Path, start: torch.Tensor) -> None:
    def count(model: Any) -> None:
        model.value.add_(4096 if model.value.dtype == torch.int64 else 1e-7)

    with Trained(store, WithBuffer(start, count)) as one:
        one.ckpt.resume()
        one.steps(4)
        saved = one.tensors()
    with Trained(store, WithBuffer(torch.zeros_like(start), count)) as other:
        assert other.ckpt.resume() == 4
        assert same(other.tensors(), saved)
        assert other.exact


def test_nan_never_replaces_a_finite_buffer(store: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with Trained(store, model) as one:
        one.ckpt.resume()
        one.steps(3)
        finite = one.tensors()
        with torch.no_grad():
            model(torch.full((4, 8), torch.inf))  # a scaler would skip the optimizer's step
        assert one.tensors()["1.running_mean"].isnan().any()
        one.steps(2)
        newest = one.tensors()
    with Trained(store, nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))) as other:
        assert other.ckpt.resume() == 5
        # The gate holds the whole layer back: its weights and statistics belong together.
        expected = {name: (finite if name.startswith("1.") else newest)[name] for name in newest}
        assert same(other.tensors(), expected)
        assert not other.exact


class Growing(nn.Module):
    """As observers of quantization and memory banks do: buffers that get their size in the first forwards."""

    def __init__(self, lowest: int = 0, bank: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("lowest", torch.empty(lowest))
        self.register_buffer("bank", torch.zeros(bank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.lowest = torch.full((8,), -7.0)
        if self.bank.numel() < 7:
            self.bank = torch.cat([self.bank, torch.ones(1)])
        return self.linear(x)


def test_buffers_that_grow_are_saved_whole_and_never_cut(store: Path) -> None:
    with Trained(store, Growing()) as one:
        one.ckpt.resume()
        one.steps(5)
        saved = one.tensors()
    catalog = open_catalog(LocalFiles(store))
    shapes = {fqn: record.shape for fqn, record in catalog.manifest(catalog.saves()[0]).tensors.items()}
    assert (shapes["lowest"], shapes["bank"]) == ((8,), (7,))
    with Trained(store, Growing(8, 7)) as other:
        assert other.ckpt.resume() == 5
        assert same(other.tensors(), saved)
        assert other.exact
    with Trained(store, Growing()) as small, pytest.raises(ModelMismatchError, match="other shapes"):
        small.ckpt.resume()
