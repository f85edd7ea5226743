"""Gather facts: store, disk, shared memory, daemon.

A judgement of one thing: how it stands, how bad that is, and what to do. Plain records.

Levels: ``good``; ``plain``, nothing to judge; ``look``, a person should look at it some time; ``bad``, work is being
lost or would be.

How much room the disk of a store has, for this user.

What the shared memory of this node holds of a store: the newest version that all ranks have, and newer parts.

Reads records, no payload. A store whose job runs elsewhere has nothing here, which is no fault.

Everything that tells whether a run is safe, gathered at one moment. It judges nothing.

Nothing here may fail because a part of it cannot be read: what is not known is None, and ``trouble`` says why.
"""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal

from deploy.health.trace_reader import JobStatus
from deploy.store_status import StoreStatus, store_status
from store.catalog import Catalog
from store.daemon_protocol import AskStatus, Report, query_daemon
from store.errors import DamagedError, DriftpointError, StorageError, StoreError
from store.location import is_url
from store.memory.arena import is_owned
from store.memory.index import HeldSnapshot, belonging_to, scan_node
from store.memory.layout import Tier
from store.names import SaveId
from store.schema import ManifestRecord
from store.session import is_closed
from store.verify import VerifyReport

Level = Literal["good", "plain", "look", "bad"]
ORDER: tuple[Level, ...] = ("plain", "good", "look", "bad")
"""Worst last."""

LATE, VERY_LATE = 3.0, 10.0
"""How many times the usual time may pass until somebody should look, and until work is being lost."""

FLOOR = 60.0
"""Seconds that nobody is alarmed about."""

LONG = 3600.0
"""Seconds without a commit that somebody should look at where nobody knows how often they come."""

AHEAD = 120.0
"""Seconds that clocks of two machines may differ."""


@dataclass(frozen=True)
class Check:
    """name: of the thing, short. text: how it stands. note: more of it. todo: what to type or do, '' where nothing."""

    name: str
    level: Level
    text: str
    note: str = ""
    todo: str = ""


def typed(command: str, root: Path) -> str:
    """A command about a store, as it is typed."""
    return f"driftpoint {command} {shlex.quote(str(root))}"


@dataclass(frozen=True)
class Disk:
    """Bytes: free for this user, and in all. files: how many more may be made; None where the system does not limit."""

    free: int
    total: int
    files: int | None


def disk_of(root: Path) -> Disk | None:
    """None where the system does not tell."""
    try:
        found = os.statvfs(root)
    except OSError:
        return None
    files = found.f_favail if found.f_files else None
    return Disk(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize, files)


@dataclass(frozen=True)
class InMemory:
    """newest: the newest version that lies here whole, of all ranks; None where there is none.

    part: a newer one of which only some ranks are here, and how many of how many. alive: processes keep it."""

    newest: SaveId | None
    ranks: int = 0
    part: tuple[SaveId, int, int] | None = None
    alive: bool = False
    problems: tuple[str, ...] = ()


def in_memory(base: Path, catalog: Catalog) -> InMemory:
    """Of the store, at ``base``. What cannot be looked at is told in ``problems``; what jobs died of is left out."""
    return MemoryFacts(base).look(catalog)


