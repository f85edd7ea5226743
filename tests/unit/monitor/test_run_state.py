"""Run state: what goes in comes out, through bytes: generators, schedulers, nested state of the user's objects."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from monitor.run_state import (
    SavedObject,
    UserState,
    capture_rng,
    from_tree,
    load_state,
    match_generators,
    restore_rng,
    to_tree,
)
from monitor.save.self_check import outline
from store.errors import ConfigError, DamagedError, ModelMismatchError, UnsupportedError


def through_json(state: Any) -> Any:
    """As a store has it: the tree as JSON text, the leaves as bytes."""
    tree, leaves = to_tree(state)
    return from_tree(json.loads(json.dumps(tree)), leaves)


def draws() -> tuple[Any, ...]:
    return (
        torch.randn(3).tolist(), torch.randperm(9).tolist(), np.random.rand(3).tolist(),
        float(np.random.standard_normal()), random.random(), random.gauss(0, 1), random.sample(range(99), 5),
    )  # fmt: skip


def test_every_generator_goes_on_where_it_was() -> None:
    np.random.standard_normal()  # leaves a second value cached
    random.gauss(0, 1)
    state = through_json(capture_rng())
    expected = draws()
    assert draws() != expected
    restore_rng(state)
    assert draws() == expected


@pytest.mark.parametrize(
    ("saved", "device", "count", "current", "expected"),
    [
        (2, 1, 2, 0, {0: 0, 1: 1}),
        (2, None, 2, 0, {0: 0, 1: 1}),
        (8, 3, 1, 0, {0: 3}),
        (1, 0, 8, 5, {5: 0}),
        (8, None, 1, 0, {}),
        (2, 5, 1, 0, {}),
        (2, 1, 0, 0, {}),
        (0, None, 2, 0, {}),
        (0, None, 0, 0, {}),
    ],
)
def test_generators_are_matched_with_the_visible_devices(
    saved: int, device: int | None, count: int, current: int, expected: dict[int, int]
) -> None:
    states = [torch.full((4,), at, dtype=torch.uint8) for at in range(saved)]
    matched, note = match_generators({"cuda": states, "cuda_device": device}, count, current)
    assert {at: int(state[0]) for at, state in matched.items()} == expected
    assert (note is None) == (saved == count)


def test_a_snapshot_does_not_follow_what_is_live() -> None:
    tensor, array = torch.zeros(3), np.zeros(3)
    tree, leaves = to_tree({"tensor": tensor, "array": array})
    tensor += 1
    array += 1
    back = from_tree(tree, leaves)
    assert torch.equal(back["tensor"], torch.zeros(3)) and not back["array"].any()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 3).to(torch.bfloat16),
        torch.tensor(2.5),
        torch.zeros(0, 4),
        torch.arange(4)[::2],
        torch.arange(4.0)[1::4],
        torch.tensor([True, False]),
        torch.tensor([float("nan"), float("inf")]),
        torch.nn.Parameter(torch.ones(2)),
        torch.randn(2, dtype=torch.complex64),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}-{tensor.stride()}",
)
def test_tensors_keep_dtype_shape_layout_and_bits(tensor: torch.Tensor) -> None:
    back = through_json(tensor)
    assert back.dtype == tensor.dtype and back.shape == tensor.shape
    dense = not tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    assert back.stride() == tensor.stride() if dense else back.is_contiguous()
    flat = [
        t.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for t in (tensor, back)
    ]
    assert torch.equal(*flat)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2),
        torch.ones(2, requires_grad=True),
        torch.ones(2, requires_grad=True) * 2,
        torch.nn.Parameter(torch.ones(2)),
        torch.nn.Parameter(torch.arange(2), requires_grad=False),
        torch.nn.Parameter(torch.zeros(0)),
    ],
    ids=["plain", "leaf", "result", "parameter", "frozen parameter", "empty parameter"],
)
def test_tensors_keep_being_parameters_and_requiring_gradients(tensor: torch.Tensor) -> None:
    for back in (through_json(tensor), *through_json([tensor, tensor])):
        assert type(back) is type(tensor) and back.requires_grad is tensor.requires_grad and back.is_leaf
        assert torch.equal(back, tensor)


@pytest.mark.parametrize("order", [[0], [0, 0], [1, 2], ["a", 0], 5])
def test_an_order_that_is_none_of_the_dimensions_is_damage(order: Any) -> None:
    tree, leaves = to_tree(torch.ones(2, 3))
    with pytest.raises(DamagedError):
        from_tree({**tree, "order": order}, leaves)


@pytest.mark.parametrize("like", [5, "grad"])
def test_a_wrong_kind_of_tensor_is_damage(like: Any) -> None:
    tree, leaves = to_tree(torch.ones(2, dtype=torch.int64))
    with pytest.raises(DamagedError):
        from_tree({**tree, "like": like}, leaves)


def test_readers_that_know_no_parameters_find_a_tensor() -> None:
    tree, _ = to_tree([torch.nn.Parameter(torch.ones(2)), torch.ones(2)])
    assert [(one["$"], one["v"]) for one in tree] == [("tensor", 0), ("tensor", 1)]
    assert tree[1] == {"$": "tensor", "v": 1}  # as ever


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1 + 2j, 3j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.randn(2, 3, dtype=torch.complex64).mH,
    ],
    ids=["conjugated", "negated", "adjoint"],
)
def test_tensors_that_are_lazily_conjugated_or_negated_keep_their_values(tensor: torch.Tensor) -> None:
    back = through_json(tensor)
    assert torch.equal(back, tensor) and back.dtype == tensor.dtype
    assert outline(back, "state") == outline(tensor, "state")


def test_plain_data_keeps_its_kinds() -> None:
    state = {
        "nested": [{"a": (1, 2.5, None)}, {3: "three", (4, 5): b"\x00\xff"}],
        "floats": [float("inf"), -float("inf"), -0.0, 1e-310],
        "sets": {1, 2}, "big": 1 << 80, "yes": True, "$": "a key of ours",
        "numpy": [np.float32(1.5), np.int64(-3), np.arange(6).reshape(2, 3)], "dtype": torch.bfloat16,
    }  # fmt: skip
    back = through_json(state)
    assert back["nested"] == state["nested"] and type(back["nested"][0]["a"]) is tuple
    assert [str(value) for value in back["floats"]] == ["inf", "-inf", "-0.0", "1e-310"]
    assert (back["sets"], back["big"], back["yes"], back["$"]) == ({1, 2}, 1 << 80, True, "a key of ours")
    assert back["dtype"] is torch.bfloat16
    assert type(back["numpy"][0]) is np.float32 and type(back["numpy"][1]) is np.int64
    assert (back["numpy"][2] == state["numpy"][2]).all()  # type: ignore[index]


def scheduled() -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    after = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, after], [3])


def rates(optimizer: torch.optim.Optimizer, scheduler: Any, count: int) -> list[float]:
    found = []
    for _ in range(count):
        optimizer.step()
        scheduler.step()
        found.append(scheduler.get_last_lr()[0])
    return found


def test_schedulers_go_on() -> None:
    optimizer, scheduler = scheduled()
    rates(optimizer, scheduler, 5)
    saved, hyper = through_json(UserState([scheduler]).capture()), optimizer.param_groups[0]["lr"]
    expected = rates(optimizer, scheduler, 4)
    other, fresh = scheduled()
    load_state(fresh, saved[0])
    other.param_groups[0]["lr"] = hyper  # a scheduler does not restore the rate itself; the adapters do
    assert rates(other, fresh, 4) == expected


def test_generators_of_torch_are_state() -> None:
    generator = torch.Generator().manual_seed(4)
    torch.randn(3, generator=generator)
    saved = through_json(UserState([generator]).capture())
    expected = torch.randn(3, generator=generator)
    other = torch.Generator()
    load_state(other, saved[0])
    assert torch.equal(torch.randn(3, generator=other), expected)


def test_a_loss_scaler_is_state() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    saved = through_json(UserState([scaler]).capture())
    other = torch.amp.GradScaler("cpu", init_scale=2.0)
    load_state(other, saved[0])
    assert other.get_scale() == 512.0


def test_an_object_without_state_is_refused() -> None:
    class Half:
        def state_dict(self) -> dict[str, int]:
            return {}

    with pytest.raises(ConfigError, match=r"state\[0\] is a Half without state_dict\(\) and load_state_dict\(\)"):
        UserState([Half()])


def test_another_number_of_objects_is_refused() -> None:
    with pytest.raises(ModelMismatchError, match=r"2 objects, state=\[\.\.\.\] has 1"):
        UserState([torch.Generator()]).match([SavedObject(None, None, {})] * 2)


@pytest.mark.parametrize(
    "value", [lambda: None, object(), torch.nn.Linear(1, 1), open, np.array([object()]), torch.eye(2).to_sparse()]
)
def test_what_would_need_pickle_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"state\['a'\]\[1\] is a .*cannot be stored without pickling"):
        to_tree({"a": [0, value]})


@pytest.mark.parametrize("like", [5, None, ["grad"], {"grad": 1}, "module", "grad parameter"])
def test_a_tensor_that_is_like_nothing_known_is_damage(like: Any) -> None:
    tree, leaves = to_tree({"weight": torch.nn.Parameter(torch.ones(2))})
    tree["weight"]["like"] = like
    with pytest.raises(DamagedError):
        from_tree(tree, leaves)
