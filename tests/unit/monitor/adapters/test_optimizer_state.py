"""Scalars of a flat partition, and plain data."""

from __future__ import annotations

import pytest
import torch

from monitor.adapters.optimizer_state import common_scalars, to_host
from store.errors import ModelMismatchError, UnsupportedError


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
    with pytest.raises(UnsupportedError, match="x holds a object"):
        to_host({"a": [object()]}, "x")
