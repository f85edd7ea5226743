"""Where a replay stands: the versions that its store would hold, and the save under way.

Pure records and how a run begins with them; :mod:`policies.replay` moves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from policies.recorded import Era
from policies.replayed import Made
from store.names import WEIGHTS, Unit


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

    made: Made
    versions: Mapping[Unit, Version]
    done_at: float
    failed: bool


@dataclass
class State:
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

    def begin(self, era: Era) -> None:
        """With what the recorded run began with."""
        commits = era.moments[0].line.commits
        self.versions, self.commits = adopted(era), commits
        self.newest = max((one.step for one in self.versions.values()), default=era.newest if commits else None)
        self.durable, self.durable_newest = dict(self.versions), self.newest

    def resume(self, era: Era, goes_back: bool) -> None:
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


def adopted(era: Era) -> dict[Unit, Version]:
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
