"""The list of units is kept while a job has the same tensors; a change of anything that it depends on is seen."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from monitor.adapters import adapter_for
from monitor.adapters.base import Adapter
from monitor.distributed import Group
from monitor.observe.layers import find_layers
from monitor.observe.units import UnitTable
from store.errors import UnstorableError, UnsupportedError
from store.names import Unit
from tests.support.jobs import Model

Places = dict[Unit, list[tuple[str, int, int, int, torch.dtype]]]


class Job:
    def __init__(self, *, tie: bool = False) -> None:
        self.model = Model()
        if tie:
            self.model.blocks[2][0].weight = self.model.blocks[0][0].weight
        self.model.head.register_buffer("scale", torch.ones(3))
        self.model.head.register_buffer("other", torch.ones(3), persistent=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.adapter = adapter_for((self.model, self.optimizer))
        self.table = table_of(self.adapter)
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(2, 3)).sum().backward()
        self.optimizer.step()

    def listed(self) -> Places:
        return places(self.table)

    def fresh(self) -> Places:
        return places(table_of(adapter_for((self.model, self.optimizer))))


def table_of(adapter: Adapter) -> UnitTable:
    return UnitTable(adapter, find_layers(adapter.module, list(adapter.tensors())), Group())


def places(table: UnitTable) -> Places:
    return {
        unit: [
            (p.fragment.fqn, p.fragment.start, p.tensor.data_ptr(), address, p.tensor.dtype)
            for p, address in zip(part.pieces, part.layout.regions.addresses.tolist(), strict=True)
        ]
        for unit, part in table.local().items()
    }


def first(job: Job) -> nn.Parameter:
    return next(iter(job.model.parameters()))


def swaps_the_data(job: Job) -> None:
    first(job).data = first(job).data.clone()


def another_dtype(job: Job) -> None:
    first(job).data = first(job).data.to(torch.bfloat16)


def freezes(job: Job) -> None:
    job.model.blocks[1].requires_grad_(False)


def a_new_parameter_of_that_name(job: Job) -> None:
    job.model.head.weight = nn.Parameter(job.model.head.weight.detach().clone())
    job.optimizer.param_groups[0]["params"] = list(job.model.parameters())


def other_state(job: Job) -> None:
    state = job.optimizer.state[first(job)]
    state["exp_avg"] = state["exp_avg"].clone()


def without_state(job: Job) -> None:
    del job.optimizer.state[first(job)]


def more_state(job: Job) -> None:
    job.optimizer.state[first(job)]["max_exp_avg_sq"] = torch.zeros_like(first(job))


def the_state_of_another_object(job: Job) -> None:
    other = torch.optim.AdamW(job.model.parameters(), lr=1e-3)
    other.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))
    job.optimizer.state = other.state


def a_buffer_that_is_not_saved_any_more(job: Job) -> None:
    job.model.head.register_buffer("scale", job.model.head.scale, persistent=False)


def another_buffer(job: Job) -> None:
    job.model.head.scale = torch.zeros(3)


def layers_in_another_order(job: Job) -> None:
    blocks = job.model.blocks
    blocks[0], blocks[2] = blocks[2], blocks[0]


def tied(job: Job) -> None:
    job.model.blocks[2][0].weight = job.model.blocks[0][0].weight
    job.optimizer.param_groups[0]["params"] = list(job.model.parameters())


def in_place_as_another_dtype(job: Job) -> None:
    state = job.optimizer.state[first(job)]
    state["exp_avg"] = exp_avg = state["exp_avg"].view(torch.int32)
    exp_avg.data = exp_avg.data.view(torch.float32)
    job.listed()
    exp_avg.data = exp_avg.data.view(torch.int32)


CHANGES = [
    in_place_as_another_dtype, swaps_the_data,
    another_dtype, freezes, a_new_parameter_of_that_name, other_state, without_state, more_state,
    the_state_of_another_object, a_buffer_that_is_not_saved_any_more, another_buffer, layers_in_another_order, tied,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: Callable[[Job], None]) -> None:
    job = Job()
    before = job.listed()
    assert job.listed() == before == job.fresh()
    change(job)
    assert job.listed() == job.fresh() != before


def test_a_transposed_parameter_is_seen() -> None:
    job = Job()
    before = job.listed()
    assert job.listed() == before
    weight = job.model.blocks[0][0].weight  # square: only its strides change, and a copy in their order is listed
    weight.data = weight.data.t()
    assert job.listed() != before


def test_a_parameter_with_gaps_in_memory_is_refused_as_before() -> None:
    job = Job()
    job.listed()
    weight = job.model.blocks[0][0].weight
    weight.data = weight.data.repeat(1, 2)[:, : weight.shape[1]]
    with pytest.raises(UnsupportedError, match="contiguous"):
        job.listed()


def test_steps_change_nothing_of_the_list() -> None:
    job = Job()
    before, layouts = job.listed(), {unit: part.layout for unit, part in job.table.local().items()}
    job.step()
    assert job.listed() == before
    assert all(part.layout is layouts[unit] for unit, part in job.table.local().items())


def test_tied_parameters_are_listed_once_too() -> None:
    job = Job(tie=True)
    before, layouts = job.listed(), {unit: part.layout for unit, part in job.table.local().items()}
    job.step()
    assert job.listed() == before
    assert all(part.layout is layouts[unit] for unit, part in job.table.local().items())
    swaps_the_data(job)
    assert job.listed() == job.fresh() != before


def test_without_torchs_guards_everything_is_listed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._C._dynamo.guards", None)
    job = Job()
    assert job.adapter.identity() is None
    before = job.listed()
    swaps_the_data(job)
    assert job.listed() == job.fresh() != before


def test_a_layer_that_was_added_is_refused() -> None:
    job = Job()
    job.listed()
    job.model.added = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match="added to the model after"):
        job.listed()


def test_a_buffer_that_is_saved_from_now_on_is_seen() -> None:
    job = Job()
    job.listed()
    head = job.model.head
    head.register_buffer("scale", head.scale, persistent=False)
    head.register_buffer("other", head.other)
    with pytest.raises(UnsupportedError, match=r"head\.other was added to the model after"):
        job.listed()


def test_an_unknown_parameter_of_the_optimizer_is_refused() -> None:
    job = Job()
    job.adapter.check_attached()
    job.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(UnsupportedError, match="not in the model"):
        job.adapter.check_attached()


def test_scalars_are_those_of_the_moment() -> None:
    job = Job()
    captured = job.adapter.capture_run_state()
    job.step()
    assert {float(one["step"]) for one in captured()["scalars"].values()} == {1.0}
    assert {float(one["step"]) for one in job.adapter.run_state()["scalars"].values()} == {2.0}


@pytest.mark.parametrize("value", [7, 0.5, True, None, "text"])
def test_scalars_of_plain_types_are_those_of_the_moment(value: Any) -> None:
    job = Job()
    job.optimizer.state[first(job)]["own"] = value
    fqn = next(iter(job.adapter.tensors()))
    assert job.adapter.run_state()["scalars"][fqn]["own"] == value
    job.optimizer.state[first(job)]["own"] = 8
    assert job.adapter.run_state()["scalars"][fqn]["own"] == 8


def test_state_in_containers_is_listed_each_time() -> None:
    job = Job()
    job.optimizer.state[first(job)]["history"] = [1.0, 2.0]
    assert job.adapter.identity() is None
    fqn = next(iter(job.adapter.tensors()))
    assert job.adapter.run_state()["scalars"][fqn]["history"] == [1.0, 2.0]
    job.optimizer.state[first(job)]["history"].append(3.0)
    assert job.adapter.run_state()["scalars"][fqn]["history"] == [1.0, 2.0, 3.0]


def test_the_list_keeps_no_memory() -> None:
    """A script that swaps weights or moments out, to the host for example, gets their memory back."""
    job = Job()
    job.listed()
    job.adapter.run_state()
    job.adapter.state_versions()
    old = [weakref.ref(first(job).data.untyped_storage()), weakref.ref(job.optimizer.state[first(job)]["exp_avg"])]
    first(job).data = first(job).data.clone()
    job.optimizer.state[first(job)]["exp_avg"] = torch.zeros_like(first(job))
    gc.collect()
    assert [one() for one in old] == [None, None]


class Packed(torch.Tensor):
    pass


@pytest.mark.parametrize("kind", [Packed, type("Parameter", (nn.Parameter,), {})])
def test_a_parameter_that_becomes_another_class_is_refused(kind: type) -> None:
    job = Job()
    job.listed()
    first(job).__class__ = kind
    with pytest.raises(UnstorableError):
        job.listed()


def negated(one: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(one)


@pytest.mark.parametrize(("dtype", "view"), [(torch.complex64, torch.Tensor.conj), (torch.float32, negated)])
def test_a_lazily_conjugated_or_negated_view_is_refused(
    dtype: torch.dtype, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Its memory holds other values than it has."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(50, dtype=dtype))
    adapter = adapter_for((model, torch.optim.SGD(model.parameters(), lr=0.1)))
    table = table_of(adapter)
    table.local()
    model.weight.data = view(model.weight.data)
    with pytest.raises(UnsupportedError, match="resolve_conj"):
        table.local()


def test_a_part_that_is_compiled_to_a_script_is_saved_as_before() -> None:
    """It lists its modules in its own way, so that they are looked up at each decision."""
    job = Job()
    before = job.listed()
    job.model.blocks[0][0] = torch.jit.script(job.model.blocks[0][0])
    assert {unit: [place[:3] for place in found] for unit, found in job.listed().items()} == {
        unit: [place[:3] for place in found] for unit, found in before.items()
    }


def test_a_module_that_chooses_what_it_lists_is_looked_up_each_time() -> None:
    class Chooser(Model):
        hidden = False

        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            found = super().named_parameters(*args, **kwargs)
            return (one for one in found if not (self.hidden and one[0].startswith("head")))

    model = Chooser()
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if not name.startswith("head")], lr=0.1)
    table = table_of(adapter_for((model, optimizer)))
    shown = places(table)
    model.hidden = True
    assert len(places(table)) < len(shown)


def test_counters_of_mutable_state_are_not_those_of_later() -> None:
    job = Job()
    state = job.optimizer.state[first(job)]
    state["history"] = [1.0]
    before = job.adapter.state_versions()
    state["history"].append(2.0)
    assert job.adapter.state_versions() != before
