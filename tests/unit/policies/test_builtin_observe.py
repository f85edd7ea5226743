from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from policies.base import Budget, Choice, Decision, History, UnitStats
from policies.bounds import Bounded, Bounds, bound
from policies.builtin import Full, Observe, Threshold
from policies.validation import PolicyError
from store.errors import ConfigError
from store.names import Unit

NEAR = UnitStats(Unit("near", "fp32"), 0, True, 10, 0.001, 5)
FAR = UnitStats(Unit("far", "fp32"), 1, True, 10, 0.5, 5)
NOW = History(step=100, commits=4)


def test_saves_nothing_and_says_what_would_be_saved_and_skipped() -> None:
    decision = Observe(Threshold(0.01)).select([NEAR, FAR], Budget(), NOW)
    assert decision.saved == ()
    near = "observe: threshold would skip it (drift 0.001 < threshold 0.01)"
    far = "observe: threshold would save it (drift 0.5 >= threshold 0.01)"
    assert [choice.reason for choice in decision.choices.values()] == [near, far]


def test_needs_drift_where_the_inner_policy_does() -> None:
    assert Observe(Threshold(0.01)).needs_drift
    assert not Observe(Full()).needs_drift
    assert Observe(Bounded(Full(), Bounds(max_drift=0.1))).needs_drift


def test_bounds_go_inside_even_for_a_first_save() -> None:
    policy = bound(Observe(Full()), Bounds())
    assert isinstance(policy, Observe)
    new = UnitStats(Unit("new", "fp32"), 0, True, 10, None, None)
    assert policy.inner.select([new], Budget(), NOW).saved == (new.unit,)
    assert policy.select([new], Budget(), NOW).choices == {
        new.unit: Choice(None, "observe: full would save it (first save is full)")
    }


def test_bounds_around_it_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"bounds go inside observe.*use bound\(policy, bounds\)"):
        Bounded(Observe(Full()), Bounds())


def test_observing_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="inner must be a policy that saves, not observe again"):
        Observe(Observe(Full()))


@dataclass(frozen=True)
class Forgetful:
    name: str = "forgetful"
    needs_drift: bool = False

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        return Decision({one.unit: Choice("raw", "why not") for one in stats[1:]})


def test_a_unit_that_the_inner_policy_forgot_is_named() -> None:
    with pytest.raises(PolicyError, match="policy forgetful: near/fp32: shown but not decided on"):
        Observe(Forgetful()).select([NEAR, FAR], Budget(), NOW)
