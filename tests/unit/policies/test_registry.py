from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from policies.base import Policy
from policies.builtin import Filter, Full, Observe, Parity, Threshold
from policies.registry import POLICIES, policy_from
from store.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "policy"),
    [
        ("full", Full()),
        ({"name": "full"}, Full()),
        ("parity", Parity(k=2)),
        ({"name": "parity", "k": 4}, Parity(k=4)),
        ("filter", Filter(n=2, m=5, auxiliary="always")),
        ({"name": "filter", "n": 1, "m": 3, "auxiliary": "interval"}, Filter(1, 3, "interval")),
        ({"name": "threshold", "threshold": 0.01}, Threshold(0.01)),
        ({"name": "threshold", "threshold": 0.01, "slots": {"exp_avg": 1}}, Threshold(0.01, {"exp_avg": 1})),
        ("observe", Observe(Full())),
        ({"name": "observe", "inner": "parity"}, Observe(Parity())),
        ({"name": "observe", "inner": {"name": "threshold", "threshold": 0.5}}, Observe(Threshold(0.5))),
    ],
)
def test_settings_become_a_policy(settings: Any, policy: Policy) -> None:
    assert policy_from(settings) == policy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("parrity", r"unknown policy 'parrity': did you mean 'parity'\? Known: auto, budget, filter, full, observe, "),
        ("Full", r"unknown policy 'Full': did you mean 'full'\?"),
        ("", r"unknown policy ''"),
        ({"name": "treshold", "threshold": 0.1}, r"did you mean 'threshold'\?"),
        ({"name": "parity", "K": 3}, r"policy parity: unknown parameter 'K': did you mean 'k'\? Known: k"),
        ({"name": "filter", "auxilary": "always"}, r"unknown parameter 'auxilary': did you mean 'auxiliary'\?"),
        ({"name": "parity", 3: 3}, r"policy parity: unknown parameter '3'"),
        ({"name": "full", "k": 3}, r"policy full takes no parameters, and 'k' was given; remove it"),
        ("threshold", r"policy threshold: missing a required argument: 'threshold'"),
        ({"name": "parity", "k": 1}, r"policy parity: k must be an integer >= 2, not 1"),
        ({"name": "threshold", "threshold": -1}, r"threshold must be a finite number >= 0, not -1"),
        ({"k": 3}, r"policy needs a name \(it has none\); known: auto, budget, filter, full"),
        ({"name": 3}, r"policy needs a name \(not 3\)"),
        (None, r"policy must be a name, or a mapping such as \{name: parity, k: 2\}, not None"),
        (["full"], r"policy must be a name, or a mapping .*, not \['full'\]"),
        ({"name": "observe", "inner": "ful"}, r"unknown policy 'ful': did you mean 'full'\?"),
        ({"name": "observe", "inner": None}, r"policy observe: inner must be a policy, such as full, not None"),
        ({"name": "observe", "inner": "observe"}, r"inner must be a policy that saves, not observe again"),
    ],
)
def test_what_cannot_be_a_policy_is_refused_with_the_nearest_that_can(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        policy_from(settings)


def test_the_given_settings_are_left_as_they_were() -> None:
    settings = {"name": "observe", "inner": {"name": "parity", "k": 3}}
    policy_from(settings)
    assert settings == {"name": "observe", "inner": {"name": "parity", "k": 3}}


def test_every_policy_and_parameter_is_documented() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "policies.md").read_text()
    for name, kind in POLICIES.items():
        assert f"`{name}`" in guide
        for parameter in dataclasses.fields(kind):
            if parameter.metadata.get("setting", True):
                assert f"`{parameter.name}`" in guide, f"{name}: {parameter.name}"
