"""The last save before a job is ended from outside: what does most good among what can still become durable. Pure.

All or nothing is the wrong bet against a deadline: a save that is not finished leaves nothing at all. So where not all
is expected to fit, the units that take most damage away a byte are saved, and the others stay as they are in the commit
before. It knows no clock: seconds and what bytes take come from the caller.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from policies.accounting import Fitted
from policies.base import Budget, Choice, Decision, History, Policy, UnitStats, worth_saving
from policies.bounds import incomplete
from policies.budget import scales
from policies.encodings import Option, options
from store.names import RAW, Unit

SAFETY = 0.7
"""Share of the time left that a save is planned to take: nothing is gained where it comes too late by a little."""

UNKNOWN = 50e6
"""Bytes a second, over all ranks, as long as no save has shown any: less than a disk of today writes."""

_THERE = Choice(None, "preempted: its newest version is of this step, or it needs none")
_WHOLE = Choice(RAW, "preempted: there is time for everything")


@dataclass
class WriteEstimate:
    """How long bytes of units took to become durable, of the saves of this process: about the last ten."""

    _fitted: Fitted = field(default_factory=Fitted)
    _rate: float = UNKNOWN

    def learn(self, nbytes: float, seconds: float) -> None:
        """A save of so many bytes of units took so long, whatever it wrote besides."""
        self._fitted.learn(nbytes, seconds)
        if nbytes >= 1.0 and seconds > 0.0:
            self._rate = nbytes / seconds

    def affordable(self, seconds: float) -> float:
        """Bytes that are expected to become durable in so many seconds; above 0 as long as there are any."""
        time = SAFETY * seconds
        line = self._fitted.affordable(time) if self._fitted.known else 0.0
        return line if line > 0.0 else self._rate * time  # saves of one kind say little of what a small one takes


@dataclass(frozen=True)
class Nothing:
    """A policy that saves nothing of its own. Inside bounds it shows what they demand."""

    name: str = "nothing"
    needs_drift: bool = False

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        """Nothing is saved."""
        del budget, history
        return Decision({one.unit: _THERE for one in stats})


@dataclass(frozen=True)
class DeadlinePolicy:
    """Chooses what is saved. bounds: :class:`Nothing` inside the job's bounds. encodings: of slots, the coarsest.

    All that moves, raw, where that fits into the bytes. Else each unit in the coarsest encoding that takes damage away,
    in this order: what no commit can do without; what bounds demand; what takes most damage away a byte. A unit
    that does not fit is left out, and a smaller one behind it may be saved; where none fits the smallest is tried: time
    is of no other use. Where nothing has a version yet nothing can be left out: all is tried. What a save of this
    very step holds already is not saved again."""

    bounds: Policy
    encodings: Mapping[str, str]

    def fits(self, stats: Sequence[UnitStats], purse: float, history: History) -> bool:
        """Whether everything is saved, so that drift need not be known."""
        wanted = self._wanted(stats, self._demanded(stats, history))
        return self._takes_all(wanted, purse)

    def select(self, stats: Sequence[UnitStats], purse: float, history: History) -> Decision:
        """One choice for each unit, for about ``purse`` bytes."""
        demanded = self._demanded(stats, history)
        wanted = self._wanted(stats, demanded)
        if self._takes_all(wanted, purse):
            chosen = {one.unit: _WHOLE for one in wanted}
        else:
            needed = frozenset(incomplete(stats, Decision({one.unit: _THERE for one in stats})))
            chosen = self._in_order(stats, wanted, needed, demanded.saved, purse)
        return Decision({one.unit: chosen.get(one.unit) or _left(demanded.choices[one.unit]) for one in stats})

    def _demanded(self, stats: Sequence[UnitStats], history: History) -> Decision:
        return self.bounds.select(stats, Budget(), history)

    def _wanted(self, stats: Sequence[UnitStats], demanded: Decision) -> list[UnitStats]:
        worth = worth_saving(stats)
        wanted = [one for one in stats if one.unit in worth or demanded.choices[one.unit].saved]
        return [one for one in wanted if one.staleness != 0 or one.changed_shape]

    def _takes_all(self, wanted: Sequence[UnitStats], purse: float) -> bool:
        return sum(one.nbytes for one in wanted) <= purse or all(one.staleness is None for one in wanted)

    def _in_order(
        self,
        stats: Sequence[UnitStats],
        wanted: Sequence[UnitStats],
        needed: Collection[Unit],
        demanded: Collection[Unit],
        purse: float,
    ) -> dict[Unit, Choice]:
        scale = scales(stats, {})
        bids = [
            (_rank(one.unit, needed, demanded), -worth / way.nbytes, place, one, way)
            for place, one in enumerate(wanted)
            for way, worth in [self._way(one, scale[one.unit.layer][one.unit.slot])]
            if worth > 0.0 or one.unit in needed or one.unit in demanded
        ]
        chosen: dict[Unit, Choice] = {}
        for rank, _, _, one, way in sorted(bids, key=lambda bid: bid[:3]):
            if rank == 0 or way.nbytes <= purse:
                purse -= way.nbytes
                chosen[one.unit] = Choice(way.encoding, f"preempted: {_WHY[rank]}")
        if not chosen and bids and purse > 0.0:
            *_, one, way = min(bids, key=lambda bid: (bid[4].nbytes, *bid[:3]))
            chosen[one.unit] = Choice(way.encoding, "preempted: nothing fits, and the smallest may nevertheless")
        return chosen

    def _way(self, one: UnitStats, scale: float) -> tuple[Option, float]:
        """The coarsest encoding that takes damage away, and how much; else raw."""
        drift = math.inf if one.drift is None or math.isnan(one.drift) else one.drift
        found = [
            (way, scale * (drift * drift - way.error * way.error))
            for way in options(one, self.encodings.get(one.unit.slot, RAW))
        ]
        return next((bid for bid in found if bid[1] > 0.0), found[-1])


_WHY = ("it has no version that could stand in for it", "bounds demand it", "most drifted a byte, in the time left")


def _rank(unit: Unit, needed: Collection[Unit], demanded: Collection[Unit]) -> int:
    return 0 if unit in needed else 1 if unit in demanded else 2


def _left(demanded: Choice) -> Choice:
    """Why a unit is not saved: for the reason that the gate has, or for want of time."""
    return Choice(None, "preempted: no time was left for it") if demanded.saved else demanded
