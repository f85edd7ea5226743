"""Scalars of a flat partition, and plain data."""

from __future__ import annotations

import copy
from collections import deque

import numpy as np
import pytest
import torch

from monitor.adapters.identity import OptimizerAttributes
from monitor.adapters.optimizer_state import common_scalars, restored_scalars, to_host
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


@pytest.mark.parametrize(
    "value",
    [torch.ones(2), {"a": [0.5, torch.ones(2)]}, {id(pytest)}, np.ones(2), deque([torch.Generator()])],
    ids=["tensor", "in containers", "an id", "array", "generator"],
)
def test_state_in_an_attribute_is_refused_for_as_long_as_it_is_there(value: object) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.constant, optimizer.switch = 7, False  # type: ignore[attr-defined]
    hidden = OptimizerAttributes(optimizer, optimizer)
    hidden.check()
    optimizer.switch = True  # type: ignore[attr-defined]
    hidden.check()
    optimizer.memory = value  # type: ignore[attr-defined]
    for _ in range(2):
        with pytest.raises(UnstorableError, match="SGD keeps a value that changes, in its attribute memory"):
            hidden.check()
    del optimizer.memory
    hidden.check()


def test_a_default_that_no_group_had_is_state() -> None:
    rate, parameter = torch.tensor(0.1), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=rate)
    optimizer.defaults["scale"] = torch.tensor(1.0)
    hidden = OptimizerAttributes(optimizer, optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    rate.fill_(0.2)
    hidden.check()
    optimizer.defaults["scale"].mul_(2)
    with pytest.raises(UnstorableError, match=r"defaults\['scale'\]"):
        hidden.check()


def test_attributes_go_back_to_those_of_the_save() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.flag, optimizer.counts = False, {"a": [0]}  # type: ignore[attr-defined]
    attributes = OptimizerAttributes(optimizer, optimizer)
    optimizer.flag, optimizer.more = True, 1.0  # type: ignore[attr-defined]
    optimizer.counts["a"][0] = 7
    saved = {key: copy.deepcopy(value) for key, value in attributes.state_dict().items()}
    assert saved == {"flag": True, "more": 1.0, "counts": {"a": [7]}}
    optimizer.register_step_pre_hook(hook := lambda *_: None)
    attributes.load_state_dict({})
    assert list(optimizer._optimizer_step_pre_hooks.values()) == [hook]
    assert (optimizer.flag, optimizer.counts, hasattr(optimizer, "more")) == (False, {"a": [0]}, False)
    optimizer.counts["a"][0] = 1
    attributes.load_state_dict(saved)
    assert (optimizer.flag, optimizer.counts, optimizer.more) == (True, {"a": [7]}, 1.0)


def test_scalars_of_the_same_class_keep_their_dtype() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter]["norm"] = torch.zeros(())
    saved = {"norm": torch.tensor(1 / 3, dtype=torch.float64)}
    for kind, dtype in (("SGD", torch.float64), ("Lion", torch.float32)):
        assert restored_scalars(optimizer, parameter, {}, saved, kind)["norm"].dtype == dtype
