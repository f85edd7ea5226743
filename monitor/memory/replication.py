"""Replicate in-memory snapshots to other nodes, so that a job can resume after the loss of a node.

A replica is another rank's share of a snapshot, stored on this node as if that rank were here: same names, same record,
marked as a replica. So code that reads snapshots reads replicas too. Placement is agreed once, and snapshots are sent
beside training: no collective and no wait of the training thread depends on these connections, and their errors cost
replicas only, and are reported. Training thread, except :meth:`Replication.offer`."""

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
from store.names import SaveId, group_by_key


def replica_targets(nodes: Sequence[str], machines: Sequence[str] | None = None) -> list[int]:
    """Return for every rank the one that keeps its replica: on the next node, at the same position if there is one.

    Nodes are ordered by the first rank of their machine, then by their own, in a circle. The next is of another machine
    wherever no machine has more than half of them. If it has fewer ranks, some keep several replicas.

    nodes: of each rank; at least two different ones. machines: of each rank; by default every node is one."""
    members = group_by_key((node, rank) for rank, node in enumerate(nodes))
    by_machine = group_by_key((machines[ranks[0]] if machines else node, node) for node, ranks in members.items())
    order = [node for neighbors in by_machine.values() for node in neighbors]
    most = max(len(neighbors) for neighbors in by_machine.values())
    shift = most if 2 * most <= len(order) else 1
    targets = [0] * len(nodes)
    for position, node in enumerate(order):
        there = members[order[(position + shift) % len(order)]]
        for place, rank in enumerate(members[node]):
            targets[rank] = there[place % len(there)]
    return targets


def replica_sources(targets: Sequence[int], rank: int) -> list[int]:
    """Return the ranks whose replicas ``rank`` keeps."""
    return [source for source, target in enumerate(targets) if target == rank]


@dataclass(frozen=True)
class ReplicationStatus:
    """Progress of replication, of one rank or of any."""

    busy: bool  # a snapshot is being sent
    behind: bool  # a peer does not have the latest snapshot
    failed: bool  # sending failed since the last status


