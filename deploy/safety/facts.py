"""Everything that tells whether a run is safe, gathered at one moment. It judges nothing.

Nothing here may fail because a part of it cannot be read: what is not known is None, and ``trouble`` says why.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

from deploy.safety.check import FLOOR, LATE
from deploy.safety.disk import Disk, disk_of
from deploy.safety.memory import InMemory
from deploy.safety.pulse import Pulse
from deploy.standing import StoreStatus, standing
from store.catalog import Catalog
from store.daemon.messages import AskStatus, Report
from store.daemon.place import asked
from store.errors import DamagedError, DriftpointError, StorageError
from store.incarnations import is_closed
from store.names import SaveId
from store.place import is_url
from store.schema import ManifestRecord
from store.verify import VerifyReport

_PATIENCE = 1.0
"""Seconds for a daemon to answer: looking must not hang on it."""

_NEWEST = 8
"""Commits of which it is told how often they come."""


@dataclass(frozen=True)
class Checked:
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
    pulse: Pulse | None = None
    checked: Checked | None = None
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
    def current(self) -> Pulse | None:
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
    pulse: Pulse | None,
    now: float,
    *,
    trace: Path | None = None,
    checked: Checked | None = None,
    status: StoreStatus | None = None,
) -> Facts:
    """Of the store at ``root``. status: of the store, where somebody looked already."""
    status = standing(catalog, root) if status is None else status
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


def by_daemon(memory: Path, store_id: str) -> Checked | None:
    """What the daemon of this node read of the store; None where none answers at once, or it read nothing."""
    try:
        report = asked(memory, AskStatus(), _PATIENCE)
    except DriftpointError:
        return None  # there need not be one
    if not isinstance(report, Report):
        return None
    found = next((one for one in report.stores if one.store_id == store_id), None)
    if found is None or not found.verified:
        return None
    return Checked("the daemon of this node", found.verified, found.damaged, found.damage)


def by_verify(report: VerifyReport) -> Checked:
    """What a verification just found."""
    damaged = tuple(commit.save.name for commit in report.commits if commit.state != "ok")
    return Checked("just now", len(report.commits), damaged, report.problems)


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
