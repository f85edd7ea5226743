"""Replay plan, state and result.

What is replayed and what comes of it: plans, decisions, whole replays. Records; see :mod:`policies.replay.replay`.

Where a replay stands: the versions that its store would hold, and the save under way.

Pure records and how a run begins with them; :mod:`policies.replay.replay` moves them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from policies.accounting import Account
from policies.base import Policy, UnitStats
from policies.replay.failure_cost import Exposure, Position, StoreTimeline
from policies.replay.recorded_run import Costs, RunSegment
from policies.validation import Failure
from store.names import WEIGHTS, Unit


@dataclass(frozen=True)
class ReplayPlan:
    """What is replayed. policy: bounded, and never one that only observes. account: empty, for a clock.

    every: steps between decisions; None: all recorded ones. same_offers: its budget is the recorded one. same_sizes:
    saves are packed as the recorded ones were. costs: instead of the recorded ones. sees_all: the policy is shown what
    was measured though it does not look at it, as one that only observes is. goes_back: composites are resumed at their
    effective step. varying: the steps to the next decision are those that each recorded one told. bounded: what
    stands in for the policy where it fails, in the same bounds."""

    name: str
    policy: Policy
    account: Callable[[Callable[[], float]], Account]
    every: int | None = None
    same_offers: bool = False
    same_sizes: bool = True
    costs: Costs | None = None
    sees_all: bool = False
    goes_back: bool = True
    varying: bool = False
    bounded: Callable[[Policy], Policy] = lambda policy: policy


@dataclass(frozen=True)
class ReplayedSave:
    """One decision of a replay. written: bytes of its save, once committed. stall: seconds, copies included."""

    step: int
    seconds: float
    offered: float | None
    stats: tuple[UnitStats, ...]
    saved: Mapping[Unit, str]
    skipped: str | None
    written: int = 0
    took: float = 0.0
    stall: float = 0.0


@dataclass(frozen=True)
class ReplayResult:
    """A whole replay. committed: saves that became durable. as_recorded: every decision came out as recorded.
    failures: of the policy, at so many decisions.

    since: from where on a failure is looked at; None: from the first commit."""

    plan: ReplayPlan
    made: tuple[ReplayedSave, ...]
    committed: tuple[ReplayedSave, ...]
    course: StoreTimeline = field(compare=False)
    as_recorded: bool
    failures: tuple[Failure, ...] = ()
    since: Position | None = None

    @cached_property
    def exposure(self) -> Exposure:
        """What a failure finds, from ``since`` on."""
        return self.course.exposure(self.since)

    def seen_from(self, since: Position | None) -> ReplayResult:
        """The same, of which a failure is looked at from there on."""
        return self if since == self.since else replace(self, since=since)

    @property
    def written(self) -> int:
        """Payload bytes over all ranks of all commits."""
        return sum(one.written for one in self.committed)

    @property
    def stall(self) -> float:
        """Seconds that training waited."""
        return sum(one.stall for one in self.made)


@dataclass(frozen=True)
class Version:
    """A unit as the store holds it.

    step: of the version. since: the step of this era since which live values moved away from it."""

    step: int
    since: int
    encoding: str
    error: float
    nbytes: int
    size: tuple[int, int]
    marked: int = 0
    """How often the unit's set of parameters had changed when it was stored."""


@dataclass
class Pending:
    """The save under way: what it stores, when it is durable (seconds of the run's clock), whether it is going to."""

    made: ReplayedSave
    versions: Mapping[Unit, Version]
    done_at: float
    failed: bool


@dataclass
class ReplayState:
    """versions, commits, newest: as live decisions know them. durable: as a failure finds them, which is earlier.

    on_path: every decision came out as recorded. changes: how often each unit's set of parameters changed; changed:
    the units of which the last decision said so."""

    versions: dict[Unit, Version] = field(default_factory=dict)
    commits: int = 0
    newest: int | None = None
    durable: dict[Unit, Version] = field(default_factory=dict)
    durable_newest: int | None = None
    pending: Pending | None = None
    on_path: bool = True
    changes: dict[Unit, int] = field(default_factory=dict)
    changed: frozenset[Unit] = frozenset()

    def begin(self, era: RunSegment) -> None:
        """With what the recorded run began with."""
        commits = era.moments[0].line.commits
        self.versions, self.commits = adopted(era), commits
        self.newest = max((one.step for one in self.versions.values()), default=era.newest if commits else None)
        self.durable, self.durable_newest = dict(self.versions), self.newest

    def resume(self, era: RunSegment, goes_back: bool) -> None:
        """The job stands where the recorded one stood then. Where a composite is resumed before its newest step, what
        moves counts as not saved, as live: the next save is full."""
        back = self._returns(goes_back) if not self.on_path else (era.newest or era.start) > era.start
        self.durable = {unit: brought_back(one, era.start) for unit, one in self.versions.items()}
        self.durable_newest = None if self.newest is None else min(self.newest, era.start)
        moving = {unit.unit for unit in era.units if unit.moving}
        self.versions = {unit: one for unit, one in self.durable.items() if not (back and unit in moving)}

    def _returns(self, goes_back: bool) -> bool:
        """Whether of the saves that it is made of another one than the newest is nearest to the effective step.

        Weighed by elements: how fast each layer moves is not known here."""
        weights = [one for unit, one in self.versions.items() if unit.slot == WEIGHTS]
        if self.newest is None or not weights or not goes_back:
            return False
        newest = self.newest
        numel = sum(one.size[1] for one in weights)
        effective = newest - sum((newest - one.step) * one.size[1] for one in weights) / max(1, numel)
        steps = {newest, *(one.step for one in self.versions.values() if one.step <= newest)}
        return min(steps, key=lambda step: (abs(step - effective), step)) < newest


def adopted(era: RunSegment) -> dict[Unit, Version]:
    """The versions that the recorded run began with."""
    line = era.moments[0].line
    found = {}
    for index, staleness in enumerate(line.staleness):
        traced, encoding = era.units[index], line.encoding[index]
        if staleness is None or encoding is None:
            continue
        step = line.step - staleness
        found[traced.unit] = Version(
            step,
            max(step, era.start) if era.resumed else step,
            encoding,
            line.error[index],
            line.stored_bytes[index],
            (traced.nbytes, traced.numel),
        )
    return found


def brought_back(version: Version, step: int) -> Version:
    """After a resume at ``step`` live values are what the version gives back, and move away from there."""
    return replace(version, step=min(version.step, step), since=step)
