from __future__ import annotations

import pytest

from policies.base import Budget, Choice, History, UnitStats
from policies.builtin import Parity
from store.errors import ConfigError
from store.names import Unit


def layer(position: int, moving: bool = True, finite: bool = True) -> UnitStats:
    return UnitStats(Unit(f"layer.{position}", "fp32"), position, True, 10, 0.1, 5, finite=finite, moving=moving)


def saved(policy: Parity, stats: list[UnitStats], commits: int) -> list[int]:
    decision = policy.select(stats, Budget(), History(step=100, commits=commits))
    return [one.position for one in stats if decision.choices[one.unit].saved]


def test_even_layers_follow_the_full_save_then_odd_ones() -> None:
    stats = [layer(i) for i in range(5)]
    assert [saved(Parity(), stats, commits) for commits in (1, 2, 3)] == [[0, 2, 4], [1, 3], [0, 2, 4]]


def test_three_groups_in_turn() -> None:
    stats = [layer(i) for i in range(7)]
    turns = [saved(Parity(k=3), stats, commits) for commits in (1, 2, 3, 4)]
    assert turns == [[0, 3, 6], [1, 4], [2, 5], [0, 3, 6]]


def test_a_failed_save_is_repeated_with_the_same_group() -> None:
    stats = [layer(i) for i in range(4)]
    assert saved(Parity(), stats, commits=2) == saved(Parity(), stats, commits=2) == [1, 3]


def test_all_slots_of_a_layer_share_its_turn() -> None:
    moment = UnitStats(Unit("layer.1", "exp_avg"), 1, True, 10, 0.1, 5)
    decision = Parity().select([layer(0), layer(1), moment], Budget(), History(step=9, commits=2))
    assert decision.saved == (Unit("layer.1", "fp32"), Unit("layer.1", "exp_avg"))


def test_reasons_name_the_group_and_the_turn() -> None:
    choices = Parity(k=3).select([layer(0), layer(4)], Budget(), History(step=9, commits=1)).choices
    assert choices[Unit("layer.0", "fp32")] == Choice("raw", "position 0 is in group 0 of 3, whose turn it is")
    skipped = Choice(None, "position 4 is in group 1 of 3; it is the turn of group 0")
    assert choices[Unit("layer.4", "fp32")] == skipped


@pytest.mark.parametrize("idle", [{"moving": False}, {"finite": False}])
def test_a_group_with_nothing_to_save_hands_its_turn_on(idle: dict[str, bool]) -> None:
    stats = [layer(0), layer(1, **idle), layer(2), layer(3, **idle)]
    assert saved(Parity(k=2), stats, commits=2) == [0, 2]
    assert saved(Parity(k=4), stats, commits=2) == [2]
    assert saved(Parity(k=4), stats, commits=4) == [0]


def test_more_groups_than_layers_still_save_one_each_time() -> None:
    stats = [layer(0), layer(1)]
    assert [saved(Parity(k=5), stats, commits) for commits in range(1, 7)] == [[0], [1], [0], [0], [0], [0]]


def test_where_nothing_can_be_saved_the_turn_stays() -> None:
    assert saved(Parity(), [layer(0, moving=False), layer(1, moving=False)], commits=2) == [1]


@pytest.mark.parametrize("k", [1, 0, -2, 2.0, True, None, "3"])
def test_senseless_k_is_refused(k: object) -> None:
    with pytest.raises(ConfigError, match=r"policy parity: k must be an integer >= 2, not "):
        Parity(k=k)  # type: ignore[arg-type]
