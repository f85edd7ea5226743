"""Compute the expected cost of a failure, from the state that the store holds at each step of a run.

A failure is independent of saves, so the average over all steps is the expectation. Damage is defined in
docs/budget.md. Configurations are compared from the step on at which all of them have a commit. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from policies.budget import LAG
from policies.replay.movement import Movement, Vector
from store.names import BUFFER, FROZEN, WEIGHTS, Unit
from store.trace import TracedUnit


@dataclass
class Spread:
    """Step-weighted mean and maximum."""

    total: float = 0.0
    weight: float = 0.0
    worst: float = 0.0

    def add(self, mean: float, worst: float, weight: float) -> None:
        """Add a mean and a maximum over ``weight`` steps."""
        self.total += mean * weight
        self.weight += weight
        self.worst = max(self.worst, worst)

    @property
    def mean(self) -> float:
        """The mean; 0 if nothing was added."""
        return self.total / self.weight if self.weight else 0.0


@dataclass
class Exposure:
    """State of the store at a failure, averaged over a run. ``rewound``: steps since the effective step."""

    damage: dict[str, Spread] = field(default_factory=dict)  # by slot, summed over layers
    total: Spread = field(default_factory=Spread)  # damage over all slots
    drift: dict[str, Spread] = field(default_factory=dict)  # by slot, of single units
    staleness: Spread = field(default_factory=Spread)
    lost: Spread = field(default_factory=Spread)  # steps since the newest commit
    rewound: Spread = field(default_factory=Spread)  # ``lost`` plus the weights' staleness, weighted by pace and size
    unprotected: float = 0.0  # steps without any commit
    unknown: int = 0  # units in intervals whose movement is unknown; they are left out
    left_out: dict[Unit, None] = field(default_factory=dict)  # these units


@dataclass(frozen=True)
class Held:
    """Versions in the store between two steps, by unit."""

    steps: Vector
    since: Vector  # steps from which live values moved away from the versions
    errors: Vector
    newest: float  # step of the newest commit


class Exposed:
    """Adds the exposure of one segment to ``sums``. Only moving units count: weights and optimizer slots."""

    def __init__(self, units: Sequence[TracedUnit], movement: Movement, sums: Exposure) -> None:
        self._movement, self._sums = movement, sums
        self._units = [unit.unit for unit in units]
        self._counted = np.array([unit.moving and unit.slot not in (BUFFER, FROZEN) for unit in units], dtype=bool)
        slots = np.array([unit.slot for unit in units], dtype=object)
        self._slots = {slot: self._counted & (slots == slot) for slot in sorted(set(slots[self._counted]))}
        layers, self._layer = np.unique([unit.layer for unit in units], return_inverse=True)
        self._layers = len(layers)
        self._weights = self._slots.get(WEIGHTS, np.zeros(len(units), dtype=bool))
        self._numel = np.array([max(1, unit.numel or unit.nbytes // 4) for unit in units], dtype=np.float64)

    def between(self, begin: float, end: float, held: Held) -> None:
        """Add the steps from ``begin`` to ``end``, in which the store has ``held``."""
        if end <= begin:
            return
        steps, middle = end - begin, (begin + end) / 2
        first, inner, last = (self._movement.distance(step, held.since) ** 2 for step in (begin, middle, end))
        mean = _mean(first, inner, last, begin - held.since, end - held.since)
        error_sq, worst = held.errors**2, np.maximum(first, last)
        scale, pace_sq = self._scales(end)
        self._add(scale, mean + error_sq, worst + error_sq, steps)
        ages = middle - held.steps[self._counted]
        if ages.size:
            self._sums.staleness.add(float(ages.mean()), float(ages.max() + steps / 2), steps)
        self._sums.lost.add(middle - held.newest, end - held.newest, steps)
        behind = self._behind(held, pace_sq)
        self._sums.rewound.add(middle - held.newest + behind, end - held.newest + behind, steps)

    def _scales(self, step: float) -> tuple[Vector, Vector]:
        """Return the damage of a squared drift of 1, by unit, and the squared pace of each unit's layer."""
        by_unit, paces = self._movement.pace_squared(step), np.full(self._layers, np.nan)
        paces[self._layer[self._weights]] = by_unit[self._weights]
        known = np.isfinite(paces) & (paces > 0)
        usual = float(paces[known].mean()) if known.any() else 1.0
        paces = np.where(known, paces, usual)[self._layer]
        return np.where(self._weights, 1.0, LAG * LAG * paces), paces

    def _add(self, scale: Vector, mean: Vector, worst: Vector, steps: float) -> None:
        known = self._counted & np.isfinite(mean)
        left_out = np.flatnonzero(self._counted & ~known)
        self._sums.unknown += left_out.size
        self._sums.left_out |= dict.fromkeys(self._units[at] for at in left_out)
        totals = [0.0, 0.0]
        for slot, chosen in self._slots.items():
            among = chosen & known
            if not among.any():
                continue
            costs = float((scale * mean)[among].sum()), float((scale * worst)[among].sum())
            totals = [totals[0] + costs[0], totals[1] + costs[1]]
            self._sums.damage.setdefault(slot, Spread()).add(*costs, steps)
            drift, largest = np.sqrt(mean[among]), float(np.sqrt(worst[among]).max())
            self._sums.drift.setdefault(slot, Spread()).add(float(drift.mean()), largest, steps)
        self._sums.total.add(totals[0], totals[1], steps)

    def _behind(self, held: Held, pace_sq: Vector) -> float:
        """Return the steps by which the effective step is behind the newest commit."""
        chosen = self._weights & self._counted
        if not chosen.any():
            return 0.0
        weight = self._numel[chosen] * np.sqrt(pace_sq[chosen])
        if not weight.sum() > 0:
            weight = self._numel[chosen]
        return float((weight * (held.newest - held.steps[chosen])).sum() / weight.sum())


