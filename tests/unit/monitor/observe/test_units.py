"""UnitTable: from live pieces to (layer, slot) units, and changes of them."""

from __future__ import annotations

import pytest
import torch

from monitor.adapters import adapter_for
from monitor.distributed import Group
from monitor.observe.layers import find_layers
from monitor.observe.units import UnitSize, UnitTable, is_moving
from store.errors import UnsupportedError
from store.names import BUFFER, FROZEN, WEIGHTS, Unit
from store.schema import members_digest
from tests.support.jobs import LAYERS, Model


def made() -> tuple[Model, torch.optim.Optimizer, UnitTable]:
    model = Model()
    model.blocks[1].requires_grad_(False)
    model.head.register_buffer("scale", torch.ones(3))
    optimizer = torch.optim.AdamW(model.parameters())
    adapter = adapter_for((model, optimizer))
    layers = find_layers(adapter.module, list(adapter.tensors()))
    return model, optimizer, UnitTable(adapter, layers, Group())


def step(model: Model, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()


def test_units_are_in_model_order_with_sizes_in_elements_and_bytes() -> None:
    _, _, table = made()
    table.agree(table.local())
    assert list(table.sizes) == [
        Unit("embed", WEIGHTS), Unit("blocks.0", WEIGHTS), Unit("blocks.1", FROZEN), Unit("blocks.2", WEIGHTS),
        Unit("head", BUFFER), Unit("head", WEIGHTS),
    ]  # fmt: skip
    assert table.sizes[Unit("blocks.0", WEIGHTS)] == UnitSize(
        8 * 8 + 8, 4 * (8 * 8 + 8), members_digest({"blocks.0.0.weight": (64, "F32"), "blocks.0.0.bias": (8, "F32")})
    )
    assert [table.layer(unit).name for unit in table.sizes] == [unit.layer for unit in table.sizes]
    assert [record.name for record in table.layer_records] == list(LAYERS)


def test_the_optimizers_slots_appear_with_its_first_step() -> None:
    model, optimizer, table = made()
    table.agree(table.local())
    assert not table.changed(table.local())
    step(model, optimizer)
    assert table.changed(table.local())
    reshaped = table.agree(table.local())
    assert {unit.slot for unit in table.sizes} == {WEIGHTS, FROZEN, BUFFER, "exp_avg", "exp_avg_sq"}
    assert {unit.slot for unit in reshaped} == {"exp_avg", "exp_avg_sq"}
    assert not table.changed(table.local())


def test_changed_values_do_not_change_the_table() -> None:
    model, optimizer, table = made()
    step(model, optimizer)
    table.agree(table.local())
    step(model, optimizer)
    assert not table.changed(table.local())
    assert table.agree(table.local()) == set() == table.lost


def test_unfreezing_moves_a_unit_and_its_distance_is_lost() -> None:
    model, _, table = made()
    table.agree(table.local())
    model.blocks[1].requires_grad_(True)
    assert table.agree(table.local()) == {Unit("blocks.1", FROZEN), Unit("blocks.1", WEIGHTS)}
    assert Unit("blocks.1", FROZEN) not in table.sizes
    assert table.lost == {Unit("blocks.1", WEIGHTS)}


def test_only_slots_that_the_optimizer_updates_are_moving() -> None:
    assert is_moving(Unit("a", WEIGHTS)) and is_moving(Unit("a", "exp_avg"))
    assert not is_moving(Unit("a", FROZEN)) and not is_moving(Unit("a", BUFFER))


def test_tensors_are_described_for_the_manifest() -> None:
    _, _, table = made()
    records = table.tensor_records()
    assert (records["head.weight"].layer, records["head.weight"].shape) == ("head", (2, 8))
    assert records["blocks.1.0.bias"].kind == "frozen"
    assert records["head.scale"].kind == "buffer"


def test_a_tensor_added_after_attaching_is_refused_each_time_and_no_older_records_are_told() -> None:
    model, _, table = made()
    before = table.tensor_records()
    model.register_buffer("late", torch.zeros(3))
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="late"):
            table.tensor_records()
    del model.late
    assert table.tensor_records() == before
