"""Policy ``auto``: which plan is the cheapest, what it saves, and that it spends no more than there is."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.accounting import BYTES, STALL, Account, TokenBucket
from policies.auto import LEAST, AutoPolicy, Plan
from policies.base import Budget, Decision, History, Policy, UnitStats
from policies.bounds import Bounded, Bounds
from policies.budget import LAG, BudgetPolicy
from policies.encodings import expected_bytes
from policies.registry import policy_from, with_fixed_encoding
from store.encoding import BF16, INT8_LOG2, INT8_SHARED_EXPONENT
from store.names import BUFFER, RAW, WEIGHTS, Unit

SLOTS = (WEIGHTS, "exp_avg", "exp_avg_sq")
COMPACT = {WEIGHTS: BF16, "exp_avg": INT8_SHARED_EXPONENT, "exp_avg_sq": INT8_LOG2}
EACH = 4000
"""Bytes of a unit."""


def unit(position: int, slot: str, drift: float, **more: Any) -> UnitStats:
    given_ = {"staleness": 10, "encoding": RAW, "numel": EACH // 4, "stored_bytes": EACH, **more}
    return UnitStats(Unit(f"layer.{position}", slot), position, True, EACH, drift, **given_)


def model(layers: int = 8, moments: float = 1.0, paces: tuple[float, ...] = (1.0,)) -> list[UnitStats]:
    """Weights that drift by 0.01 in ten steps, times ``paces`` in turn; moments by ``moments``."""
    return [
        unit(position, slot, 0.01 * paces[position % len(paces)] if slot == WEIGHTS else moments)
        for position in range(layers)
        for slot in SLOTS
    ]


def select(stats: list[UnitStats], nbytes: float, per_step: float | None, **more: Any) -> Decision:
    return AutoPolicy().select(
        stats, Budget(nbytes, per_step=per_step, most=more.pop("most", None)), History(100, 3, **more)
    )


def plans(stats: list[UnitStats], per_step: float) -> list[Plan]:
    return AutoPolicy()._plans(stats, Budget(0.0, per_step=per_step), 1)


def saved(decision: Decision) -> list[str]:
    return [str(one) for one in decision.saved]


def reasons(decision: Decision) -> set[str]:
    return {choice.reason for choice in decision.choices.values()}


def test_where_bytes_are_plenty_everything_is_saved_at_once() -> None:
    stats = model(moments=10.0)
    decision = select(stats, 24 * EACH, per_step=24 * EACH / 2)
    assert len(decision.saved) == 24
    (why,) = reasons(decision)
    assert why.startswith("everything, every 2 steps, costs a failure 1 steps; weights and 50 % of the moments 2.84")


def test_it_waits_until_the_whole_plan_can_be_paid() -> None:
    decision = select(model(moments=10.0), 24 * EACH - 1, per_step=24 * EACH / 2)
    assert decision.saved == ()
    (why,) = reasons(decision)
    assert why.startswith("96000 bytes are needed, 95999 are at hand; everything, every 2 steps")


def test_where_bytes_are_few_the_weights_are_saved_more_often_and_moments_in_turn() -> None:
    per_step = 24 * EACH / 100  # everything takes a hundred steps
    stats = model()
    decision = select(stats, 9 * EACH, per_step)
    assert decision.saved == ()  # a sixteenth of the moments is one layer's: two units
    decision = select(stats, 10 * EACH, per_step)
    assert saved(decision) == [f"layer.{i}/{slot}" for i in range(8) for slot in (SLOTS if i == 0 else (WEIGHTS,))]
    assert "everything 50" in next(iter(reasons(decision)))


def test_the_cost_is_half_a_period_and_lag_for_the_squared_drift_of_moments() -> None:
    stats, per_step = model(), 24 * EACH / 100
    whole, turns = plans(stats, per_step)
    assert (len(whole.units), whole.period, whole.cost) == (24, pytest.approx(100), pytest.approx(50))
    assert len(turns.units) == 10 and turns.period == pytest.approx(10 * EACH / per_step)
    age = turns.period * 7 / 2  # one of eight layers is fresh
    # A squared drift of 1 in ten steps: half of the correlation is left.
    assert turns.cost == pytest.approx(turns.period / 2 + 2 * LAG * 2 * (1 - 0.5 ** (age / 10)))


def test_moments_that_turned_around_count_as_those_with_nothing_in_common() -> None:
    for drift in (1.5, 2.0, 1e3, math.inf, None):
        _, turns = plans(
            [replace(one, drift=drift) if one.unit.slot != WEIGHTS else one for one in model()], 24 * EACH / 100
        )
        assert turns.cost == pytest.approx(turns.period / 2 + 2 * LAG * 2 * (1 - LEAST ** (turns.period * 7 / 20)))


def test_moments_that_are_a_few_steps_old_cost_little() -> None:
    whole, turns = plans(model(), 24 * EACH / 8)
    assert len(turns.units) == 8 + 2 * 4 and turns.period == pytest.approx(16 / 3)
    assert turns.cost == pytest.approx(turns.period / 2 + 2 * LAG * 2 * (1 - 0.5 ** (turns.period / 20)))
    assert turns.cost < whole.cost + 1.0


def test_moments_that_keep_are_saved_seldom_and_cost_little() -> None:
    still, moving = (
        min(plans(model(moments=moments), 24 * EACH / 3), key=lambda one: one.cost) for moments in (1e-4, 3.0)
    )
    assert len(still.units) == 10 and still.cost < 1.0
    assert moving.text == "everything" and moving.cost == pytest.approx(1.5)


def test_a_plan_is_never_more_frequent_than_decisions() -> None:
    stats = model(moments=0.001)
    assert "everything, every 100 steps" in next(iter(reasons(select(stats, 1e9, 24 * EACH / 30, interval=100))))
    bounded = Bounded(AutoPolicy(), Bounds(interval=100))
    decision = bounded.select(stats, Budget(1e9, per_step=24 * EACH / 30), History(100, 3))
    assert len(decision.saved) == 24 and "everything, every 100 steps" in next(iter(reasons(decision)))


def test_layers_that_are_far_apart_are_saved_together() -> None:
    stats = model(paces=(100.0, 1.0, 1.0, 1.0))
    assert {plan.text.split()[0] for plan in plans(stats, 24 * EACH / 100)} == {"everything", "weights"}


@pytest.mark.parametrize(
    "budget",
    [Budget(5 * EACH), Budget(None), Budget(5 * EACH, per_step=100.0, most=5 * EACH)],
    ids=["the rate is not known", "no limit", "no save can be paid whole"],
)
def test_otherwise_it_decides_as_budget_does(budget: Budget) -> None:
    stats = model(paces=(3.0, 1.0))
    assert AutoPolicy().select(stats, budget, History(100, 3)) == BudgetPolicy().select(stats, budget, History(100, 3))


def test_buffers_are_saved_with_the_weights() -> None:
    stats = [*model(), unit(3, BUFFER, 0.5)]
    assert Unit("layer.3", BUFFER) in select(stats, 11 * EACH, 24 * EACH / 100).saved


def test_what_is_demanded_is_paid_first_and_not_twice() -> None:
    stats, per_step = model(moments=10.0), 24 * EACH / 2
    demanded = frozenset({stats[0].unit, stats[4].unit})
    policy = AutoPolicy()
    assert len(policy.select(stats, Budget(24 * EACH, demanded, per_step), History(100, 3)).saved) == 24
    assert set(policy.select(stats, Budget(24 * EACH - 1, demanded, per_step), History(100, 3)).saved) == demanded


def test_what_is_demanded_counts_for_whether_a_save_can_ever_be_paid() -> None:
    stats, more = model(), 24 * EACH / 100
    demanded = frozenset({Unit("layer.7", "exp_avg"), Unit("layer.7", "exp_avg_sq")})
    budget = Budget(10 * EACH, demanded, more, 10 * EACH)  # the weights, the oldest layer's moments, and these: 12
    policy, now = AutoPolicy(), History(100, 3)
    assert policy.select(stats, budget, now) == BudgetPolicy().select(stats, budget, now)
    assert len(policy.select(stats, replace(budget, bytes=12 * EACH, most=12 * EACH), now).saved) == 12


def test_a_layer_that_is_most_of_the_model_is_counted_whole() -> None:
    stats = [replace(one, nbytes=50 * EACH, stored_bytes=50 * EACH) if one.position == 0 else one for one in model()]
    whole, turns, *_ = plans(stats, EACH)
    assert turns.text == "weights and 88 % of the moments" and turns.nbytes == (57 + 100) * EACH
    assert whole.nbytes == (57 + 114) * EACH


def test_after_a_resume_it_waits_for_a_whole_save_only_once_it_lived_for_two_periods() -> None:
    stats, budget = model(moments=10.0), Budget(5 * EACH, per_step=24 * EACH / 2)
    assert len(AutoPolicy().select(stats, replace(budget, resumed_for=3), History(100, 3)).saved) == 5
    assert AutoPolicy().select(stats, replace(budget, resumed_for=4), History(100, 3)).saved == ()


def test_units_are_stored_as_the_encodings_say() -> None:
    policy = with_fixed_encoding(policy_from("auto"), COMPACT, Bounds(precision="any", interval=10))
    stats = [replace(one, stored_bytes=0, encoding=None) for one in model()]
    decision = policy.select(stats, Budget(1e6, per_step=1e5), History(100, 3))
    assert {unit.slot: choice.encoding for unit, choice in decision.choices.items()} == COMPACT


def test_a_sick_layer_is_left_out_of_every_plan() -> None:
    stats = [replace(one, finite=one.position != 2) for one in model(moments=10.0)]
    decision = select(stats, 21 * EACH, 24 * EACH / 2)
    assert len(decision.saved) == 21 and not [one for one in decision.saved if one.layer == "layer.2"]


@st.composite
def anything(draw: st.DrawFn) -> tuple[list[UnitStats], Budget, History]:
    drifts = st.none() | st.floats(0, 2) | st.sampled_from([0.0, 1e-30, math.inf, math.nan])
    stats = [
        UnitStats(
            Unit(f"layer.{position}", slot),
            position,
            True,
            nbytes := draw(st.integers(0, 1000)),
            draw(drifts),
            draw(st.none() | st.integers(-3, 60)),
            finite=draw(st.integers(0, 9)) > 0,
            moving=draw(st.integers(0, 9)) > 0,
            error=draw(st.sampled_from([0.0, 0.2])),
            numel=draw(st.sampled_from([0, nbytes // 4])),
            encoding=draw(st.sampled_from([None, RAW, BF16])),
            stored_bytes=draw(st.integers(0, nbytes)),
        )
        for position in range(draw(st.integers(0, 6)))
        for slot in draw(st.sets(st.sampled_from([*SLOTS, BUFFER]), min_size=1))
    ]
    amounts = st.none() | st.floats(0.01, 1e5)
    budget = Budget(draw(st.none() | st.floats(-1e4, 1e5)), frozenset(), draw(amounts), draw(amounts))
    return stats, budget, History(100, 3, draw(st.none() | st.integers(1, 50)))


@settings(max_examples=300, deadline=None)
@given(given_=anything(), shuffle=st.randoms(use_true_random=False))
def test_in_any_state_it_decides_on_every_unit_within_the_bytes_whatever_their_order(
    given_: tuple[list[UnitStats], Budget, History], shuffle: random.Random
) -> None:
    stats, budget, history = given_
    policy = AutoPolicy(encodings=COMPACT)
    decision = policy.select(stats, budget, history)
    assert list(decision.choices) == [one.unit for one in stats]
    assert all(choice.reason for choice in decision.choices.values())
    mixed = policy.select(shuffle.sample(stats, len(stats)), budget, history)
    assert mixed == decision
    chosen = {one.unit: decision.choices[one.unit].encoding for one in stats}
    costs = [max(1.0, expected_bytes(one, encoding)) for one in stats if (encoding := chosen[one.unit]) is not None]
    needed = [one for one in stats if one.staleness is None]
    if budget.bytes is not None and len(costs) > len(needed):
        assert math.fsum(costs) <= budget.bytes + 1e-6


class Life:
    """A process of a job on a store: an account, and a clock that goes a second a step. A save takes no time."""

    def __init__(self, policy: Policy, sizes: list[int], limits: dict[str, float], burst: float) -> None:
        self.policy, self.sizes, self.limits, self.burst = policy, sizes, limits, burst
        self.at: dict[Unit, int] = {}
        self.saves: list[int] = []
        self.begin(0)

    def begin(self, step: int) -> None:
        self.step = self.started = step
        buckets = {
            name: TokenBucket(rate, rate * self.burst, lambda: float(self.step)) for name, rate in self.limits.items()
        }
        self.account, self.stalls = Account(buckets), 0.0

    def shown(self) -> list[UnitStats]:
        units = [Unit(f"layer.{i}", slot) for i in range(len(self.sizes)) for slot in SLOTS]
        found = []
        for one in units:
            position, since = int(one.layer.removeprefix("layer.")), self.at.get(one)
            size, age = self.sizes[position], self.step - (since or 0)
            drift = min(1.0, 0.1 * age) if one.slot != WEIGHTS else 0.001 * age
            known = {"drift": drift, "staleness": age} if since is not None else {"drift": None, "staleness": None}
            more = {"encoding": RAW, "numel": size // 4, "stored_bytes": size if since is not None else 0}
            found.append(UnitStats(one, position, True, size, **known, **more))  # type: ignore[arg-type]
        return found

    def train(self, steps: int, every: int = 10, idle: float = 0.0) -> None:
        for _ in range(steps // every):
            self.step += every
            stats = self.shown()
            self.account.make_room(max(self.sizes), 3 * sum(self.sizes))
            budget = self.account.budget(self.step, self.account.offer())
            decision = Bounded(self.policy, Bounds(interval=every)).select(stats, budget, History(self.step, 1))
            self.account.stalled(idle)
            if decision.saved:
                free = not self.at
                nbytes = sum(one.nbytes for one in stats if decision.choices[one.unit].saved)
                self.account.begin(nbytes, free)
                self.account.committed(nbytes, 0.0)
                self.at |= dict.fromkeys(decision.saved, self.step)
                self.saves.append(self.step)


@pytest.mark.parametrize("burst", [20, 60, 300, 3600])
@pytest.mark.parametrize("sizes", [[4000] * 6, [40_000, 4000, 4000], [4000], [400_000, 40]], ids=str)
def test_it_never_waits_for_bytes_that_can_never_be_there(sizes: list[int], burst: float) -> None:
    """Whatever a bucket holds: where bytes come in, something is saved again."""
    life = Life(AutoPolicy(), sizes, {BYTES: 3 * sum(sizes) / 200}, burst)
    life.train(4000)
    assert len(life.saves) > 10
    assert max(b - a for a, b in pairwise(life.saves)) <= 210


@pytest.mark.parametrize(
    ("burst", "full", "grown"),
    [(75.0, 40.0, 1.0), (51.0, 3.0, 1.0), (150.0, 3.0, 2.0)],
    ids=["a bucket of two saves", "of one interval", "saves that grow"],
)
def test_a_full_bucket_is_spent_on_everything(burst: float, full: float, grown: float) -> None:
    """What overflows is not counted as earned, so everything seems dear; turns would then keep the bucket full for
    good. ``full``: steps that a save of everything takes to earn. ``grown``: factor of its size, half-way."""
    life = Life(AutoPolicy(), [4000] * 6, {BYTES: 72_000 / full}, burst)
    life.train(5000, every=50)
    life.sizes = [int(4000 * grown)] * 6
    life.train(5000, every=50)
    assert set(life.at.values()) == {life.step}
    assert [b - a for a, b in pairwise(life.saves)][5:] == [50] * (len(life.saves) - 6)


def test_what_pauses_and_decisions_cost_was_not_earned() -> None:
    life = Life(AutoPolicy(), [4000] * 6, {BYTES: 400.0}, 100.0)
    life.train(400)
    assert life.account.budget(life.step, life.account.offer()).per_step == pytest.approx(400.0, rel=0.05)
    clock = [0.0]
    idle = Account({STALL: TokenBucket(0.02, 72.0, lambda: clock[0])})
    idle.make_room(4000, 72_000)
    found = None
    for step in range(1, 100):
        clock[0] += 1.0
        found = idle.budget(step, idle.offer())
        idle.begin(1000.0, step == 1) if step % 10 == 1 else None
        idle.stalled(0.01 if step % 10 != 1 else 0.02)
    assert found is not None and found.per_step is not None
    gross = 0.02 * 1000.0 / 0.01  # a save costs 0.01 s more than a decision that saves nothing
    assert found.per_step < 0.7 * gross


@pytest.mark.parametrize("lives", [80, 400])
def test_a_job_that_is_killed_before_it_can_pay_for_a_whole_save_makes_progress(lives: int) -> None:
    """Everything takes the income of a thousand steps, and no process lives for more than ``lives``."""
    life = Life(AutoPolicy(), [4000] * 6, {BYTES: 72.0}, 3600.0)
    life.train(10)
    for _ in range(20):
        life.begin(life.saves[-1])
        life.train(lives)
    assert life.saves[-1] > 20 * lives / 3


@pytest.mark.parametrize("share", [0.5, 0.1, 0.02])
@pytest.mark.parametrize("paces", [(1.0,), (30.0, 1.0, 0.1)], ids=["alike", "apart"])
def test_units_get_their_turn_and_the_bytes_are_spent(share: float, paces: tuple[float, ...]) -> None:
    """A run in which a save of everything takes the income of 100 / share steps. Where layers are apart, moments may
    wait for longer than it takes, as under ``budget``."""
    layers, income, steps = 6, share * 18 * EACH / 100, 40_000
    at: dict[Unit, int] = dict.fromkeys((Unit(f"layer.{i}", slot) for i in range(layers) for slot in SLOTS), 0)
    counts = dict.fromkeys(at, 0)
    bucket = spent = 0.0
    for step in range(10, steps, 10):
        bucket += 10 * income
        stats = []
        for one, saved_at in at.items():
            position, age = int(one.layer.removeprefix("layer.")), step - saved_at
            drift = 0.001 * age * paces[position % len(paces)] if one.slot == WEIGHTS else min(1.0, 0.1 * age)
            stats.append(unit(position, one.slot, drift, staleness=age))
        decision = AutoPolicy().select(stats, Budget(bucket, per_step=income), History(step, 1, 10))
        for one in decision.saved:
            at[one], counts[one] = step, counts[one] + 1
        bucket -= len(decision.saved) * EACH
        spent += len(decision.saved) * EACH
        assert bucket >= 0.0
    assert spent >= income * steps - 18 * EACH
    assert all(counts[one] > 0 for one in at if paces == (1.0,) or one.slot == WEIGHTS)
