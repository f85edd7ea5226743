"""State of a node: registered jobs, and rescues of dead ones.

A job is all processes with one epoch of a store. It is dead when all its processes on this node ended; its snapshots
are rescued unless all of them unregistered cleanly. Stopped processes count as alive. A newer epoch on the same store
(at the same path; a copy is another store) replaces the older one, since it finds the snapshots by itself. Everything
here runs in the event loop's thread."""

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from deploy.daemon.metrics import DaemonMetrics
from deploy.daemon.rescuer import Rescuer, RescueRequest, RescueResult
from store.daemon_protocol import JobReport, Register, Report, RescueReport, StatusUpdate
from store.errors import DaemonError, StorageError
from store.memory import cleanup
from store.memory.index import SeenStore
from store.memory.layout import Tier, tiers
from store.metrics_server import LOOPBACK, EndpointSecurity
from store.names import SaveId

TRAINING, DYING, WAITING, RESCUING = "training", "dying", "waiting", "rescuing"
Key = tuple[str, str, int]  # path, id and epoch of a store. The path tells copies apart, which have the same id.
_log = logging.getLogger("driftpoint")
_RETRIES = (5.0, 30.0, 120.0)  # seconds before each retry of a rescue
_RETRYABLE = ("failed", "in use", "no store")  # outcomes that a retry may change
_UNREACHED = (*_RETRYABLE, "given up", "fenced")  # outcomes after which memory may still be rescued
_LAST_MESSAGE_SECONDS = 2.0  # to read a dead process's last message; forked children may keep its connection open
_POLL_SECONDS = 0.05
_HISTORY = 20


@dataclass
class RankConnection:
    """One rank of a job."""

    rank: int
    pid: int
    connections: int = 0  # open connections of its process
    ending: bool = False  # the process ended, but its last message may be unread
    alive: bool = True
    clean: bool = False  # it unregistered
    watched: bool = False  # its end will be noticed


@dataclass
class NodeJob:
    """State of a job on this node."""

    hello: Register
    members: dict[int, RankConnection] = field(default_factory=dict)
    state: str = TRAINING
    committed: SaveId | None = None
    committed_at: float | None = None
    memory: SaveId | None = None

    @property
    def key(self) -> Key:
        return self.hello.store, self.hello.store_id, self.hello.epoch

    @property
    def living(self) -> list[RankConnection]:
        return sorted((one for one in self.members.values() if one.alive), key=lambda one: one.rank)

    @property
    def died(self) -> bool:
        return any(not one.alive and not one.clean for one in self.members.values())

    def apply(self, note: StatusUpdate, now: float) -> None:
        """Apply a status update of a rank; ``now`` is Unix time."""
        committed, memory = _save(note.committed), _save(note.memory)
        if committed is not None and (self.committed is None or committed > self.committed):
            self.committed, self.committed_at = committed, now
        if memory is not None and (self.memory is None or memory > self.memory):
            self.memory = memory

    def report(self) -> JobReport:
        return JobReport(
            **{name: getattr(self.hello, name) for name in ("store", "store_id", "epoch", "world_size")},
            alive=tuple(one.rank for one in self.living),
            dead=tuple(sorted(one.rank for one in self.members.values() if not one.alive)),
            state=self.state,
            committed=None if self.committed is None else self.committed.name,
            committed_at=self.committed_at,
            memory=None if self.memory is None else self.memory.name,
        )


class Jobs:
    """Table of jobs. No I/O and no clock."""

    def __init__(self) -> None:
        self._jobs: dict[Key, NodeJob] = {}

    def __iter__(self) -> Iterator[NodeJob]:
        return iter(list(self._jobs.values()))

    def get(self, key: Key) -> NodeJob | None:
        return self._jobs.get(key)

    def join(self, hello: Register, pid: int) -> tuple[NodeJob, RankConnection, list[NodeJob]]:
        """Register a process, maybe again after its connection broke; return (job, rank, jobs of replaced epochs).

        Raises DaemonError if another living process has that rank, or a newer epoch is known."""
        here = [job for (*store, _), job in self._jobs.items() if store == [hello.store, hello.store_id]]
        if (newest := max((job.hello.epoch for job in here), default=hello.epoch)) > hello.epoch:
            raise DaemonError(f"epoch {hello.epoch} of the store {hello.store} is older than the registered {newest}")
        old = [job for job in here if job.hello.epoch < hello.epoch]
        new = NodeJob(hello)
        job = self._jobs.setdefault(new.key, new)
        member = job.members.get(hello.rank)
        if member is not None and member.alive and member.pid != pid:
            raise DaemonError(f"rank {hello.rank} of the store {hello.store} is already process {member.pid}")
        if member is None or not member.alive:
            member = job.members[hello.rank] = RankConnection(hello.rank, pid)
        member.connections += 1
        job.state = DYING if job.died else TRAINING
        for replaced in old:
            self.forget(replaced)
        return job, member, old

    def ended(self, job: NodeJob, member: RankConnection) -> bool:
        """Record the end of a rank's process; return whether its whole job ended and left snapshots to rescue."""
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
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]


