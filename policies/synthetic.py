"""Generate synthetic unit statistics, and simulate runs without training, to try out policies.

Seeded: equal on every machine and in every process. The cases include rare states: new, frozen, non-finite, changed and
unmeasured units. In a simulated run units drift, decisions are made, and saves take effect at once."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from policies.base import Budget, Decision, History, Policy, UnitStats
from policies.bounds import incomplete
from policies.encodings import expected_bytes, expected_error
from store.encoding import BF16
from store.names import FROZEN, RAW, WEIGHTS, Unit

SLOTS = (WEIGHTS, "exp_avg", "exp_avg_sq")  # slots of AdamW
_UNLIMITED, _LATER = Budget(), History(1000, 10)
_ODD_DRIFTS = (None, 0.0, 0.05, 0.3, math.inf, math.nan)


@dataclass(frozen=True)
class SyntheticCase:
    """The arguments of one decision. title: its special property."""

    title: str
    stats: tuple[UnitStats, ...]
    budget: Budget = _UNLIMITED
    history: History = _LATER

    def __str__(self) -> str:
        size = f"{len(self.stats)} {'unit' if len(self.stats) == 1 else 'units'}"
        return f"{self.title} ({size}, step {self.history.step}, {self.history.commits} commits)"


def any_case(seed: int) -> SyntheticCase:
    """Generate a model in a random state, with a random budget."""
    chance = random.Random(f"case {seed}")
    stats = tuple(
        _any_unit(chance, position, slot)
        for position in range(chance.randint(0, 1 + seed // 20))
        for slot in tuple(slot for slot in (*SLOTS, FROZEN) if chance.random() < 0.7) or (WEIGHTS,)
    )
    demanded = {one.unit for one in stats if one.changed_shape or chance.random() < 0.2}
    total = sum(one.nbytes for one in stats)
    available = chance.choice([None, None, -100.0, 0.0, chance.random() * total])
    commits = chance.randint(0, 40)
    history = History(60 + 10 * commits + chance.randint(0, 9), commits)
    return SyntheticCase(f"made-up model {seed}", stats, Budget(available, frozenset(demanded)), history)


def edge_cases() -> Iterator[SyntheticCase]:
    """Generate the extreme states."""
    usual = usual_units(5)
    yield SyntheticCase("no units", ())
    yield SyntheticCase("first save", unversioned(usual), history=History(10, 0))
    yield SyntheticCase("drift not measured", tuple(replace(one, drift=None) for one in usual))
    yield SyntheticCase("no drift", tuple(replace(one, drift=0.0) for one in usual))
    yield SyntheticCase("drift not a number", tuple(replace(one, drift=math.nan) for one in usual))
    yield SyntheticCase("infinite drift", tuple(replace(one, drift=math.inf) for one in usual))
    weights = [one for one in usual if one.unit.slot == WEIGHTS]
    frozen = (replace(one, unit=Unit(one.unit.layer, FROZEN), moving=False, drift=0.0) for one in weights)
    yield SyntheticCase("everything frozen", tuple(frozen))
    yield SyntheticCase("nothing finite", tuple(replace(one, finite=False, drift=None) for one in usual))
    yield SyntheticCase("one unit", usual[:1])
    yield SyntheticCase("units without bytes", tuple(replace(one, nbytes=0, numel=0, stored_bytes=0) for one in usual))
    yield SyntheticCase("saved a moment ago", tuple(replace(one, staleness=0, drift=0.0) for one in usual))
    yield SyntheticCase("bytes not paid for yet", usual, Budget(-1.0))
    yield SyntheticCase("slots that nobody expects", tuple(_renamed(one) for one in usual))


def usual_units(layers: int, seed: int = 0) -> tuple[UnitStats, ...]:
    """Generate an ordinary AdamW model in mid-run: every unit has a version, and drift grows with its age."""
    chance = random.Random(f"usual {seed}")
    return tuple(
        _versioned(UnitStats(Unit(f"layer.{at}", slot), at, 0 < at < layers - 1, 4 * numel, None, None), chance, numel)
        for at in range(layers)
        for numel in [chance.randint(1, 1 << 16)]
        for slot in SLOTS
    )


def unversioned(stats: Sequence[UnitStats]) -> tuple[UnitStats, ...]:
    """Return the units as before their first save."""
    return tuple(
        replace(one, drift=None, staleness=None, encoding=None, stored_bytes=0, error=0.0, changed_shape=False)
        for one in stats
    )


def versioned(stats: Sequence[UnitStats], measured: bool) -> tuple[UnitStats, ...]:
    """Return the units as in mid-run. measured: whether the drift of moving units is known."""
    chance = random.Random("mid-run")
    made = [_versioned(one, chance, one.numel or one.nbytes // 4) for one in stats]
    return tuple(one if measured or not one.moving else replace(one, drift=None) for one in made)


def _versioned(one: UnitStats, chance: random.Random, numel: int) -> UnitStats:
    age = chance.randint(1, 60)
    drift = age * 10 ** chance.uniform(-5, -2) if one.moving else 0.0
    made = replace(one, drift=drift, staleness=age, error=0.0, changed_shape=False)
    return replace(made, encoding=RAW, stored_bytes=one.nbytes, numel=numel)


def _any_unit(chance: random.Random, position: int, slot: str) -> UnitStats:
    numel = chance.choice([0, 1, chance.randint(1, 4096)])
    unit = Unit(f"layer.{position}", slot)
    made = UnitStats(unit, position, chance.random() < 0.7, 4 * numel, None, None, moving=slot != FROZEN, numel=numel)
    if chance.random() < 0.15:
        return replace(made, finite=chance.random() < 0.9)
    made = _versioned(made, chance, numel)
    if chance.random() < 0.2 and made.moving:
        made = replace(made, encoding=BF16, stored_bytes=2 * numel, error=expected_error(made, BF16))
    if chance.random() < 0.2:
        made = replace(made, drift=chance.choice(_ODD_DRIFTS))
    return replace(made, finite=chance.random() < 0.9, changed_shape=chance.random() < 0.1)


def _renamed(one: UnitStats) -> UnitStats:
    slot = "momentum_buffer" if one.unit.slot == SLOTS[1] else one.unit.slot
    return replace(one, unit=Unit(f"net.{one.unit.layer}", slot))


_BUDGET_SHARE = 0.15  # share of a full save that the budget gains per decision, if the policy spends


@dataclass
class SimulatedRun:
    """AdamW on 7 layers, one of them frozen. Weights drift 0.0003 to 0.01 per step, moments ten times as fast.

    spends: bytes are limited. sick: steps at which layer 2 has NaN."""

    policy: Policy
    interval: int
    spends: bool = False
    sick: range = range(0)
    seed: int = 0
    step: int = 0
    commits: int = 0
    units: dict[Unit, UnitStats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._chance = random.Random(f"run {self.seed}")
        for one in unversioned(usual_units(7)):
            if one.position == 1 and one.unit.slot == WEIGHTS:
                unit = Unit(one.unit.layer, FROZEN)
                self.units[unit] = replace(one, unit=unit, moving=False)
            elif one.position != 1:
                self.units[one.unit] = one
        self._rates = {
            unit: (1 if unit.slot == WEIGHTS else 10) * 10 ** self._chance.uniform(-3.5, -2)
            for unit in self.units
            if unit.slot in SLOTS
        }
        self._available = 0.0

    @property
    def full(self) -> int:
        """Bytes of a full save, raw."""
        return sum(one.nbytes for one in self.units.values())

    def decide(self) -> Decision:
        """Train ``interval`` steps, ask the policy, and commit what it saves."""
        for unit, one in self.units.items():
            self.units[unit] = self._trained(one)
        self.step += self.interval
        shown = tuple(self._shown(one) for one in self.units.values())
        self._available = min(self._available + _BUDGET_SHARE * self.full, float(self.full))
        budget = Budget(self._available) if self.spends else Budget()
        decision = self.policy.select(shown, budget, History(self.step, self.commits))
        if decision.saved and not incomplete(shown, decision):
            self._commit(decision)
        return decision

    def is_sick(self, one: UnitStats) -> bool:
        """Return whether the unit's layer has NaN now."""
        return one.position == 2 and self.step in self.sick

    def _trained(self, one: UnitStats) -> UnitStats:
        if one.staleness is None:
            return one
        moved = sum(self._chance.random() for _ in range(self.interval)) * 2 * self._rates.get(one.unit, 0.0)
        return replace(one, staleness=one.staleness + self.interval, drift=(one.drift or 0.0) + moved)

    def _shown(self, one: UnitStats) -> UnitStats:
        if self.is_sick(one):
            return replace(one, finite=False, drift=None)
        return one if self.policy.needs_drift or not one.moving else replace(one, drift=None)

    def _commit(self, decision: Decision) -> None:
        first = self.commits == 0
        self.commits += 1
        for unit in decision.saved:
            one, encoding = self.units[unit], decision.choices[unit].encoding or ""
            cost, error = expected_bytes(one, encoding), expected_error(one, encoding)
            self._available -= 0 if first else cost
            self.units[unit] = replace(
                one, staleness=0, drift=error, error=error, encoding=encoding, stored_bytes=int(cost)
            )
