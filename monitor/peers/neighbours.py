"""Which rank keeps whose replica: a rank of the next node, at the same place within it where there is one. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def keepers(nodes: Sequence[str]) -> list[int]:
    """For every rank the one that keeps its replica. nodes: on which each rank is; two different ones at least.

    Nodes follow each other as their first ranks do, and the last is followed by the first. Where the next node has
    fewer ranks, some of them keep several replicas."""
    members: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    order = list(members)
    found = [0] * len(nodes)
    for position, node in enumerate(order):
        there = members[order[(position + 1) % len(order)]]
        for place, rank in enumerate(members[node]):
            found[rank] = there[place % len(there)]
    return found


def wards(kept_by: Sequence[int], rank: int) -> list[int]:
    """Whose replicas ``rank`` keeps."""
    return [other for other, keeper in enumerate(kept_by) if keeper == rank]
