"""Scalars of a flat partition, and plain data."""

from __future__ import annotations

import pytest
import torch

from monitor.adapters.optimizer_state import HiddenState, common_scalars, to_host
from store.errors import ModelMismatchError, UnstorableError, UnsupportedError


def saved(**steps: object) -> dict[str, object]:
    return {"scalars": {fqn: {"step": step} for fqn, step in steps.items()}, "slots": {fqn: ["m"] for fqn in steps}}


def test_a_partition_has_the_scalars_that_its_parameters_share() -> None:
    state = saved(a=torch.tensor(3.0), b=torch.tensor(3.0))
    assert common_scalars(["a", "b", "unknown"], state) == ({"m"}, {"step": torch.tensor(3.0)})
    assert common_scalars(["unknown"], state) == (set(), {})


def test_parameters_with_different_steps_do_not_fit_one_partition() -> None:
    with pytest.raises(ModelMismatchError, match="a and b share a flat partition"):
        common_scalars(["a", "b"], saved(a=torch.tensor(3.0), b=torch.tensor(4.0)))


def test_factored_moments_do_not_fit_a_partition() -> None:
    with pytest.raises(UnsupportedError, match="has the shape"):
        common_scalars(["a"], saved(a=torch.zeros(3)))


def test_objects_other_than_plain_data_are_refused() -> None:
    assert to_host({"a": [1, (2.0, None)], "b": torch.ones(2)}, "x")["a"] == [1, (2.0, None)]
    with pytest.raises(UnsupportedError, match=r"x holds a builtins\.object"):
        to_host({"a": [object()]}, "x")


@pytest.mark.parametrize("value", [2, torch.ones(2), {"a": [0.5]}], ids=["number", "tensor", "in containers"])
def test_state_in_an_attribute_is_refused_for_as_long_as_it_is_there(value: object) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.constant, optimizer.switch = 7, False  # type: ignore[attr-defined]
    hidden = HiddenState(optimizer, optimizer)
    hidden.check()
    optimizer.switch = True  # type: ignore[attr-defined]
    hidden.check()
    optimizer.memory = value  # type: ignore[attr-defined]
    for _ in range(2):
        with pytest.raises(UnstorableError, match="SGD keeps a value that changes, in its attribute memory"):
            hidden.check()
    del optimizer.memory
    hidden.check()