class Replication:
    """The replicas of one rank. Does nothing if they are not configured, or there is one node only."""

    def __init__(self, job: JobContext) -> None:
        self._job, self._group = job, job.group
        self._timeout = job.config.timeouts.peer
        self._replicas = ReplicaStore(job.config.memory.versions)
        self._connected = not job.config.memory.peers
        self._key = b""
        self._nodes: Sequence[str] = ()
        self._machines: Sequence[str] = ()
        self._endpoints: Sequence[Endpoint] = ()
        self._server: ReplicaServer | None = None
        self._sender: ReplicaSender | None = None
        self._remote_nodes: Sequence[RemoteNode] = ()
        self.replicated: SaveId | None = None
        """The snapshot that all ranks are known to have in their own memory and on another node."""

    @property
    def reachable(self) -> bool:
        """Whether ranks can read payloads on other nodes. The same on all ranks."""
        return self._server is not None

    @property
    def on(self) -> bool:
        """Whether snapshots are replicated. The same on all ranks."""
        return self._sender is not None

    def connect(self, tier: Tier) -> None:
        """Exchange nodes and addresses, and start listening, once. Collective."""
        if self._connected:
            return
        self._connected = True
        places = self._group.all_gather((node_id(tier), machine_id()))
        self._nodes, self._machines = [node for node, _ in places], [machine for _, machine in places]
        if len(set(self._nodes)) < 2:
            self._report("memory.peers: all ranks are on one node, so that there is no other one to keep replicas on")
            return
        self._key = self._group.broadcast(secrets.token_bytes(32) if self._group.rank == 0 else None)
        server, problem = self._open_server()
        endpoints = self._group.all_gather((None if server is None else server.endpoint, problem))
        if self._refused([why for _, why in endpoints]):
            if server is not None:
                server.close()
            return
        self._server, self._endpoints = server, [endpoint for endpoint, _ in endpoints]

    def begin(self, tier: Tier, session: StoreSession, nbytes: int, kept: SaveId | None) -> None:
        """Reserve memory for the replicas of other ranks, after a resume or a fresh start. Collective.

        If memory is short on any rank, there are no replicas on any. nbytes: of a snapshot of this rank. kept: snapshot
        that the job resumed."""
        self.connect(tier)
        for node in self._remote_nodes:  # a resume read from them; all ranks have their state now
            node.close()
        self._remote_nodes = ()
        self.serve({})
        self.replicated = self.replicated if self.replicated == kept else None
        if self._sender is not None:
            self._replicas.keep_only_version(kept)
        elif self._server is not None:
            targets, rank = replica_targets(self._nodes, self._machines), self._group.rank
            sizes = self._group.all_gather(nbytes)
            needs = {source: sizes[source] for source in replica_sources(targets, rank)}
            problem = self._replicas.take(tier, session.epoch, needs, kept, session.files)
            if self._refused(self._group.all_gather(problem)):
                self._replicas.close(remove=True)
                return
            self._sender = ReplicaSender(rank, targets[rank], self._endpoints[targets[rank]], self._key, self._timeout)

    def offer(self, arena: Arena, slot: int, save: SaveId, keep: SaveId | None) -> None:
        """Send a sealed snapshot of this rank. ``keep``: the one that all peers have. Returns at once; any thread."""
        if (sender := self._sender) is not None:
            sender.offer(save, *arena.files(slot), keep)

    def sending(self, latest: SaveId | None) -> tuple[ReplicationStatus, list[float]]:
        """Return the status of this rank, and the seconds that each finished transfer took.

        ``latest`` is the snapshot that peers should have."""
        if self._sender is None:
            return ReplicationStatus(busy=False, behind=True, failed=False), []
        busy, (durations, failed) = self._sender.busy, self._sender.collect()
        if self._group.rank == 0:
            self._job.listeners.on_replication(durations, None)
        return ReplicationStatus(busy, self._sender.sent != latest, failed), durations

    def agreed(self, sending: ReplicationStatus, latest: SaveId | None) -> None:
        """Take the status of all ranks. ``latest``: the snapshot that all of them have in their own memory."""
        first = self._group.rank == 0
        if first and sending.failed:  # the rank that failed logs the reason
            self._job.listeners.on_background_failure(BackgroundFailureEvent("peer"))
        if latest is not None and latest != self.replicated and not sending.busy and not sending.behind:
            self.replicated = latest
            if first:
                self._job.listeners.on_replication((), latest.step)

    def keep_at_peers(self, newest: SaveId | None) -> SaveId | None:
        """Return the snapshot that peers must keep during the next one. ``newest``: what stays in local memory."""
        self.replicated = self.replicated if self.replicated == newest else None
        return self.replicated

    def serve(self, payloads: ServedPayloads) -> None:
        if self._server is not None:
            self._server.serve(payloads)

    def remote_nodes(self, held: Sequence[Mapping[int, bool]]) -> dict[int, RemoteNode]:
        """Return, for each rank whose payload is not on this node, a node that has it; its own node if possible.

        ``held``: for each rank, which ranks' payloads its node has, and whether as a replica."""
        rank = self._group.rank
        holders: dict[int, list[tuple[bool, int]]] = {}
        for holder, owners in enumerate(held):
            for owner, replica in owners.items():
                if owner not in held[rank]:
                    holders.setdefault(owner, []).append((replica, holder))
        nodes: dict[int, RemoteNode] = {}
        by_owner = {}
        for owner, known in holders.items():
            best = [holder for replica, holder in known if replica == min(known)[0]]
            holder = best[rank % len(best)]  # spread the readers
            by_owner[owner] = nodes.setdefault(holder, RemoteNode(self._endpoints[holder], self._key, self._timeout))
        self._remote_nodes = [*nodes.values()]
        return by_owner

    def take_rest(self) -> bool:
        """Reuse the memory of earlier incarnations' replicas, once every rank has a snapshot of this one.

        Return False, without waiting, if it is to be tried again."""
        return self._replicas.take_rest(self._group.world_size)

    def break_off(self) -> None:
        """Abort all transfers, in and out. Incomplete ones leave no replica."""
        if self._sender is not None:
            self._sender.break_off()
        if self._server is not None:
            self._server.break_off()

    def stop(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def close(self, *, remove: bool) -> None:
        """Stop sending and receiving, and free the memory of replicas if ``remove``."""
        self.stop()
        if self._server is not None:
            self._server.close()
            self._server = None
        self._replicas.close(remove=remove)

    def _open_server(self) -> tuple[ReplicaServer | None, str | None]:
        try:
            return ReplicaServer(own_address(), self._key, self._replicas, transfer_timeout(self._timeout)), None
        except OSError as error:
            return None, f"cannot listen for peers: {error}"

    def _refused(self, problems: Sequence[str | None]) -> bool:
        text = "; ".join(f"rank {rank}: {why}" for rank, why in enumerate(problems) if why)
        if text:
            self._report(f"memory.peers: nothing is replicated to other nodes: {text[:600]}")
        return bool(text)

    def _report(self, text: str) -> None:
        if self._group.rank == 0:
            self._job.listeners.on_background_failure(BackgroundFailureEvent("peer", text))
