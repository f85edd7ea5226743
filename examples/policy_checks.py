"""Check that a policy of your own keeps its contract: call :func:`check_policy` in its tests.

The suite runs the policy on seeded synthetic models and runs, equal on every machine, so a finding can be reproduced.
The models include rare states: new, frozen, non-finite, changed and unmeasured units. In a simulated run units drift,
decisions are made, and saves take effect at once. It cannot prove that a promise holds, and it does not detect a policy
that never returns."""

from __future__ import annotations

import copy
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from policies.base import Budget, Choice, Decision, History, Policy, UnitStats, nonfinite_slots, worth_saving
from policies.bounds import Bounded, Bounds, incomplete
from policies.budget import spends
from policies.builtin import Observe
from policies.encodings import expected_bytes, expected_error
from policies.validation import checked_answer, failure_of
from store.encoding import BF16
from store.names import FROZEN, RAW, WEIGHTS, Unit
from store.text import listed

ANY = Bounds(precision="any")  # bounds that allow everything that any policy may do
SLOTS = (WEIGHTS, "exp_avg", "exp_avg_sq")  # slots of AdamW
_UNLIMITED, _LATER = Budget(), History(1000, 10)
_ODD_DRIFTS = (None, 0.0, 0.05, 0.3, math.inf, math.nan)

MODELS = 120  # synthetic models on which promises about single decisions are tried
PATIENCE = 200  # decisions within which a unit that keeps drifting should be saved again
LARGE = 10_000  # units of the large model: more than the largest models have
LIMIT = 5.0  # seconds that a decision on the large model may take
TIMED = "decides on 10 000 units in time"


class BrokenError(Exception):
    """Raised if a policy breaks a promise; the message gives the case and the policy's behaviour."""


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


def check_policy(policy: Policy, bounds: Bounds = ANY) -> None:
    """Try every promise on a policy, as a test of it; on the inner policy of ``observe``.

    Warns of units that starve. Raises BrokenError with all that it breaks."""
    if broken := broken_promises(policy, bounds):
        raise BrokenError("; ".join(f"{promise}: {detail}" for promise, detail in broken.items()))


def broken_promises(policy: Policy, bounds: Bounds = ANY) -> dict[str, str]:
    """Return how the policy, inside ``bounds``, breaks each promise that it does not keep."""
    inner, broken = policy.inner if isinstance(policy, Observe) else policy, {}
    for promise, trial in TRIALS.items():
        try:
            trial(inner, bounds)
        except BrokenError as error:
            broken[promise] = str(error)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the edge to the user's own code, in a simulated run
            broken[promise] = f"in a made-up run it {failure_of(error).located}"
    return broken


def query_policy(
    policy: Policy, case: SyntheticCase, bounds: Bounds = ANY, stats: Sequence[UnitStats] | None = None
) -> Decision:
    """Return the policy's decision, checked. stats: replace the case's own. Raises BrokenError."""
    shown = case.stats if stats is None else stats
    try:
        return checked_answer(policy.name, case.stats, policy.select(shown, case.budget, case.history), bounds.refusal)
    except (Exception, SystemExit) as error:
        raise BrokenError(f"{case}: it {failure_of(error).located}") from error


def require_same(first: Decision, second: Decision, how: str) -> None:
    """Raise BrokenError with the first difference between two decisions on the same units."""
    for unit, choice in first.choices.items():
        other = second.choices[unit]
        if other != choice:
            raise BrokenError(f"{how} it says of {unit}: {_format(choice)}, and then {_format(other)}")


def _format(choice: Choice) -> str:
    return f"{choice.encoding or 'skip'} ({choice.reason[:80]})"


def _models() -> Iterator[SyntheticCase]:
    return map(any_case, range(MODELS))


def _cases() -> list[SyntheticCase]:
    return [*edge_cases(), *_models()]


def _answers(policy: Policy, bounds: Bounds) -> None:
    for case in _models():
        query_policy(policy, case, bounds)


def _edges(policy: Policy, bounds: Bounds) -> None:
    for case in edge_cases():
        query_policy(policy, case, bounds)


def _repeats(policy: Policy, bounds: Bounds) -> None:
    cases = _cases()
    first = [query_policy(policy, case, bounds) for case in cases]
    for case, before in reversed(list(zip(cases, first, strict=True))):
        require_same(before, query_policy(policy, case, bounds), f"{case}: asked again after other calls,")


def _unordered(policy: Policy, bounds: Bounds) -> None:
    for seed, case in enumerate(_models()):
        mixed = random.Random(seed).sample(case.stats, len(case.stats))
        usual, other = query_policy(policy, case, bounds), query_policy(policy, case, bounds, mixed)
        require_same(usual, other, f"{case}: with its units in another order,")


