"""Define the plan, state and result of a replay."""

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
    """The configuration to replay."""

    name: str
    policy: Policy  # inside its bounds, and not policy observe
    account: Callable[[Callable[[], float]], Account]  # creates an empty account for a clock
    every: int | None = None  # steps between decisions; None: all recorded decisions
    same_offers: bool = False  # decisions get the recorded budgets, as long as all decisions equal the recorded ones
    same_sizes: bool = True  # saves are encoded and compressed as recorded
    costs: Costs | None = None  # used instead of the recorded costs
    sees_all: bool = False  # the policy is shown all measurements, even if it needs no drift, as under policy observe
    goes_back: bool = True  # composites are resumed at their effective step
    varying: bool = False  # ``History.interval`` is that of each recorded decision
    bounded: Callable[[Policy], Policy] = lambda policy: policy  # puts the fallback for a failed one into its bounds


@dataclass(frozen=True)
class ReplayedDecision:
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
    """Result of a replay.

    ``committed``: saves that became durable. ``failures``: failures of the policy. ``as_recorded``: whether all
    decisions equal the recorded ones. ``since``: position from which exposure counts; None: from the first commit."""

    plan: ReplayPlan
    decisions: tuple[ReplayedDecision, ...]
    committed: tuple[ReplayedDecision, ...]
    timeline: StoreTimeline = field(compare=False)
    as_recorded: bool
    failures: tuple[Failure, ...] = ()
    since: Position | None = None

    @cached_property
    def exposure(self) -> Exposure:
        """State of the store at a failure, from ``since`` on."""
        return self.timeline.exposure(self.since)

    def seen_from(self, since: Position | None) -> "ReplayResult":
        """Return the result with exposure counted from another position."""
        return self if since == self.since else replace(self, since=since)

    @property
    def written(self) -> int:
        """Payload bytes over all ranks of all commits."""
        return sum(one.written for one in self.committed)

    @property
    def stall(self) -> float:
        """Seconds that training waited."""
        return sum(one.stall for one in self.decisions)


@dataclass(frozen=True)
class Version:
    """A unit's version in the replayed store."""

    step: int
    since: int  # step of the segment from which live values moved away from it
    encoding: str
    error: float
    nbytes: int
    size: tuple[int, int]
    marked: int = 0  # number of changes of the unit's set of parameters before it was stored


@dataclass
class Pending:
    """The save under way. done_at: when it becomes durable, in seconds of the run's clock, unless it failed."""

    decision: ReplayedDecision
    versions: Mapping[Unit, Version]
    done_at: float
    failed: bool


@dataclass
class ReplayState:
    """The store during a replay: ``versions`` as decisions see them, ``durable`` as a failure finds them."""

    versions: dict[Unit, Version] = field(default_factory=dict)
    commits: int = 0
    newest: int | None = None
    durable: dict[Unit, Version] = field(default_factory=dict)
    durable_newest: int | None = None
    pending: Pending | None = None
    on_path: bool = True  # all decisions so far equal the recorded ones
    changes: dict[Unit, int] = field(default_factory=dict)  # number of changes of each unit's set of parameters
    changed: frozenset[Unit] = frozenset()  # units that changed at the last decision

    def begin(self, segment: RunSegment) -> None:
        """Start with the versions that the recorded run began with."""
        line, self.versions = segment.decisions[0].line, {}
        for index, staleness in enumerate(line.staleness):
            traced, encoding = segment.units[index], line.encoding[index]
            if staleness is not None and encoding is not None:
                step, size = line.step - staleness, (traced.nbytes, traced.numel)
                since, error, nbytes = segment.moves_from(step), line.error[index], line.stored_bytes[index]
                self.versions[traced.unit] = Version(step, since, encoding, error, nbytes, size)
        self.commits = commits = line.commits
        self.newest = max((one.step for one in self.versions.values()), default=segment.newest if commits else None)
        self.durable, self.durable_newest = self.versions, self.newest

    def resume(self, segment: RunSegment, goes_back: bool, limited: bool) -> None:
        """Resume where the recorded run did.

        A composite that is resumed before its newest step loses later versions, as in a live run, and without a budget
        (``limited``) those of all moving units: the next save is full."""
        back = self._rewinds(goes_back) if not self.on_path else (segment.newest or segment.start) > segment.start
        start = segment.start  # live values move away from there
        self.durable = {key: replace(one, step=min(one.step, start), since=start) for key, one in self.versions.items()}
        self.durable_newest = None if self.newest is None else min(self.newest, start)
        later = {unit for unit, one in self.versions.items() if one.step > start}
        dropped = later if limited else later | {unit.unit for unit in segment.units if unit.moving}
        self.versions = {unit: one for unit, one in self.durable.items() if not (back and unit in dropped)}

    def note_changes(self, changed: frozenset[Unit]) -> None:
        """Mark units whose set of parameters changed, so that earlier versions do not cover them."""
        for unit in changed - self.changed:
            self.changes[unit] = self.changes.get(unit, 0) + 1
        self.changed = changed

    def _rewinds(self, goes_back: bool) -> bool:
        """Return whether a save other than the newest is closest to the effective step.

        Weighted by elements, since the pace of each layer is unknown here."""
        weights = [one for unit, one in self.versions.items() if unit.slot == WEIGHTS]
        if self.newest is None or not weights or not goes_back:
            return False
        newest, numel = self.newest, sum(one.size[1] for one in weights)
        effective = newest - sum((newest - one.step) * one.size[1] for one in weights) / max(1, numel)
        steps = {newest, *(one.step for one in self.versions.values() if one.step <= newest)}
        return min(steps, key=lambda step: (abs(step - effective), step)) < newest
