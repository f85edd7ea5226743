"""Which rank keeps whose replica: a rank of the next node, at the same place within it where there is one. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def keepers(nodes: Sequence[str], machines: Sequence[str] | None = None) -> list[int]:
    """For every rank the one that keeps its replica. nodes: on which each rank is; two different ones at least.

    machines: of each rank; nodes that share one are lost together, so the next node is one of another machine wherever
    no machine has more than half of them. Nodes follow each other as their machines' and their own first ranks do, and
    the last is followed by the first. Where the next node has fewer ranks, some of them keep several replicas."""
    members: dict[str, list[int]] = {}
    together: dict[str, dict[str, None]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
        together.setdefault(machines[rank] if machines else node, {})[node] = None
    order = [node for there in together.values() for node in there]
    most = max(len(there) for there in together.values())
    away = most if 2 * most <= len(order) else 1
    found = [0] * len(nodes)
    for position, node in enumerate(order):
        there = members[order[(position + away) % len(order)]]
        for place, rank in enumerate(members[node]):
            found[rank] = there[place % len(there)]
    return found


def wards(kept_by: Sequence[int], rank: int) -> list[int]:
    """Whose replicas ``rank`` keeps."""
    return [other for other, keeper in enumerate(kept_by) if keeper == rank]