def _leaves_alone(policy: Policy, bounds: Bounds) -> None:
    for case in _models():
        stats = list(case.stats)
        before = copy.deepcopy((stats, case.budget, case.history))
        query_policy(policy, case, bounds, stats)
        if (stats, case.budget, case.history) != before:
            raise BrokenError(f"{case}: what it was given is not the same after the call; work on a copy")


def _needs_drift(policy: Policy, bounds: Bounds) -> None:
    for case in () if policy.needs_drift else _models():
        blind = [replace(one, drift=None) if one.moving else one for one in case.stats]
        seeing, other = query_policy(policy, case, bounds), query_policy(policy, case, bounds, blind)
        require_same(seeing, other, f"{case}: needs_drift is False, and with and without drift")


def _spends(policy: Policy, bounds: Bounds) -> None:
    for case in _models() if spends(policy) else ():
        if case.budget.bytes is not None:
            spent = _optional_bytes(case.stats, case.budget, query_policy(policy, case, bounds))
            if spent > max(0.0, case.budget.bytes):
                at_hand = f"{case.budget.bytes:.0f} are at hand"
                raise BrokenError(f"{case}: it chooses {spent:.0f} bytes that nobody demands, and {at_hand}")


def _optional_bytes(stats: Sequence[UnitStats], budget: Budget, decision: Decision) -> float:
    worth = worth_saving(stats)
    return sum(
        expected_bytes(one, encoding)
        for one in stats
        if one.unit in worth and one.unit not in budget.demanded and one.staleness is not None
        if (encoding := decision.choices[one.unit].encoding) is not None
    )


def _first_save(policy: Policy, bounds: Bounds) -> None:
    bounded = Bounded(policy, bounds)
    for case in _models():
        sick = nonfinite_slots(case.stats)
        for unit in incomplete(case.stats, query_policy(bounded, case, bounds)):
            if unit.layer not in sick:
                raise BrokenError(f"{case}: {unit} is left without a version")


def _bounds(policy: Policy, bounds: Bounds) -> None:
    limits = Bounds(max_staleness=40, max_drift=0.3, precision=bounds.precision, interval=10)
    run = SimulatedRun(Bounded(policy, limits), 10, spends(policy), sick=range(300, 360))
    for _ in range(100):
        run.decide()
        for one in run.units.values():
            stale = one.moving and (one.staleness or 0) > 40 - 10
            if not run.is_sick(one) and (stale or (one.drift or 0.0) > 0.3):
                raise BrokenError(f"step {run.step} of a made-up run: {one.unit} is {one.staleness} steps old")


def _starves(policy: Policy, bounds: Bounds) -> None:
    run = SimulatedRun(Bounded(policy, bounds), bounds.interval or 10, spends(policy))
    run.decide()
    gaps = longest = {unit: 0 for unit, one in run.units.items() if one.moving}
    for _ in range(3 * PATIENCE):
        saved = set(run.decide().saved)
        gaps = {unit: 0 if unit in saved else gap + 1 for unit, gap in gaps.items()}
        longest = {unit: max(longest[unit], gap) for unit, gap in gaps.items()}
    starved = sorted(unit for unit, gap in longest.items() if gap >= PATIENCE)
    if starved:
        text = f"policy {policy.name} starves {listed(starved, 1)}: not saved in {PATIENCE} decisions"
        warnings.warn(f"{text}; set bounds.max_staleness", stacklevel=2)


def _in_time(policy: Policy, bounds: Bounds) -> None:
    case = SyntheticCase("a large model", usual_units(1 + LARGE // 3)[:LARGE], Budget(1e9), History(1000, 10))
    began = time.perf_counter() - starved_seconds()
    query_policy(policy, case, bounds)
    took = time.perf_counter() - starved_seconds() - began
    if took > LIMIT:
        raise BrokenError(f"{case}: it took {took:.1f} s, during which training waits; {LIMIT:.0f} s at most")


def starved_seconds() -> float:
    """Return how long this thread has waited for a processor since it began; 0.0 where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


TRIALS: dict[str, Callable[[Policy, Bounds], None]] = {
    "one choice a unit, with a reason": _answers,
    "takes whatever it is shown": _edges,
    "same answer when asked again": _repeats,
    "order of units does not matter": _unordered,
    "leaves its arguments alone": _leaves_alone,
    "says whether it needs drift": _needs_drift,
    "keeps to the bytes at hand": _spends,
    "first save is full": _first_save,
    "bounds hold": _bounds,
    "no layer starves": _starves,
    TIMED: _in_time,
}
"""Every promise that one process can try, in the order reported."""


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
        with_version(
            UnitStats(Unit(f"layer.{at}", slot), at, 0 < at < layers - 1, 4 * numel, None, None), chance, numel
        )
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


def with_version(one: UnitStats, chance: random.Random, numel: int) -> UnitStats:
    """Return the unit with a version of random age and drift."""
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
    made = with_version(made, chance, numel)
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
