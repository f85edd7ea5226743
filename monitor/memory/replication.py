"""Replica placement and agreement.

Places replicas: on a rank of the next node, at the same position within it if there is one. Pure functions.

Replicas, as the memory tier has them: who keeps whose is agreed once, and versions are sent beside training.

No collective and no wait of the training thread depends on what goes over these connections. Whatever goes wrong with
them costs replicas, and is told. Training thread, but for :meth:`Replication.offer`.

Replicas of in-memory versions on other nodes, from which a lost node's ranks resume.

    neighbours       which rank keeps whose replica
    transport        authenticated HTTP between ranks
    replica_client   sends this rank's versions, reads payloads from other nodes
    replica_server   receives the replicas kept for others, serves payloads
    peers            the interface to the memory tier

A replica is another rank's share of a version, stored on this node as if that rank were here: same names, same record,
marked as a replica. Code that reads versions reads replicas too.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from monitor.context import JobContext
from monitor.distributed import machine_id, node_id
from monitor.events import BackgroundFailureEvent
from monitor.memory.replica_client import RemoteNode, ReplicaSender, transfer_timeout
from monitor.memory.replica_server import ReplicaServer, ReplicaStore, ServedPayloads
from monitor.memory.transport import Endpoint, own_address
from monitor.save.store_session import StoreSession
from store.memory.arena import Arena
from store.memory.layout import Tier
from store.names import SaveId


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


@dataclass(frozen=True)
class ReplicationStatus:
    """How replication stands, of one rank or of any. busy: a version is on its way. behind: a peer has not the latest
    one. failed: one could not be sent since this was asked last."""

    busy: bool
    behind: bool
    failed: bool


class Replication:
    """Of one rank. Does nothing where the configuration wants no replicas, or there is no second node."""

    def __init__(self, job: JobContext) -> None:
        self._job, self._group = job, job.group
        self._timeout = job.config.timeouts.peer
        self._replicas = ReplicaStore(job.config.memory.versions)
        self._met = not job.config.memory.peers
        self._key = b""
        self._nodes: Sequence[str] = ()
        self._machines: Sequence[str] = ()
        self._endpoints: Sequence[Endpoint] = ()
        self._server: ReplicaServer | None = None
        self._sender: ReplicaSender | None = None
        self._remote_nodes: Sequence[RemoteNode] = ()
        self._replicated: SaveId | None = None

    @property
    def reachable(self) -> bool:
        """Whether ranks can read what lies on other nodes. Alike on all ranks."""
        return self._server is not None

    @property
    def on(self) -> bool:
        """Whether versions are replicated. Alike on all ranks."""
        return self._sender is not None

    @property
    def replicated(self) -> SaveId | None:
        """The version that all ranks are known to have in their own memory and at their peers."""
        return self._replicated

    def meet(self, tier: Tier) -> None:
        """Learn which node each rank is on and how it is reached. Collective; once."""
        if self._met:
            return
        self._met = True
        told = self._group.all_gather((node_id(tier), machine_id()))
        self._nodes, self._machines = [node for node, _ in told], [machine for _, machine in told]
        if len(set(self._nodes)) < 2:
            self._tell("memory.peers: all ranks are on one node, so that there is no other one to keep replicas on")
            return
        self._key = self._group.broadcast(secrets.token_bytes(32) if self._group.rank == 0 else None)
        server, problem = self._opened()
        endpoints = self._group.all_gather((None if server is None else server.endpoint, problem))
        if self._refused([why for _, why in endpoints]):
            if server is not None:
                server.close()
            return
        self._server, self._endpoints = server, [endpoint for endpoint, _ in endpoints]

    def begin(self, tier: Tier, opened: StoreSession, nbytes: int, kept: SaveId | None) -> None:
        """The job stands on ``kept``, or begins: have memory for what others send. nbytes: of a version of this rank.

        Collective. Without room on any rank there are no replicas on any."""
        self.meet(tier)
        self._done_reading()
        self._replicated = self._replicated if self._replicated == kept else None
        if self._sender is not None:
            self._replicas.stand_on(kept)
        elif self._server is not None:
            targets, rank = replica_targets(self._nodes, self._machines), self._group.rank
            needs = self._group.all_gather(nbytes)
            mine = {source: needs[source] for source in replica_sources(targets, rank)}
            if self._refused(self._group.all_gather(self._replicas.take(tier, opened.epoch, mine, kept, opened.files))):
                self._replicas.close(remove=True)
                return
            self._sender = ReplicaSender(rank, targets[rank], self._endpoints[targets[rank]], self._key, self._timeout)

    def offer(self, arena: Arena, slot: int, save: SaveId, keep: SaveId | None) -> None:
        """A version of this rank is whole: send it. keep: the one that all peers have. Returns at once."""
        sender = self._sender
        if sender is not None:
            sender.offer(save, *arena.files(slot), keep)

    def sending(self, latest: SaveId | None) -> tuple[ReplicationStatus, list[float]]:
        """How it stands on this rank, and the seconds that versions took. latest: the one that peers should have."""
        if self._sender is None:
            return ReplicationStatus(False, True, False), []
        busy, (took, failed) = self._sender.busy, self._sender.collect()
        if self._group.rank == 0:
            self._job.listeners.on_replication(took, None)
        return ReplicationStatus(busy, self._sender.sent != latest, failed), took

    def agreed(self, sending: ReplicationStatus, latest: SaveId | None) -> None:
        """How it stands over all ranks. latest: the version that all of them have in their own memory."""
        first = self._group.rank == 0
        if first and sending.failed:  # which rank's, and why, that rank says
            self._job.listeners.on_background_failure(BackgroundFailureEvent("peer"))
        if latest is not None and latest != self._replicated and not sending.busy and not sending.behind:
            self._replicated = latest
            if first:
                self._job.listeners.on_replication((), latest.step)

    def standing_on(self, newest: SaveId | None) -> SaveId | None:
        """What peers must keep while a version is made and sent. newest: what stays in this rank's own memory."""
        self._replicated = self._replicated if self._replicated == newest else None
        return self._replicated

    def show(self, payloads: ServedPayloads) -> None:
        """Have other ranks read these."""
        if self._server is not None:
            self._server.serve(payloads)

    def far(self, lying: Sequence[Mapping[int, bool]]) -> dict[int, RemoteNode]:
        """For each rank whose payload is not here, a node that has it: its own rather than a peer's.

        lying: for each rank, what its node has: of which ranks, and whether as a replica."""
        rank = self._group.rank
        holders: dict[int, list[tuple[bool, int]]] = {}
        for holder, there in enumerate(lying):
            for owner, replica in there.items():
                if owner not in lying[rank]:
                    holders.setdefault(owner, []).append((replica, holder))
        nodes: dict[int, RemoteNode] = {}
        found = {}
        for owner, known in holders.items():
            best = [holder for replica, holder in known if replica == min(known)[0]]
            holder = best[rank % len(best)]  # not all of them from the same one
            found[owner] = nodes.setdefault(holder, RemoteNode(self._endpoints[holder], self._key, self._timeout))
        self._remote_nodes = [*nodes.values()]
        return found

    def take_rest(self) -> bool:
        """There is a version of this incarnation on every rank: nobody goes back to an older one's.

        False where it is to be asked again; it never waits."""
        return self._replicas.take_rest(self._group.world_size)

    def break_off(self) -> None:
        """End what is on its way, in and out. What is not whole by then is nobody's replica."""
        if self._sender is not None:
            self._sender.break_off()
        if self._server is not None:
            self._server.break_off()

    def stop(self) -> None:
        """Send no more."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def close(self, *, remove: bool) -> None:
        """Send and keep no more; ``remove``: and give the memory of replicas back."""
        self.stop()
        if self._server is not None:
            self._server.close()
            self._server = None
        self._replicas.close(remove=remove)

    def _done_reading(self) -> None:
        """All ranks have what they resumed: nothing is read from other nodes any more."""
        for node in self._remote_nodes:
            node.close()
        self._remote_nodes = ()
        self.show({})

    def _opened(self) -> tuple[ReplicaServer | None, str | None]:
        try:
            return ReplicaServer(own_address(), self._key, self._replicas, transfer_timeout(self._timeout)), None
        except OSError as error:
            return None, f"cannot listen for peers: {error}"

    def _refused(self, told: Sequence[str | None]) -> bool:
        problems = "; ".join(f"rank {rank}: {why}" for rank, why in enumerate(told) if why)
        if problems:
            self._tell(f"memory.peers: nothing is replicated to other nodes: {problems[:600]}")
        return bool(problems)

    def _tell(self, text: str) -> None:
        if self._group.rank == 0:
            self._job.listeners.on_background_failure(BackgroundFailureEvent("peer", text))
