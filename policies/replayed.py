"""What is replayed and what comes of it: plans, decisions, whole replays. Records; see :mod:`policies.replay`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from policies.account import Account
from policies.base import Policy, UnitStats
from policies.course import Course, Position
from policies.exposure import Exposure
from policies.failure import Failure
from policies.recorded import Costs
from store.names import Unit


@dataclass(frozen=True)
class Plan:
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
class Made:
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
class Replayed:
    """A whole replay. committed: saves that became durable. as_recorded: every decision came out as recorded.
    failures: of the policy, at so many decisions.

    since: from where on a failure is looked at; None: from the first commit."""

    plan: Plan
    made: tuple[Made, ...]
    committed: tuple[Made, ...]
    course: Course = field(compare=False)
    as_recorded: bool
    failures: tuple[Failure, ...] = ()
    since: Position | None = None

    @cached_property
    def exposure(self) -> Exposure:
        """What a failure finds, from ``since`` on."""
        return self.course.exposure(self.since)

    def seen_from(self, since: Position | None) -> Replayed:
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
