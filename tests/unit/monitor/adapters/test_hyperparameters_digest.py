"""Ranks compare digests of their hyperparameters: equal values give one digest, and other values another one."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from monitor.adapters.hyperparameters import hyperparameters_digest


def of(value: Any, name: str = "own") -> str:
    return digest_of({"params": [object()], "lr": 0.1, name: value})


def digest_of(*groups: dict[str, Any]) -> str:
    return hyperparameters_digest(groups)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.1, 0.2),
        (True, None),
        ("cos", "sin"),
        ((0.9, 0.999), (0.8, 0.999)),
        ((np.float64(0.9), 0.999), (np.float64(0.8), 0.999)),
        ((np.float32(0.9), 0.999), (np.float32(0.8), 0.999)),
        ((torch.tensor(0.9), 0.999), (torch.tensor(0.8), 0.999)),
        (np.array([0.9, 0.999]), np.array([0.8, 0.999])),
        (np.array(0.9), np.array(0.8)),
        (torch.tensor(0.1), torch.tensor(0.2)),
        (torch.nn.Parameter(torch.tensor(0.1)), torch.nn.Parameter(torch.tensor(0.2))),
        (torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.tensor([1.0, 3.0], dtype=torch.bfloat16)),
        (torch.arange(100), torch.arange(100).flip(0)),
        ([[1], [2]], [[1], [3]]),
        (1 << 53, (1 << 53) + 1),
        (10**400, 10**401),
        (float("nan"), float("inf")),
        ({"a": 1}, {"a": 2}),
        ({"a": (1, 2)}, {"a": (1, 3)}),
        ({str(key): key for key in range(100)}, {str(key): max(key, 1) for key in range(100)}),
        ([0] * 100, [0] * 101),
        (b"x", b"y"),
        (1j, 2j),
        (torch.tensor(1j), torch.tensor(2j)),
        ({1, 2}, {1, 3}),
        (frozenset({"a"}), frozenset({"b"})),
        (deque([1]), deque([2])),
        ({b"a": 1}, {b"a": 2}),
        (torch.arange(200.0)[::2], torch.arange(1.0, 201.0)[::2]),
        (torch.ones(100, 100).T, torch.zeros(100, 100).T),
    ],
)
def test_other_values_give_another_digest(one: Any, other: Any) -> None:
    assert of(one) == of(one) != of(other)


@pytest.mark.parametrize(
    ("one", "same"),
    [
        (1, 1.0),
        (True, 1),
        (0.0, -0.0),
        (0.5, np.float64(0.5)),
        (0.5, torch.tensor(0.5)),
        ((0.5, 1), [0.5, 1.0]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ],
)
def test_a_load_makes_no_difference(one: Any, same: Any) -> None:
    assert of(one) == of(same)


def test_a_number_too_long_to_print_is_seen() -> None:
    assert of(1 << 20_000) != of((1 << 20_000) + 1)


def test_a_value_that_is_changed_in_place_is_seen() -> None:
    rate, decays = torch.tensor(0.1), [0.1, 0.2]
    before = of(rate), of(decays)
    rate.fill_(0.2)
    decays[0] = 0.3
    assert of(rate) != before[0] and of(decays) != before[1]


def test_what_a_load_keeps_as_it_is_and_the_order_of_keys_are_left_out() -> None:
    group = {"params": [object()], "lr": 0.1, "foreach": True}
    assert digest_of(group) == digest_of({"foreach": False, "lr": 0.1, "params": []})


def test_values_are_not_turned_into_text() -> None:
    """That of a tensor on a device would wait."""

    class Waits:
        def __repr__(self) -> str:
            raise AssertionError

    assert of({"a": Waits(), "b": [Waits()]}) == of({"a": Waits(), "b": [Waits()]})


def test_values_that_cannot_be_read_here_are_left_out() -> None:
    """The digest is taken in the optimizer's step."""
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    half = torch.zeros(2, dtype=torch.uint8).view(torch.bits8)
    for value in (quantized, nested, half, torch.ones(2).to_sparse()):
        assert of(value) == of(object())


def test_lists_in_themselves_end() -> None:
    endless: list[Any] = [0.1]
    endless.append(endless)
    assert of(endless) == of(endless)
