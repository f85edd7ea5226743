"""Choose what to save before a deadline: the units that remove the most damage per byte, among those that fit.

A save that does not finish leaves nothing. So if not everything is expected to fit, the other units stay as they are in
the previous commit. Pure; the caller supplies time and bandwidth."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from policies.accounting import Fitted
from policies.base import Budget, Choice, Decision, History, Policy, UnitStats, worth_saving
from policies.bounds import incomplete
from policies.budget import scales
from policies.encodings import Option, options
from store.names import RAW, Unit

SAFETY = 0.7  # share of the time left that a save is planned to take, since a save that is late is lost
UNKNOWN = 50e6  # bytes per second over all ranks, assumed until a save was measured: less than current disks write
_NOT_NEEDED = Choice(None, "preempted: its newest version is of this step, or it needs none")
_NO_TIME = Choice(None, "preempted: no time was left for it")
_ALL_FIT = Choice(RAW, "preempted: there is time for everything")


@dataclass
class WriteEstimate:
    """Estimates how long bytes of units take to become durable, from about the last ten saves of this process."""

    _fitted: Fitted = field(default_factory=Fitted)
    _rate: float = UNKNOWN

    def learn(self, nbytes: float, seconds: float) -> None:
        """Record the seconds of a save of ``nbytes`` of units; other bytes that it wrote do not count."""
        self._fitted.learn(nbytes, seconds)
        if nbytes >= 1.0 and seconds > 0.0:
            self._rate = nbytes / seconds

    def affordable(self, seconds: float) -> float:
        """Return the bytes expected to become durable in ``seconds``; above 0 if ``seconds`` is."""
        time = SAFETY * seconds
        fitted = self._fitted.affordable(time) if self._fitted.known else 0.0
        return fitted if fitted > 0.0 else self._rate * time  # equal saves do not determine the cost of a small one


@dataclass(frozen=True)
class Nothing:
    """Saves nothing. Inside bounds it shows what the bounds demand."""

    name: str = "nothing"
    needs_drift: bool = False

    def select(self, stats: Sequence[UnitStats], budget: Budget, history: History) -> Decision:
        return Decision({one.unit: _NOT_NEEDED for one in stats})


@dataclass(frozen=True)
class DeadlinePolicy:
    """Chooses the units of a save before a deadline.

    If all moving units fit raw, they are saved raw. Otherwise each unit gets the coarsest encoding that removes damage,
    in this order: units that a commit cannot lack; units that bounds demand; units that remove the most damage per
    byte. A unit that does not fit is skipped and a smaller one after it may be saved; if none fits, the smallest is
    tried. If no unit has a version yet, all are tried. Units that a save of this step holds are not saved again."""

    bounds: Policy  # :class:`Nothing` inside the job's bounds
    encodings: Mapping[str, str]  # coarsest encoding of each slot

    def fits(self, stats: Sequence[UnitStats], budget_bytes: float, history: History) -> bool:
        """Return whether everything is saved, so that drift need not be measured."""
        return self._takes_all(self._wanted(stats, self._demanded(stats, history)), budget_bytes)

    def select(self, stats: Sequence[UnitStats], budget_bytes: float, history: History) -> Decision:
        """Choose for each unit, such that the save takes about ``budget_bytes``."""
        demanded = self._demanded(stats, history)
        wanted = self._wanted(stats, demanded)
        if self._takes_all(wanted, budget_bytes):
            chosen = {one.unit: _ALL_FIT for one in wanted}
        else:
            chosen = self._in_order(stats, wanted, demanded.saved, budget_bytes)
        # The others are skipped for the health gate's reason, or for lack of time.
        others = {unit: _NO_TIME if choice.saved else choice for unit, choice in demanded.choices.items()}
        return Decision({one.unit: chosen.get(one.unit) or others[one.unit] for one in stats})

    def _demanded(self, stats: Sequence[UnitStats], history: History) -> Decision:
        return self.bounds.select(stats, Budget(), history)

    def _wanted(self, stats: Sequence[UnitStats], demanded: Decision) -> list[UnitStats]:
        worth = worth_saving(stats)
        wanted = [one for one in stats if one.unit in worth or demanded.choices[one.unit].saved]
        return [one for one in wanted if one.staleness != 0 or one.changed_shape]

    def _takes_all(self, wanted: Sequence[UnitStats], budget_bytes: float) -> bool:
        return sum(one.nbytes for one in wanted) <= budget_bytes or all(one.staleness is None for one in wanted)

    def _in_order(
        self, stats: Sequence[UnitStats], wanted: Sequence[UnitStats], demanded: Collection[Unit], budget_bytes: float
    ) -> dict[Unit, Choice]:
        needed = frozenset(incomplete(stats, Decision({one.unit: _NOT_NEEDED for one in stats})))
        scale = scales(stats, {})
        queue = [
            (0 if one.unit in needed else 1 if one.unit in demanded else 2, -worth / option.nbytes, index, one, option)
            for index, one in enumerate(wanted)
            for option, worth in [self._option(one, scale[one.unit.layer][one.unit.slot])]
            if worth > 0.0 or one.unit in needed or one.unit in demanded
        ]
        chosen: dict[Unit, Choice] = {}
        for rank, _, _, one, option in sorted(queue, key=lambda candidate: candidate[:3]):
            if rank == 0 or option.nbytes <= budget_bytes:
                budget_bytes -= option.nbytes
                chosen[one.unit] = Choice(option.encoding, f"preempted: {_WHY[rank]}")
        if not chosen and queue and budget_bytes > 0.0:
            *_, one, option = min(queue, key=lambda candidate: (candidate[4].nbytes, *candidate[:3]))
            chosen[one.unit] = Choice(option.encoding, "preempted: nothing fits, and the smallest may nevertheless")
        return chosen

    def _option(self, one: UnitStats, scale: float) -> tuple[Option, float]:
        """Return the coarsest encoding that removes damage, or else raw; and the damage that it removes."""
        drift = math.inf if one.drift is None or math.isnan(one.drift) else one.drift
        found = options(one, self.encodings.get(one.unit.slot, RAW))
        gains = [(option, scale * (drift * drift - option.error * option.error)) for option in found]
        return next((candidate for candidate in gains if candidate[1] > 0.0), gains[-1])


_WHY = ("it has no version that could stand in for it", "bounds demand it", "most drifted a byte, in the time left")
