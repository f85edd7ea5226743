"""Gather facts about a run at one moment: store, disk, shared memory and trace.

Judges nothing, reads records only. An unreadable part never fails the whole: it is None, and ``trouble`` says why."""

import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal

from deploy.store_status import StoreStatus, store_status
from store.catalog import Catalog
from store.errors import DamagedError, StorageError, StoreError
from store.location import is_url
from store.memory.arena import is_owned
from store.memory.index import HeldSnapshot, belonging_to, scan_node
from store.memory.layout import Tier
from store.names import SaveId, Unit
from store.schema import ManifestRecord
from store.session import is_closed, parse_moment
from store.trace import JobLine
from store.verify import VerifyReport

Level = Literal["good", "plain", "look", "bad"]
Severity = Literal["plain", "look", "bad"]
ORDER: tuple[Level, ...] = ("plain", "good", "look", "bad")
"""From best to worst. ``plain``: nothing to judge; ``look``: needs attention; ``bad``: work is or would be lost."""

LATE = 3.0  # multiple of the usual interval after which a commit is late (``look``)
FLOOR = 60.0  # seconds below which nothing counts as late
_NEWEST = 8  # commits from which the usual interval is computed


@dataclass(frozen=True)
class Check:
    """Judgement of one aspect."""

    name: str
    level: Level
    text: str  # the state in a few words
    note: str = ""  # details
    todo: str = ""  # command to run or action to take, '' if none


def shell_command(command: str, root: Path) -> str:
    """Return a command for the store, as typed in a shell."""
    return f"driftpoint {command} {shlex.quote(str(root))}"


@dataclass(frozen=True)
class Disk:
    """Bytes free for this user; files that can still be created, None if the filesystem has no limit."""

    free: int
    files: int | None


def disk_of(root: Path) -> Disk | None:
    """Return the disk usage, or None if the system does not report it."""
    try:
        found = os.statvfs(root)
    except OSError:
        return None
    return Disk(found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None)


@dataclass(frozen=True)
class InMemory:
    """Snapshots of a store in this node's memory."""

    newest: SaveId | None  # newest snapshot with all ranks on this node
    ranks: int = 0
    part: tuple[SaveId, int, int] | None = None  # newer one with some ranks only, their number and the world size
    alive: bool = False  # whether processes own it
    problems: tuple[str, ...] = ()


def in_memory(base: Path, catalog: Catalog) -> InMemory:
    """Return the snapshots of the store below ``base``. Errors go to ``problems``; suspect ones are left out."""
    tier = Tier(base, catalog.store_id)
    try:
        alive = any(is_owned(place.owner(rank)) for place in tier.generations() for rank in place.ranks())
        return replace(_held(tier, catalog), alive=alive)
    except (StoreError, OSError) as error:
        return InMemory(None, problems=(str(error),))


def _held(tier: Tier, catalog: Catalog) -> InMemory:
    node = belonging_to(scan_node(tier), catalog.files)
    least = max(catalog.suspects().saves, default=None)
    saves = [save for save in node.versions if least is None or save > least]
    newest = max((save for save in saves if len(node.versions[save]) == _world(node.versions[save])), default=None)
    part = max((save for save in saves if newest is None or save > newest), default=None)
    told = None if part is None else (part, len(node.versions[part]), _world(node.versions[part]))
    return InMemory(newest, 0 if newest is None else len(node.versions[newest]), told, problems=node.problems)


def _world(held: Mapping[int, HeldSnapshot]) -> int:
    return next(iter(held.values())).record.part.world_size


SKIPPED: Mapping[str | None, tuple[Severity, str]] = {
    "busy": ("plain", "the previous one was still being written"),
    "withheld": ("bad", "layers that were never saved contain NaN or Inf"),
    "storage": ("look", "the store could not be claimed"),
    "unreachable": ("bad", "a rank was later than the job's timeout, or is gone: restart the job"),
    "disagree": ("bad", "the ranks are at different steps"),
    "unsupported": ("bad", "the job changed after attach"),
    "fenced": ("bad", "another job took over the store"),
}
"""Why a decision began no save where it should have, and how bad that is."""


@dataclass(frozen=True)
class LastDecision:
    """A decision. ``at`` is Unix time."""

    step: int
    at: float
    skipped: str | None


@dataclass(frozen=True)
class LastSave:
    """A commit. ``full``: raw bytes of a full save."""

    at: float
    written: int
    full: int


