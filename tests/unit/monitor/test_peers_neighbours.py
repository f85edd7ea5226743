"""Who keeps whose replica."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitor.peers.neighbours import keepers, wards


@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [
        ("ab", [1, 0]),
        ("abc", [1, 2, 0]),
        ("aabb", [2, 3, 0, 1]),
        ("abab", [1, 0, 3, 2]),
        ("aab", [2, 2, 0]),
        ("abb", [1, 0, 0]),
        ("aaabbc", [3, 4, 3, 5, 5, 0]),
    ],
)
def test_the_next_node_keeps_it_at_the_same_place(nodes: str, wanted: list[int]) -> None:
    assert keepers(nodes) == wanted


def test_nodes_that_are_lost_together_do_not_keep_for_each_other() -> None:
    """Two containers on each of two machines, and three on one of three where that cannot be for all."""
    assert keepers("abcd", ["x", "x", "y", "y"]) == [2, 3, 0, 1]
    assert keepers("abcd", ["x", "y", "x", "y"]) == [1, 0, 3, 2]
    assert keepers("abc", ["x", "x", "x"]) == [1, 2, 0]


@given(st.lists(st.sampled_from("abcde"), min_size=2, max_size=24).filter(lambda nodes: len(set(nodes)) > 1))
def test_every_rank_has_one_keeper_on_another_node(nodes: list[str]) -> None:
    found = keepers(nodes)
    assert all(nodes[keeper] != nodes[rank] for rank, keeper in enumerate(found))
    assert sorted(rank for keeper in range(len(nodes)) for rank in wards(found, keeper)) == [*range(len(nodes))]
    sizes = Counter(nodes)
    shares = Counter(found)
    for keeper, count in shares.items():
        served = {nodes[ward] for ward in wards(found, keeper)}
        assert len(served) == 1  # the node before, shared out evenly
        assert count <= -(-sizes[served.pop()] // sizes[nodes[keeper]])


@given(st.lists(st.integers(1, 3), min_size=2, max_size=6))
def test_no_machine_keeps_its_own_where_none_has_more_than_half(counts: list[int]) -> None:
    machines = [f"m{index}" for index, count in enumerate(counts) for _ in range(count)]
    if 2 * max(counts) <= len(machines):
        found = keepers([f"n{rank}" for rank in range(len(machines))], machines)
        assert all(machines[keeper] != machines[rank] for rank, keeper in enumerate(found))
