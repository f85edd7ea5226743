"""Placement of replicas."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitor.memory.replication import replica_sources, replica_targets


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
    assert replica_targets(nodes) == wanted


def test_nodes_that_are_lost_together_do_not_keep_for_each_other() -> None:
    """Two containers on each of two machines, and three on one of three where that cannot be for all."""
    assert replica_targets("abcd", ["x", "x", "y", "y"]) == [2, 3, 0, 1]
    assert replica_targets("abcd", ["x", "y", "x", "y"]) == [1, 0, 3, 2]
    assert replica_targets("abc", ["x", "x", "x"]) == [1, 2, 0]


@given(st.lists(st.sampled_from("abcde"), min_size=2, max_size=24).filter(lambda nodes: len(set(nodes)) > 1))
def test_every_rank_has_one_target_on_another_node(nodes: list[str]) -> None:
    found = replica_targets(nodes)
    assert all(nodes[target] != nodes[rank] for rank, target in enumerate(found))
    assert sorted(rank for target in range(len(nodes)) for rank in replica_sources(found, target)) == [
        *range(len(nodes))
    ]
    sizes = Counter(nodes)
    shares = Counter(found)
    for target, count in shares.items():
        served = {nodes[source] for source in replica_sources(found, target)}
        assert len(served) == 1  # the node before, shared out evenly
        assert count <= -(-sizes[served.pop()] // sizes[nodes[target]])


@given(st.lists(st.integers(1, 3), min_size=2, max_size=6))
def test_no_machine_keeps_its_own_where_none_has_more_than_half(counts: list[int]) -> None:
    machines = [f"m{index}" for index, count in enumerate(counts) for _ in range(count)]
    if 2 * max(counts) <= len(machines):
        found = replica_targets([f"n{rank}" for rank in range(len(machines))], machines)
        assert all(machines[target] != machines[rank] for rank, target in enumerate(found))