class MemoryFacts:
    """Looks again and again, and reads records only where any is new. Owned by one thread."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._key: Hashable = None
        self._seen = InMemory(None)

    def look(self, catalog: Catalog) -> InMemory:
        """As :func:`in_memory`."""
        tier = Tier(self._base, catalog.store_id)
        try:
            key = (tuple(_stamps(tier)), tuple(catalog.saves()), frozenset(catalog.suspects().saves))
            if key != self._key:
                self._seen, self._key = _held(tier, catalog), key
            alive = any(is_owned(place.owner(rank)) for place in tier.generations() for rank in place.ranks())
        except (StoreError, OSError) as error:
            self._key = None
            return InMemory(None, problems=(str(error),))
        return replace(self._seen, alive=alive)


def _stamps(tier: Tier) -> Iterator[Hashable]:
    """What tells that a file is another one than before, of each."""
    for place in tier.generations():
        for path, _, _ in place.files():
            with suppress(FileNotFoundError):
                found = path.stat()
                yield str(path), found.st_ino, found.st_mtime_ns, found.st_size


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


_PATIENCE = 1.0
"""Seconds for a daemon to answer: looking must not hang on it."""

_NEWEST = 8
"""Commits of which it is told how often they come."""


@dataclass(frozen=True)
class VerifiedCommits:
    """Commits whose bytes were read again. who: by whom. damaged: those found to be."""

    who: str
    commits: int
    damaged: tuple[str, ...]
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """now: seconds since 1970. status: None where the store's head cannot be read, and ``trouble`` why.

    trace: where it was looked for; pulse: None where there is none there. strange: the trace tells of an epoch that the
    store does not have. proven: the newest commit that a job resumed from and took a step. commit_gap: seconds between
    two commits by their records, lately; None where no incarnation left two."""

    now: float
    root: Path
    status: StoreStatus | None
    trouble: str = ""
    memory: InMemory | None = None
    disk: Disk | None = None
    trace: Path | None = None
    pulse: JobStatus | None = None
    checked: VerifiedCommits | None = None
    proven: SaveId | None = None
    closed: bool = False
    commit_gap: float | None = None

    @property
    def newest(self) -> ManifestRecord | None:
        """The newest commit that can be read."""
        return None if self.status is None else self.status.newest

    @property
    def strange(self) -> bool:
        """Whether the trace cannot be this store's."""
        pulse, status = self.pulse, self.status
        return pulse is not None and status is not None and pulse.job.epoch > status.epoch

    @property
    def current(self) -> JobStatus | None:
        """The pulse, where it is of the newest incarnation that the store knows: another one tells nothing of now."""
        pulse, status = self.pulse, self.status
        if pulse is None or status is None:
            return pulse
        return pulse if pulse.job.observing or pulse.job.epoch == status.epoch else None

    @property
    def running(self) -> bool:
        """Whether a job trains on this store now. One of this machine holds its lock; one that began elsewhere, or has
        its store in a bucket, which has no locks, is taken to run as long as it writes its trace, or, where there is
        none to see, as long as it commits."""
        status, pulse = self.status, self.current
        if status is not None and status.in_use_by is not None:
            return True
        if self.closed or (status is not None and status.owner is not None and not self.unlocked):
            return False
        if pulse is None:
            return self._commits
        return self.now - pulse.heard < max(FLOOR, 5 * (pulse.decision_gap or 0.0), LATE * (pulse.next_gap or 0.0))

    @property
    def unlocked(self) -> str:
        """The machine of the newest job, where no lock tells of it here: another one than this, or any of a store in a
        bucket; else ''."""
        owner = None if self.status is None else self.status.owner
        known = owner is None or (owner.host == socket.gethostname() and not is_url(self.root))
        return "" if known or owner is None else owner.host

    @property
    def broken_off(self) -> bool:
        """Whether the newest job ended, as far as can be seen from here, and not as it was meant to."""
        owner = None if self.status is None else self.status.owner
        return owner is not None and owner.incarnation is not None and not self.closed and not self.running

    @property
    def _commits(self) -> bool:
        newest, status = self.newest, self.status
        made = None if newest is None else moment(newest.created)
        if newest is None or status is None or made is None or newest.epoch != status.epoch:
            return False
        return self.now - made < LATE * max(FLOOR / LATE, self.commit_gap or 0.0)


def gather(
    catalog: Catalog,
    root: Path,
    memory: InMemory,
    pulse: JobStatus | None,
    now: float,
    *,
    trace: Path | None = None,
    checked: VerifiedCommits | None = None,
    status: StoreStatus | None = None,
) -> Facts:
    """Of the store at ``root``. status: of the store, where somebody looked already."""
    status = store_status(catalog, root) if status is None else status
    return Facts(
        now=now,
        root=root.absolute(),
        status=status,
        memory=memory,
        disk=disk_of(root),
        trace=trace,
        pulse=pulse,
        checked=checked,
        proven=max((save for save in catalog.proven() if save in status.saves), default=None),
        closed=is_closed(catalog, status.epoch),
        commit_gap=_commit_gap(catalog, status.saves[:_NEWEST]),
    )


def by_daemon(memory: Path, store_id: str) -> VerifiedCommits | None:
    """What the daemon of this node read of the store; None where none answers at once, or it read nothing."""
    try:
        report = query_daemon(memory, AskStatus(), _PATIENCE)
    except DriftpointError:
        return None  # there need not be one
    if not isinstance(report, Report):
        return None
    found = next((one for one in report.stores if one.store_id == store_id), None)
    if found is None or not found.verified:
        return None
    return VerifiedCommits("the daemon of this node", found.verified, found.damaged, found.damage)


def by_verify(report: VerifyReport) -> VerifiedCommits:
    """What a verification just found."""
    damaged = tuple(commit.save.name for commit in report.commits if commit.state != "ok")
    return VerifiedCommits("just now", len(report.commits), damaged, report.problems)


def _commit_gap(catalog: Catalog, saves: Sequence[SaveId]) -> float | None:
    """Of the newest few; retention leaves ever fewer of those further back."""
    made: list[tuple[int, float]] = []
    for save in saves:
        with suppress(DamagedError, StorageError):
            at = moment(catalog.manifest(save).created)
            made += [] if at is None else [(save.epoch, at)]
    gaps = [
        later - earlier for (epoch, later), (before, earlier) in pairwise(made) if epoch == before and later > earlier
    ]
    return median(gaps[:3]) if gaps else None


def moment(text: str) -> float | None:
    """Seconds since 1970 of a wall-clock time in a record; None where it is none."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
