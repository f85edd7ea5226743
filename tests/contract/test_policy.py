"""What every policy promises, run on every policy that settings can name, bare and inside bounds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.policy_checks import TIMED, broken_promises
from policies.base import Budget, Decision, History, Policy, UnitStats
from policies.bounds import Bounded, Bounds, bound, incomplete
from policies.builtin import Observe
from policies.registry import POLICIES, policy_from
from store.names import FROZEN, RAW, WEIGHTS, Unit
from tests.support.slow import others_slow

SLOTS = (WEIGHTS, "exp_avg", "exp_avg_sq")

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "full": {"name": "full"},
    "parity of 2": {"name": "parity"},
    "parity of 5": {"name": "parity", "k": 5},
    "parity of more groups than layers": {"name": "parity", "k": 97},
    "filter": {"name": "filter", "n": 2, "m": 5},
    "filter without ends": {"name": "filter", "n": 0, "m": 4},
    "filter with auxiliary layers at intervals": {"name": "filter", "n": 1, "m": 3, "auxiliary": "interval"},
    "threshold": {"name": "threshold", "threshold": 0.05, "slots": {"exp_avg": 0.4}},
    "threshold that nothing reaches": {"name": "threshold", "threshold": 1e9},
    "budget": {"name": "budget"},
    "budget with lags": {"name": "budget", "lags": {"exp_avg": 40, "exp_avg_sq": 0.1}},
    "auto": {"name": "auto"},
    "auto with lags": {"name": "auto", "lags": {"exp_avg": 40, "exp_avg_sq": 0.1}},
    "observe budget": {"name": "observe", "inner": {"name": "budget"}},
    "observe": {"name": "observe", "inner": {"name": "threshold", "threshold": 0.05}},
    "observe full": {"name": "observe"},
}
OBSERVING = sorted(name for name, chosen in SETTINGS.items() if chosen["name"] == "observe")
NAMED = {"full", "parity of 2", "filter", "threshold", "budget", "auto", "observe"}
"""One of each policy. The others are tried by ``make test-all``."""

BY_NAME = others_slow(sorted(SETTINGS, key=lambda name: (name not in NAMED, name)), fast=len(NAMED))
WRITING = [one for one in BY_NAME if one.values[0] not in OBSERVING]
BLIND = sorted(name for name, chosen in SETTINGS.items() if not policy_from(chosen).needs_drift)


def test_every_policy_that_settings_can_name_is_under_contract() -> None:
    assert {chosen["name"] for chosen in SETTINGS.values()} == set(POLICIES)


@pytest.fixture(scope="module", params=BY_NAME)
def bare(request: pytest.FixtureRequest) -> Policy:
    return policy_from(SETTINGS[request.param])


@pytest.mark.filterwarnings("ignore:policy .* starves")
def test_every_policy_passes_the_suite_that_users_run(bare: Policy) -> None:
    assert broken_promises(bare).keys() <= {TIMED}


@pytest.fixture(scope="module", params=["bare", "bounded"])
def policy(request: pytest.FixtureRequest, bare: Policy) -> Policy:
    if request.param == "bare":
        return bare
    return bound(bare, Bounds(max_staleness=40, max_drift=0.3, interval=10))


@st.composite
def models(draw: st.DrawFn) -> list[UnitStats]:
    """The statistics of a model in any state: new, frozen, broken or changed units among ordinary ones."""
    drifts = st.none() | st.floats(0, 2) | st.sampled_from([0.0, 0.05, 0.3, math.inf, math.nan])
    stats = []
    for position in range(draw(st.integers(0, 7))):
        block = draw(st.booleans())
        for slot in draw(st.sets(st.sampled_from([*SLOTS, FROZEN]), min_size=1)):
            stats.append(
                UnitStats(
                    unit=Unit(f"layer.{position}", slot),
                    position=position,
                    block=block,
                    nbytes=draw(st.integers(0, 1000)),
                    drift=draw(drifts),
                    staleness=draw(st.none() | st.integers(-3, 60)),
                    finite=draw(st.integers(0, 9)) > 0,
                    moving=slot != FROZEN,
                    changed_shape=draw(st.integers(0, 9)) == 0,
                )
            )
    return stats


some = settings(max_examples=30, deadline=None)
few = settings(max_examples=15, deadline=None)
histories = st.builds(History, step=st.integers(60, 10_000), commits=st.integers(0, 300))


@some
@given(stats=models(), history=histories)
def test_every_unit_has_one_choice_with_a_reason_in_the_order_shown(
    policy: Policy, stats: list[UnitStats], history: History
) -> None:
    decision = policy.select(stats, Budget(), history)
    assert list(decision.choices) == [one.unit for one in stats]
    assert all(choice.reason for choice in decision.choices.values())
    assert {choice.encoding for choice in decision.choices.values()} <= {None, RAW}


@some
@given(stats=models(), history=histories, other=models(), earlier=histories)
def test_a_decision_depends_on_nothing_but_its_arguments(
    policy: Policy, stats: list[UnitStats], history: History, other: list[UnitStats], earlier: History
) -> None:
    first = policy.select(stats, Budget(), history)
    policy.select(other, Budget(), earlier)
    assert policy.select(tuple(stats), Budget(), history) == first
    assert replace(policy).select(stats, Budget(), history) == first  # type: ignore[type-var]


@some
@given(stats=models(), history=histories, shuffle=st.randoms(use_true_random=False))
def test_the_order_of_units_does_not_matter(
    policy: Policy, stats: list[UnitStats], history: History, shuffle: random.Random
) -> None:
    mixed = shuffle.sample(stats, len(stats))
    assert policy.select(mixed, Budget(), history) == policy.select(stats, Budget(), history)


@pytest.mark.parametrize("name", BLIND)
@some
@given(stats=models(), history=histories)
def test_a_policy_that_needs_no_drift_decides_the_same_without_it(
    name: str, stats: list[UnitStats], history: History
) -> None:
    policy = bound(policy_from(SETTINGS[name]), Bounds(max_staleness=40, interval=10))
    assert not policy.needs_drift
    blind = [replace(one, drift=None) if one.moving else one for one in stats]
    assert policy.select(blind, Budget(), history) == policy.select(stats, Budget(), history)


@some
@given(stats=models(), history=histories)
def test_drift_is_declared_where_it_counts(policy: Policy, stats: list[UnitStats], history: History) -> None:
    near = [replace(one, drift=0.0, finite=True, moving=True, changed_shape=False, staleness=0) for one in stats]
    far = [replace(one, drift=1e12) for one in near]
    same = policy.select(near, Budget(), history) == policy.select(far, Budget(), history)
    assert policy.needs_drift or same
    assert not policy.needs_drift or not same or not stats


@some
@given(stats=models(), history=histories)
def test_the_gate_and_the_first_save_hold_in_any_state(bare: Policy, stats: list[UnitStats], history: History) -> None:
    policy = bound(bare, Bounds(max_staleness=40, max_drift=0.3, interval=10))
    decision = policy.inner.select(stats, Budget(), history) if isinstance(policy, Observe) else None
    decision = decision or policy.select(stats, Budget(), history)
    sick = {one.unit.layer for one in stats if not one.finite}
    for one in stats:
        saved = decision.choices[one.unit].saved
        if one.unit.layer in sick:
            assert not saved
        elif one.staleness is None or one.changed_shape:
            assert saved
    lacking = {one.unit for one in stats if one.staleness is None or one.changed_shape}
    assert set(incomplete(stats, decision)) == {unit for unit in lacking if unit.layer in sick}


@pytest.mark.parametrize("name", OBSERVING)
@some
@given(stats=models(), history=histories)
def test_observe_writes_nothing_and_tells_what_would_be_written(
    name: str, stats: list[UnitStats], history: History
) -> None:
    policy = bound(policy_from(SETTINGS[name]), Bounds(max_staleness=40, max_drift=0.3, interval=10))
    assert isinstance(policy, Observe)
    decision = policy.select(stats, Budget(), history)
    would = policy.inner.select(stats, Budget(), history)
    assert decision.saved == ()
    for unit, choice in would.choices.items():
        act = "would save it" if choice.saved else "would skip it"
        assert decision.choices[unit].reason == f"observe: {policy.inner.name} {act} ({choice.reason})"


# Simulated runs: what holds at one decision has to add up to what holds over a run.


@dataclass
class Run:
    """A training run without training: units drift at random rates, layers break for a while, saves fail.

    fails: chance that a save fails. breaks: chance, at any step, that a layer turns non-finite for a while.
    empty_commits: whether the caller commits decisions that save nothing.
    """

    policy: Policy
    seed: int
    interval: int
    layers: int = 7
    fails: float = 0.0
    breaks: float = 0.0
    empty_commits: bool = True
    frozen: tuple[int, ...] = (1,)
    step: int = 0
    commits: int = 0
    drift: dict[Unit, float] = field(default_factory=dict)
    saved_at: dict[Unit, int] = field(default_factory=dict)
    broken_until: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.rate = {(i, slot): 10 ** self.chance.uniform(-4, -1.5) for i in range(self.layers) for slot in SLOTS}

    def stats(self) -> list[UnitStats]:
        return [self._unit(i, slot) for i in range(self.layers) for slot in self._slots(i)]

    def _slots(self, layer: int) -> tuple[str, ...]:
        return (FROZEN,) if layer in self.frozen else SLOTS

    def _unit(self, layer: int, slot: str) -> UnitStats:
        unit = Unit(f"layer.{layer}", slot)
        broken = self.broken(layer) and slot in (FROZEN, "exp_avg")
        known = unit in self.saved_at
        return UnitStats(
            unit=unit,
            position=layer,
            block=0 < layer < self.layers - 1,
            nbytes=100,
            drift=(math.nan if broken else self.drift[unit]) if known else None,
            staleness=self.step - self.saved_at[unit] if known else None,
            finite=not broken,
            moving=slot != FROZEN,
        )

    def broken(self, layer: int) -> bool:
        return self.broken_until.get(layer, 0) > self.step

    def train(self) -> None:
        """One optimizer step."""
        self.step += 1
        for layer in range(self.layers):
            if not self.broken(layer) and self.chance.random() < self.breaks:
                self.broken_until[layer] = self.step + self.chance.randint(1, 4 * self.interval)
            for slot in self._slots(layer):
                unit = Unit(f"layer.{layer}", slot)
                if slot != FROZEN and unit in self.drift:
                    self.drift[unit] += self.rate[layer, slot] * self.chance.random()

    def save(self, decision: Decision) -> bool:
        """Whether a commit came of the decision."""
        if incomplete(self.stats(), decision) or self.chance.random() < self.fails:
            return False
        if not decision.saved and not self.empty_commits:
            return False
        for unit in decision.saved:
            self.saved_at[unit], self.drift[unit] = self.step, 0.0
        self.commits += 1
        return True

    def decide(self) -> Decision:
        return self.policy.select(self.stats(), Budget(), History(self.step, self.commits))

    def steps(self, count: int, each: Callable[[], None], decided: Callable[[Decision, bool], None]) -> None:
        """Trains ``count`` steps; calls ``each`` after every step and ``decided`` after every decision."""
        for _ in range(count):
            self.train()
            each()
            if self.step % self.interval == 0:
                decision = self.decide()
                self._check_gate(decision)
                decided(decision, self.save(decision))

    def _check_gate(self, decision: Decision) -> None:
        for layer in range(self.layers):
            if self.broken(layer):
                assert not [unit for unit in decision.saved if unit.layer == f"layer.{layer}"]


troubles = st.sampled_from([(0.0, 0.0), (0.3, 0.0), (0.0, 0.01), (0.2, 0.01)])
seeds = st.integers(0, 2**32)


@pytest.mark.parametrize("name", WRITING)
@few
@given(seed=seeds, interval=st.integers(1, 12), slack=st.integers(0, 50), trouble=troubles, empties=st.booleans())
def test_staleness_stays_within_its_bound_at_every_step(
    name: str, seed: int, interval: int, slack: int, trouble: tuple[float, float], empties: bool
) -> None:
    limit = interval + slack
    policy = Bounded(policy_from(SETTINGS[name]), Bounds(max_staleness=limit, interval=interval))
    run = Run(policy, seed, interval, fails=trouble[0], breaks=trouble[1], empty_commits=empties)
    owed: set[Unit] = set()  # the last decision could and did take care of these

    def each() -> None:
        for one in run.stats():
            if one.unit in owed and one.moving:
                assert one.staleness is not None and one.staleness <= limit

    def decided(decision: Decision, committed: bool) -> None:
        owed.clear()
        if committed or not decision.saved:
            sick = {f"layer.{layer}" for layer in range(run.layers) if run.broken(layer)}
            owed.update(one.unit for one in run.stats() if one.unit.layer not in sick)
        each()

    run.steps(250, each, decided)
    assert run.commits > 0 or any(trouble)


@pytest.mark.parametrize("name", WRITING)
@few
@given(seed=seeds, interval=st.integers(1, 12), limit=st.floats(0, 0.5), trouble=troubles)
def test_drift_stays_within_its_bound_after_every_commit(
    name: str, seed: int, interval: int, limit: float, trouble: tuple[float, float]
) -> None:
    policy = Bounded(policy_from(SETTINGS[name]), Bounds(max_drift=limit))
    run = Run(policy, seed, interval, fails=trouble[0], breaks=trouble[1])

    def decided(decision: Decision, committed: bool) -> None:
        for one in run.stats():
            if committed and not run.broken(one.position):
                assert one.drift is not None and one.drift <= limit

    run.steps(300, lambda: None, decided)


@pytest.mark.parametrize("name", WRITING)
@few
@given(seed=seeds, trouble=troubles)
def test_the_first_commit_holds_everything_and_none_lacks_a_unit(
    name: str, seed: int, trouble: tuple[float, float]
) -> None:
    run = Run(Bounded(policy_from(SETTINGS[name])), seed, interval=3, fails=trouble[0], breaks=trouble[1])

    def decided(decision: Decision, committed: bool) -> None:
        everything = {one.unit for one in run.stats()}
        if run.commits == 0:
            assert not committed
        elif run.commits == 1 and committed:
            assert set(decision.saved) == everything
        if run.commits:
            assert set(run.saved_at) == everything

    run.steps(120, lambda: None, decided)


@pytest.mark.parametrize("name", WRITING)
@few
@given(seed=seeds)
def test_what_stands_still_is_saved_once(name: str, seed: int) -> None:
    run = Run(Bounded(policy_from(SETTINGS[name]), Bounds(max_staleness=20, interval=5)), seed, interval=5)
    saves = []
    run.steps(300, lambda: None, lambda decision, _: saves.append(Unit("layer.1", FROZEN) in decision.saved))
    assert saves == [True] + [False] * 59


TURNS = {
    "full": 1,
    "parity of 2": 2,
    "parity of 5": 5,
    "filter": 5,
    "filter without ends": 4,
    "filter with auxiliary layers at intervals": 3,
}


@pytest.mark.parametrize("name", sorted(TURNS))
@few
@given(
    seed=seeds,
    trouble=troubles,
    empties=st.booleans(),
    frozen=st.sampled_from([(1,), (0, 2, 4, 6), (0, 1, 5, 6), (0, 1, 2, 4, 5, 6), ()]),
)
def test_nothing_starves_within_a_round_of_commits(
    name: str, seed: int, trouble: tuple[float, float], empties: bool, frozen: tuple[int, ...]
) -> None:
    policy = Bounded(policy_from(SETTINGS[name]))
    run = Run(policy, seed, 4, fails=trouble[0], breaks=trouble[1], empty_commits=empties, frozen=frozen)
    missed: dict[int, int] = dict.fromkeys(range(run.layers), 0)
    stuck = 0

    def decided(decision: Decision, committed: bool) -> None:
        nonlocal stuck
        healthy = [one for one in range(run.layers) if one not in frozen and not run.broken(one)]
        stuck = 0 if decision.saved or not healthy or run.commits == 0 else stuck + 1
        assert stuck < TURNS[name]
        if not empties:
            assert decision.saved or not healthy
        if not committed:
            return
        for layer in healthy:
            hit = Unit(f"layer.{layer}", WEIGHTS) in decision.saved
            missed[layer] = 0 if hit else missed[layer] + 1
            assert missed[layer] < TURNS[name]
        for layer in set(missed).difference(healthy):
            missed[layer] = 0

    run.steps(250, lambda: None, decided)
