"""Places replicas: on a rank of the next node, at the same position within it if there is one. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence


def replica_targets(nodes: Sequence[str], machines: Sequence[str] | None = None) -> list[int]:
    """Return for every rank the one that keeps its replica.

    Nodes are ordered by the first rank of their machine, then by their own; the last one is followed by the first.
    Nodes of one machine are lost together, so the next node is one of another machine wherever no machine has more than
    half of them. Where the next node has fewer ranks, some of them keep several replicas.

    Args:
        nodes: Node of each rank; at least two different ones.
        machines: Machine of each rank; by default every node is one.
    """
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


def replica_sources(targets: Sequence[int], rank: int) -> list[int]:
    """Return the ranks whose replicas ``rank`` keeps."""
    return [source for source, target in enumerate(targets) if target == rank]
