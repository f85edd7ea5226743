"""The jobs of this node and what becomes of them: a table of who lives. No I/O, no clock, one thread.

A job is all processes that one store got its epoch with. It is dead when all of its processes on this node are; what it
left is worth writing unless all of them had said goodbye. Stopped processes live. A newer incarnation on the same store
(at the same path: a copy is another one) takes the older one's place: that finds by itself what is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from store.daemon.messages import Hello, JobReport, Note
from store.errors import DaemonError
from store.names import SaveId

TRAINING, DYING, WAITING, RESCUING = "training", "dying", "waiting", "rescuing"

Key = tuple[str, str, int]
"""(path of the store, its id, epoch): a copy of a store has its id."""


@dataclass
class Member:
    """One rank of a job. connections: to its process, which may lose one and come back. ending: the process is gone,
    but what it said last may not be read yet. clean: it said goodbye. watched: its end will be seen."""

    rank: int
    pid: int
    connections: int = 0
    ending: bool = False
    alive: bool = True
    clean: bool = False
    watched: bool = False


@dataclass
class NodeJob:
    """What is known of a job here."""

    hello: Hello
    members: dict[int, Member] = field(default_factory=dict)
    state: str = TRAINING
    committed: SaveId | None = None
    committed_at: float | None = None
    memory: SaveId | None = None

    @property
    def key(self) -> Key:
        """Names it."""
        return self.hello.store, self.hello.store_id, self.hello.epoch

    @property
    def living(self) -> list[Member]:
        """By rank."""
        return sorted((one for one in self.members.values() if one.alive), key=lambda one: one.rank)

    @property
    def died(self) -> bool:
        """Whether any process ended without a goodbye."""
        return any(not one.alive and not one.clean for one in self.members.values())

    def noted(self, note: Note, now: float) -> None:
        """A rank told something. now: seconds since 1970."""
        committed, memory = _save(note.committed), _save(note.memory)
        if committed is not None and (self.committed is None or committed > self.committed):
            self.committed, self.committed_at = committed, now
        if memory is not None and (self.memory is None or memory > self.memory):
            self.memory = memory

    def report(self) -> JobReport:
        """For people."""
        return JobReport(
            store=self.hello.store,
            store_id=self.hello.store_id,
            epoch=self.hello.epoch,
            world_size=self.hello.world_size,
            alive=tuple(one.rank for one in self.living),
            dead=tuple(sorted(one.rank for one in self.members.values() if not one.alive)),
            state=self.state,
            committed=None if self.committed is None else self.committed.name,
            committed_at=self.committed_at,
            memory=None if self.memory is None else self.memory.name,
        )


class Jobs:
    """The table."""

    def __init__(self) -> None:
        self._jobs: dict[Key, NodeJob] = {}

    def __iter__(self) -> Iterator[NodeJob]:
        return iter(list(self._jobs.values()))

    def get(self, key: Key) -> NodeJob | None:
        """A job that is not forgotten yet."""
        return self._jobs.get(key)

    def join(self, hello: Hello, pid: int) -> tuple[NodeJob, Member, list[NodeJob]]:
        """A process registers; a second time, where its connection broke. Third: older incarnations, now forgotten.

        DaemonError where another living process is that rank, or a newer incarnation is known."""
        here = [job for (*store, _), job in self._jobs.items() if store == [hello.store, hello.store_id]]
        newest = max((job.hello.epoch for job in here), default=hello.epoch)
        if newest > hello.epoch:
            raise DaemonError(f"epoch {newest} of the store {hello.store} is known here, and {hello.epoch} is older")
        old = [job for job in here if job.hello.epoch < hello.epoch]
        made = NodeJob(hello)
        job = self._jobs.setdefault(made.key, made)
        found = job.members.get(hello.rank)
        if found is not None and found.alive and found.pid != pid:
            raise DaemonError(f"rank {hello.rank} of the store {hello.store} is process {found.pid} already")
        if found is None or not found.alive:
            found = job.members[hello.rank] = Member(hello.rank, pid)
        found.connections += 1
        job.state = DYING if job.died else TRAINING
        for one in old:
            self.forget(one)
        return job, found, old

    def ended(self, job: NodeJob, member: Member) -> bool:
        """The process of a rank is gone. Whether the whole job is now, and left something to write."""
        member.alive = False
        if self._jobs.get(job.key) is not job:
            return False
        if job.living:
            job.state = DYING if job.died else TRAINING
            return False
        if not job.died:
            self.forget(job)
            return False
        job.state = WAITING
        return True

    def forget(self, job: NodeJob) -> None:
        """Nothing more is to be done for it."""
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]


def _save(name: str | None) -> SaveId | None:
    return None if name is None else SaveId.parse(name)
