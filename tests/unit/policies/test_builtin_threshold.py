from __future__ import annotations

import math

import pytest

from policies.base import Budget, Choice, History, UnitStats
from policies.builtin import Threshold
from store.errors import ConfigError
from store.names import Unit


def choice(policy: Threshold, drift: float | None, slot: str = "fp32", staleness: int | None = 5) -> Choice:
    one = UnitStats(Unit("layer.3", slot), 3, True, 10, drift, staleness)
    return policy.select([one], Budget(), History(step=100, commits=4)).choices[one.unit]


@pytest.mark.parametrize(
    ("drift", "expected"),
    [
        (0.0123, Choice("raw", "drift 0.0123 >= threshold 0.01")),
        (0.01, Choice("raw", "drift 0.01 >= threshold 0.01")),
        (0.002, Choice(None, "drift 0.002 < threshold 0.01")),
        (0.00999999, Choice(None, "drift 0.00999999 < threshold 0.01")),
        (math.nextafter(0.01, 0), Choice(None, "drift 0.009999999999999998 < threshold 0.01")),
        (0.0, Choice(None, "drift 0 < threshold 0.01")),
        (math.inf, Choice("raw", "drift inf >= threshold 0.01")),
        (math.nan, Choice("raw", "drift is not a number")),
    ],
)
def test_saves_from_the_threshold_on(drift: float, expected: Choice) -> None:
    assert choice(Threshold(0.01), drift) == expected


def test_what_is_not_known_is_saved() -> None:
    assert choice(Threshold(0.01), None, staleness=None) == Choice("raw", "no version yet")
    assert choice(Threshold(0.01), None) == Choice("raw", "drift not measured")


def test_a_slot_may_have_its_own_threshold() -> None:
    policy = Threshold(0.01, slots={"exp_avg": 0.5})
    assert choice(policy, 0.1).saved
    assert choice(policy, 0.1, "exp_avg") == Choice(None, "drift 0.1 < threshold 0.5")
    assert choice(policy, 0.1, "exp_avg_sq").saved


def test_zero_saves_everything() -> None:
    assert choice(Threshold(0), 0.0) == Choice("raw", "drift 0 >= threshold 0")


def test_later_changes_to_the_given_mapping_do_not_reach_the_policy() -> None:
    slots = {"exp_avg": 0.5}
    policy = Threshold(0.01, slots=slots)
    slots["exp_avg"] = 0.0
    assert not choice(policy, 0.1, "exp_avg").saved


def test_is_hashable_and_needs_drift() -> None:
    assert hash(Threshold(0.01, {"exp_avg": 0.5})) == hash(Threshold(0.01, {"exp_avg": 0.5}))
    assert Threshold(0.01).needs_drift


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, True, None, [0.1]])
def test_a_senseless_threshold_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="policy threshold: threshold must be a finite number >= 0, not "):
        Threshold(value)  # type: ignore[arg-type]


def test_a_number_that_yaml_took_for_text_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"not the text '1e-3' \(YAML takes 1e-3 for text: write 1.0e-3"):
        Threshold("1e-3")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ({"exp_avg": -1}, r"slots.exp_avg must be a finite number >= 0, not -1"),
        (0.5, r"slots must map names of slots to thresholds, such as \{exp_avg: 0.1\}, not 0.5"),
        ({3: 0.5}, r"slots must have names for keys, not 3"),
    ],
)
def test_senseless_slots_are_refused(slots: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Threshold(0.01, slots)  # type: ignore[arg-type]