@dataclass(frozen=True)
class JobStatus:
    """State of the newest incarnation of a job."""

    job: JobLine
    last_seen: float
    newest: LastDecision | None
    sick: frozenset[Unit]  # with NaN or Inf at the last decision that measured, then or when its save was staged
    saves: Sequence[LastSave]  # the last few, newest last
    failed: tuple[str, ...]  # reasons of the saves that failed since the newest commit
    step_seconds: float | None  # seconds per step, None if unknown
    decision_gap: float | None
    interval: int | None
    full_bytes: int  # raw bytes of a save of everything that changes

    @property
    def save_gap(self) -> float | None:
        """Return the median seconds between commits, None with fewer than two."""
        gaps = [later.at - earlier.at for earlier, later in pairwise(self.saves)]
        return median(gaps) if gaps else None

    @property
    def next_gap(self) -> float | None:
        """Return the announced seconds to the next decision. With ``every: auto`` they may grow fourfold at a time."""
        return None if self.interval is None or self.step_seconds is None else self.interval * self.step_seconds

    def step_at(self, now: float) -> float | None:
        """Estimate the job's step at ``now``, at most the step of its next decision."""
        last = self.newest
        if last is None or self.step_seconds is None:
            return None if last is None else float(last.step)
        ahead = max(0.0, now - last.at) / self.step_seconds if self.step_seconds else 0.0
        return last.step + min(ahead, float(self.interval if self.interval is not None else ahead))


@dataclass(frozen=True)
class Facts:
    """Facts about a run."""

    now: float  # Unix time of the facts
    root: Path
    status: StoreStatus | None  # None if the store's head is unreadable; ``trouble`` holds the reason
    trouble: str = ""
    memory: InMemory | None = None
    disk: Disk | None = None
    trace: Path | None = None  # path of the drift trace; ``job_status`` is None if there is none
    job_status: JobStatus | None = None
    checked: VerifyReport | None = None
    proven: SaveId | None = None  # newest commit from which a job resumed and completed a step
    closed: bool = False  # whether the newest job ended cleanly
    commit_gap: float | None = None  # recent seconds between commits by their records, None if unknown

    @property
    def newest(self) -> ManifestRecord | None:
        return None if self.status is None else self.status.newest

    @property
    def foreign_trace(self) -> bool:
        """Return whether the trace has an epoch that the store lacks, so that it belongs to another store."""
        job_status, status = self.job_status, self.status
        return job_status is not None and status is not None and job_status.job.epoch > status.epoch

    @property
    def current(self) -> JobStatus | None:
        """Return the trace's state, if it is of the newest epoch of the store."""
        job_status, status = self.job_status, self.status
        if job_status is None or status is None:
            return job_status
        return job_status if job_status.job.observing or job_status.job.epoch == status.epoch else None

    @property
    def running(self) -> bool:
        """Return whether a job trains on this store now.

        On this machine the store's lock tells. A job on another machine, or on a bucket (which has no locks), counts as
        running while it writes its trace or, without a trace, while it commits."""
        status, job_status = self.status, self.current
        if status is not None and status.in_use_by is not None:
            return True
        if self.closed or (status is not None and status.owner is not None and not self.remote_host):
            return False
        if job_status is None:
            return self._commits
        usual, announced = job_status.decision_gap or 0.0, job_status.next_gap or 0.0
        return self.now - job_status.last_seen < max(FLOOR, 5 * usual, LATE * announced)

    @property
    def remote_host(self) -> str:
        """Return the newest job's host if its lock is not visible here (other machine, or bucket), else ''."""
        owner = None if self.status is None else self.status.owner
        known = owner is None or (owner.host == socket.gethostname() and not is_url(self.root))
        return "" if known or owner is None else owner.host

    @property
    def _commits(self) -> bool:
        newest, status = self.newest, self.status
        made = None if newest is None else parse_time(newest.created)
        if newest is None or status is None or made is None or newest.epoch != status.epoch:
            return False
        return self.now - made < LATE * max(FLOOR / LATE, self.commit_gap or 0.0)


def gather(
    catalog: Catalog,
    root: Path,
    memory: InMemory,
    job_status: JobStatus | None,
    now: float,
    *,
    trace: Path | None = None,
    checked: VerifyReport | None = None,
) -> Facts:
    """Gather the facts of the store at ``root``."""
    status = store_status(catalog, root)
    return Facts(
        now=now,
        root=root.absolute(),
        status=status,
        memory=memory,
        disk=disk_of(root),
        trace=trace,
        job_status=job_status,
        checked=checked,
        proven=max((save for save in catalog.proven() if save in status.saves), default=None),
        closed=is_closed(catalog, status.epoch),
        commit_gap=_commit_gap(catalog, status.saves[:_NEWEST]),
    )


def _commit_gap(catalog: Catalog, saves: Sequence[SaveId]) -> float | None:
    """Return the median interval of the newest commits; retention thins out older ones."""
    made: list[tuple[int, float]] = []
    for save in saves:
        with suppress(DamagedError, StorageError):
            at = parse_time(catalog.manifest(save).created)
            made += [] if at is None else [(save.epoch, at)]
    gaps = [new - old for (epoch, new), (before, old) in pairwise(made) if epoch == before and new > old]
    return median(gaps[:3]) if gaps else None


def parse_time(text: str) -> float | None:
    """Parse an ISO time of a record to Unix time; None if invalid."""
    found = parse_moment(text)
    return None if found is None else found.timestamp()