def _mean(first: Vector, middle: Vector, last: Vector, young: npt.ArrayLike, old: npt.ArrayLike) -> Vector:
    """Return the mean of a function that grows like a power of age from ``young`` to ``old``; exact for any power."""
    young, old = np.maximum(np.asarray(young, dtype=np.float64), 0.0), np.asarray(old, dtype=np.float64)
    with np.errstate(all="ignore"):
        new = young <= 0.0
        power = np.where(new, np.log2(last / middle), np.log(last / first) / np.log(old / young))
        exact = (old * last - young * first) / ((power + 1.0) * (old - young))
        usual = (first + 4.0 * middle + last) / 6.0
        fits = np.isfinite(exact) & np.isfinite(power) & (power > -0.5) & (power < 4.0)
        return np.where(fits, exact, usual)


def goodput(*, stall_share: float, lost_seconds: float, restart_seconds: float, mtbf_seconds: float) -> float:
    """Return the share of wall time not spent waiting for saves, repeating lost steps, or restarting.

    With one failure per ``mtbf_seconds``: (1 - stall) * (mtbf - lost) / (mtbf + restart), at least 0. The terms are
    those of Young (1974) and Daly (2006), with the lost time taken from the replay."""
    return max(0.0, 1.0 - stall_share) * (max(0.0, mtbf_seconds - lost_seconds) / (mtbf_seconds + restart_seconds))


Position = tuple[int, float]  # (segment, step): steps alone are ambiguous, since they go back at a resume


@dataclass(frozen=True)
class TimelineInterval:
    """The store's state from step ``begin`` to ``end`` of a segment; ``held`` is None without a commit."""

    segment: int
    begin: float
    end: float
    held: Held | None


@dataclass(frozen=True)
class StoreTimeline:
    """The store's state over a replay: units and movement of each segment, and its intervals, in order and gapless."""

    segments: Sequence[tuple[Sequence[TracedUnit], Movement]]
    intervals: Sequence[TimelineInterval]

    @property
    def first(self) -> Position | None:
        """Position of the first commit. None: there is none."""
        return next(((one.segment, one.begin) for one in self.intervals if one.held is not None), None)

    @property
    def end(self) -> Position:
        """Position of the last recorded decision."""
        return (self.intervals[-1].segment, self.intervals[-1].end) if self.intervals else (0, 0.0)

    def steps(self, since: Position | None = None) -> float:
        """Return the steps of training from ``since`` on; None: all steps."""
        return sum(one.end - one.begin for one in self._after(since))

    def exposure(self, since: Position | None = None) -> Exposure:
        """Return the exposure from ``since`` on. Steps without a commit are counted over the whole replay."""
        sums = Exposure()
        by_segment: dict[int, Exposed] = {}
        for one in self._after(since):
            if one.held is None:
                continue
            if one.segment not in by_segment:
                by_segment[one.segment] = Exposed(*self.segments[one.segment], sums)
            by_segment[one.segment].between(one.begin, one.end, one.held)
        sums.unprotected = sum(one.end - one.begin for one in self.intervals if one.held is None)
        return sums

    def _after(self, since: Position | None) -> Iterable[TimelineInterval]:
        for one in self.intervals:
            begin = one.begin if since is None or one.segment > since[0] else max(one.begin, since[1])
            if (since is None or one.segment >= since[0]) and begin < one.end:
                yield TimelineInterval(one.segment, begin, one.end, one.held)


def latest_first(timelines: Iterable[StoreTimeline]) -> Position | None:
    """Return the position from which all timelines that ever commit have a commit. None: there is none."""
    return max((one.first for one in timelines if one.first is not None), default=None)