def _save(name: str | None) -> SaveId | None:
    return None if name is None else SaveId.parse(name)


@dataclass(frozen=True)
class Options:
    """Options of ``driftpoint daemon run``. ``host``, ``port`` and ``security``: of the metrics endpoint."""

    base: Path  # shared-memory directory
    port: int = 9465
    exit_idle: float | None = None  # seconds without a job before it exits, None for never
    grace: float = 30.0  # seconds to finish a rescue on exit
    survivors: float = 10.0  # seconds after a death until the surviving ranks are logged
    host: str = LOOPBACK
    security: EndpointSecurity = field(default_factory=EndpointSecurity)


class Node:
    """Handles the events of a node. Must be created inside the running loop."""

    def __init__(self, options: Options, metrics: DaemonMetrics) -> None:
        self.options, self.metrics = options, metrics
        self.refused = 0
        self._loop = asyncio.get_running_loop()
        self._jobs, self._known = Jobs(), SeenStore(options.base)
        self._rescues = deque[RescueReport](maxlen=_HISTORY)
        self._retrying = 0  # rescues that wait for their next attempt
        self._cleaning: dict[str, dict[Path, RescueResult | None]] = {}  # by store id: rescues of old memory
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        self._needed = time.monotonic()
        self.rescuer = Rescuer(options.base, self._rescued, self._on_rescue_started)

    def rescue_leftovers(self) -> None:
        """Rescue snapshots of jobs that died together with the previous daemon."""
        try:
            for tier in tiers(self.options.base):
                places = self._known.places(tier.store_id)
                for path in places:
                    self.rescuer.ask(RescueRequest(path, tier.store_id, None))
                if not places and cleanup.oldest_version_seconds(tier) > 0.0:
                    _log.warning("%s; `driftpoint rescue STORE` commits them", _unknown_place(tier))
        except StorageError as error:
            _log.warning("cannot read the snapshots in memory: %s", error)

    def idle_seconds(self) -> float:
        """Return the seconds since the daemon was last needed."""
        if self.rescuer.busy or self._retrying or any(True for _ in self._jobs):
            self._needed = time.monotonic()
        return time.monotonic() - self._needed

    async def clean(self) -> None:
        """Free memory that dead jobs wrote over a day ago; a state that no commit has is rescued before."""
        try:
            nbytes, old = await asyncio.to_thread(_clear_empty, self.options.base)
        except (StorageError, OSError) as error:
            _log.warning("cannot remove snapshots of old jobs: %s", error)
            return
        if nbytes:
            _log.info("freed %d bytes of abandoned memory", nbytes)
        for tier in old:
            places = self._known.places(tier.store_id)
            if not places:
                text = "%s: they stay; `driftpoint rescue STORE` commits, `driftpoint memory clear %s` frees them"
                _log.error(text, _unknown_place(tier), tier.store_id)
            self._cleaning[tier.store_id] = dict.fromkeys(places)
            for path in places:
                self.rescuer.ask(RescueRequest(path, tier.store_id, None, old=True))

    async def wait_for_deaths(self, seconds: float) -> None:
        """Wait up to ``seconds`` for jobs to die, because a session's end terminates daemon and trainers together."""
        deadline = time.monotonic() + seconds
        while any(job.living for job in self._jobs) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)

    # Jobs.

    def join(self, hello: Register, pid: int, end: int | None) -> tuple[NodeJob, RankConnection]:
        """Register a trainer, or raise DaemonError.

        ``end``: descriptor of :func:`deploy.daemon.server.process_end_fd`; ownership passes to this call."""
        try:
            if Path(hello.base) != self.options.base:
                raise DaemonError(f"this daemon serves {self.options.base}, but the job's memory is in {hello.base}")
            job, member, older = self._jobs.join(hello, pid)
        except DaemonError:
            _close(end)
            raise
        dropped = self.rescuer.drop(Path(hello.store))
        _log.info("rank %d of %d of %s is process %d", hello.rank, hello.world_size, hello.store, pid)
        if older or dropped:
            _log.info("epoch %d of %s takes over the snapshots of older ones", hello.epoch, hello.store)
        if member.watched:
            _close(end)
        elif end is None:
            self._on_process_gone(job, member)
        else:
            member.watched = True
            self._loop.add_reader(end, self._process_ended, job, member, end)
        try:
            self._known.seen(hello.store_id, Path(hello.store))
        except StorageError as error:
            _log.warning("cannot record the path of %s for the next daemon: %s", hello.store, error)
        return job, member

    def disconnected(self, job: NodeJob, member: RankConnection) -> None:
        """Record a closed connection. The process may still live."""
        member.connections -= 1
        if member.ending:
            self._on_process_gone(job, member)

    def _process_ended(self, job: NodeJob, member: RankConnection, end: int) -> None:
        self._loop.remove_reader(end)
        os.close(end)
        member.ending = True
        if member.connections > 0:  # its ``Unregister`` message may not have been read yet
            self._loop.call_later(_LAST_MESSAGE_SECONDS, self._on_process_gone, job, member)
        else:
            self._on_process_gone(job, member)

    def _on_process_gone(self, job: NodeJob, member: RankConnection) -> None:
        if not member.alive:
            return
        self._needed = time.monotonic()
        if self._jobs.ended(job, member):
            _log.warning("the job on %s died", job.hello.store)
            self.rescuer.ask(RescueRequest(Path(job.hello.store), job.hello.store_id, job.hello.epoch))
        elif not member.clean and job.living:
            _log.warning("rank %d of %s died (process %d)", member.rank, job.hello.store, member.pid)
            self._loop.call_later(self.options.survivors, self._name_survivors, job)

    def _name_survivors(self, job: NodeJob) -> None:
        if job.living and job.died and self._jobs.get(job.key) is job:
            living = ", ".join(f"rank {one.rank} (process {one.pid})" for one in job.living)
            _log.warning("%s: a rank died, but %s live: snapshots are rescued after they end", job.hello.store, living)

    # News of the rescuer.

    def _job_of(self, request: RescueRequest) -> NodeJob | None:
        return None if request.epoch is None else self._jobs.get((str(request.store), request.store_id, request.epoch))

    def _on_rescue_started(self, request: RescueRequest) -> None:
        if (job := self._job_of(request)) is not None:
            job.state = RESCUING

    def _rescued(self, done: RescueResult) -> None:
        request = done.request
        self._needed = time.monotonic()
        job, leftover = self._job_of(request), request.epoch is None
        again = (
            done.outcome in _RETRYABLE
            and not request.dropped.is_set()
            and (job is not None or (leftover and not request.old))
            and request.tried < len(_RETRIES)
        )
        if again:
            if job is not None:
                job.state = WAITING
            self._retrying += 1
            self._loop.call_later(_RETRIES[request.tried], self._ask_again, replace(request, tried=request.tried + 1))
        elif job is not None and not job.living:
            self._jobs.forget(job)
        if request.old:
            self._on_old_rescued(done)
        if leftover and (again or request.old or done.outcome in ("nothing", "in use")) and done.outcome != "written":
            return  # no death was seen; a retry, the cleanup, or the job that uses the store reports the outcome
        level = logging.INFO if done.outcome in ("written", "nothing", "fenced", "given up") else logging.ERROR
        _log.log(level, "rescue of %s: %s: %s (%.1f s)", request.store, done.outcome, done.why, done.seconds)
        self.metrics.rescued(done.outcome)
        store, at = str(request.store), time.time()
        self._rescues.append(RescueReport(store=store, outcome=done.outcome, why=done.why, seconds=done.seconds, at=at))

    def _on_old_rescued(self, done: RescueResult) -> None:
        """Remove old memory once all paths of its store were tried, and report what no rescue could save."""
        store_id = done.request.store_id
        results = self._cleaning.get(store_id, {})
        results[done.request.store] = done
        if not all(results.values()):
            return
        self._cleaning.pop(store_id, None)
        tried = [one for one in results.values() if one is not None]
        tier, reachable = Tier(self.options.base, store_id), not any(one.outcome in _UNREACHED for one in tried)
        keep = cleanup.KEEP_SECONDS if reachable else cleanup.KEEP_UNREACHABLE_SECONDS
        try:
            age = cleanup.oldest_version_seconds(tier)
        except StorageError as error:
            _log.warning("cannot read the snapshots of old jobs: %s", error)
            return
        if age <= cleanup.KEEP_SECONDS:
            return  # all of it was committed, or a job began to use it
        text = "memory of store %s, written %.0f h ago, holds snapshots that no commit has; rescue failed (%s): %s"
        why = "; ".join(f"{one.request.store}: {one.outcome}: {one.why}" for one in tried)
        then = "it is removed" if age > keep else "it stays, and the rescue is tried again in an hour"
        _log.error(text, store_id, age / 3600, why, then)
        if age > keep:
            self._loop.run_in_executor(None, _clear_lost, tier, keep)

    def _ask_again(self, request: RescueRequest) -> None:
        self._retrying -= 1
        self.rescuer.ask(request)

    def report(self) -> Report:
        return Report(
            pid=os.getpid(),
            base=str(self.options.base),
            started=self._started,
            port=self.metrics.port,
            url=self.metrics.url,
            jobs=tuple(job.report() for job in self._jobs),
            rescues=tuple(self._rescues),
            refused=self.refused,
        )


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def _unknown_place(tier: Tier) -> str:
    return f"memory holds snapshots of store {tier.store_id}, whose directory this daemon does not know"


def _clear_empty(base: Path) -> tuple[int, list[Tier]]:
    """Remove old memory without a version. Return the bytes freed, and the stores with old memory left."""
    freed = cleanup.clear_old(base, wanted=cleanup.without_versions)
    return freed, [tier for tier in tiers(base) if cleanup.oldest_version_seconds(tier) > cleanup.KEEP_SECONDS]


def _clear_lost(tier: Tier, keep: float) -> None:
    try:
        nbytes = cleanup.clear_old_of(tier, keep)
    except (StorageError, OSError) as error:
        _log.warning("cannot remove snapshots of old jobs: %s", error)
        return
    _log.info("freed %d bytes of snapshots that could not be rescued", nbytes)
