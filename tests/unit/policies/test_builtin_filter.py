from __future__ import annotations

import pytest

from policies.base import Budget, Choice, History, UnitStats
from policies.builtin import Filter
from store.errors import ConfigError
from store.names import Unit


def layer(position: int, block: bool = True, moving: bool = True) -> UnitStats:
    return UnitStats(Unit(f"layer.{position}", "fp32"), position, block, 10, 0.1, 5, moving=moving)


MODEL = [layer(0, block=False), *(layer(i) for i in range(1, 9)), layer(9, block=False)]
"""An embedding, eight blocks, a head."""


def saved(policy: Filter, stats: list[UnitStats], commits: int) -> list[int]:
    decision = policy.select(stats, Budget(), History(step=100, commits=commits))
    return [one.position for one in stats if decision.choices[one.unit].saved]


def test_ends_and_auxiliary_layers_every_time_and_the_others_every_mth() -> None:
    policy = Filter(n=2, m=3)
    ends = [0, 1, 2, 7, 8, 9]
    assert [saved(policy, MODEL, commits) for commits in (1, 2, 4, 5)] == [ends] * 4
    assert saved(policy, MODEL, 3) == saved(policy, MODEL, 6) == list(range(10))


def test_auxiliary_layers_at_the_interval() -> None:
    policy = Filter(n=1, m=2, auxiliary="interval")
    assert saved(policy, MODEL, 1) == [1, 8]
    assert saved(policy, MODEL, 2) == list(range(10))


def test_no_blocks_at_the_ends() -> None:
    assert saved(Filter(n=0, m=2), MODEL, 1) == [0, 9]


def test_ends_that_meet_are_everything() -> None:
    assert saved(Filter(n=4, m=100), MODEL, 1) == list(range(10))
    assert saved(Filter(n=50, m=100), MODEL, 1) == list(range(10))


def test_every_commit_is_the_first_of_one() -> None:
    assert saved(Filter(n=0, m=1), MODEL, 7) == list(range(10))


def test_frozen_ends_do_not_keep_the_others_waiting_for_a_commit_that_never_comes() -> None:
    frozen = [layer(i, moving=1 < i < 4) for i in range(1, 6)]
    assert saved(Filter(n=1, m=5), frozen, 1) == [1, 2, 3, 4, 5]
    choice = Filter(n=1, m=5).select(frozen, Budget(), History(step=9, commits=1)).choices[frozen[1].unit]
    assert choice == Choice("raw", "none of the layers that are saved every time can be saved")


@pytest.mark.parametrize(
    ("position", "commits", "choice"),
    [
        (0, 7, Choice("raw", "not a block: saved every time")),
        (2, 7, Choice("raw", "among the first 2 blocks: saved every time")),
        (7, 7, Choice("raw", "among the last 2 blocks: saved every time")),
        (4, 10, Choice("raw", "due: 10 commits so far, a multiple of m 5")),
        (4, 7, Choice(None, "not due: 7 commits so far, not a multiple of m 5")),
    ],
)
def test_reasons(position: int, commits: int, choice: Choice) -> None:
    decision = Filter(n=2, m=5).select(MODEL, Budget(), History(step=9, commits=commits))
    assert decision.choices[MODEL[position].unit] == choice


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": -1}, r"policy filter: n must be an integer >= 0, not -1"),
        ({"n": True}, r"policy filter: n must be an integer >= 0, not True"),
        ({"m": 0}, r"policy filter: m must be an integer >= 1, not 0"),
        ({"m": 2.5}, r"policy filter: m must be an integer >= 1, not 2.5"),
        ({"auxiliary": "never"}, r"auxiliary must be 'always' or 'interval', not 'never'"),
        ({"auxiliary": ["always"]}, r"auxiliary must be 'always' or 'interval', not \['always'\]"),
        ({"n": 0, "auxiliary": "interval"}, r"there is nothing to save between the intervals; set n >= 1 or"),
    ],
)
def test_senseless_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Filter(**settings)  # type: ignore[arg-type]
