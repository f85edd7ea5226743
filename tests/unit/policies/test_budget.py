"""Policy ``budget``: what stands where in line, what is waited for, and that nothing waits for ever."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.base import Budget, Decision, History, UnitStats
from policies.bounds import Bounded, Bounds, bound
from policies.budget import BudgetPolicy
from policies.builtin import Observe
from policies.encodings import expected_bytes
from policies.registry import policy_from, with_fixed_encoding
from store.encoding import BF16, BF16_INT8, INT8_BLOCK, INT8_LOG2
from store.errors import ConfigError
from store.names import RAW, WEIGHTS, Unit

COMPACT = {WEIGHTS: BF16, "exp_avg": INT8_BLOCK, "exp_avg_sq": INT8_LOG2}
NOW = History(step=100, commits=3)


def unit(layer: str, slot: str = WEIGHTS, *, drift: float | None = 0.01, values: int = 1000, **more: Any) -> UnitStats:
    given_ = {"staleness": 10, "encoding": RAW, "numel": values, **more}
    return UnitStats(Unit(layer, slot), 0, True, 4 * values, drift, **given_)


def select(stats: list[UnitStats], nbytes: float | None, policy: BudgetPolicy | None = None) -> Decision:
    return (policy or BudgetPolicy()).select(stats, Budget(nbytes), NOW)


def saved(stats: list[UnitStats], nbytes: float | None, policy: BudgetPolicy | None = None) -> list[str]:
    return [str(one) for one in select(stats, nbytes, policy).saved]


def test_most_damage_a_byte_comes_first() -> None:
    stats = [unit("far", drift=0.02), unit("near", drift=0.01), unit("small", drift=0.01, values=10)]
    assert saved(stats, 4040) == ["far/fp32", "small/fp32"]
    assert saved(stats, 8040) == ["far/fp32", "near/fp32", "small/fp32"]


def test_what_is_older_comes_first() -> None:
    assert saved([unit("new", staleness=10), unit("old", staleness=11)], 4000) == ["old/fp32"]


def test_the_next_in_line_is_waited_for_and_nothing_behind_it_is_saved() -> None:
    decision = select([unit("large", drift=0.5), unit("small", values=10)], 3999.5)
    assert decision.saved == ()
    assert decision.choices[Unit("large", WEIGHTS)].reason == "next in line, needs 4000 bytes; 3999 are at hand"
    assert "behind large/fp32" in decision.choices[Unit("small", WEIGHTS)].reason


def test_a_debt_is_paid_back_before_anything_is_saved() -> None:
    decision = select([unit("a", values=1)], -1.0)
    assert decision.saved == ()
    assert "not paid for yet" in decision.choices[Unit("a", WEIGHTS)].reason


def test_without_a_limit_what_moved_is_saved_and_nothing_else() -> None:
    assert saved([unit("moved", drift=1e-9), unit("still", drift=0.0)], None) == ["moved/fp32"]


def test_what_is_saved_in_any_case_is_paid_first() -> None:
    stats = [unit("demanded", drift=1e-6), unit("far", drift=0.5)]
    demanded = frozenset({stats[0].unit})
    policy = BudgetPolicy()
    assert policy.select(stats, Budget(7999, demanded), NOW).saved == (stats[0].unit,)
    assert policy.select(stats, Budget(8000, demanded), NOW).saved == (stats[0].unit, stats[1].unit)


def test_bounds_say_what_they_demand_and_win() -> None:
    policy = Bounded(BudgetPolicy(), Bounds(max_staleness=30, max_drift=0.3, interval=10))
    stats = [unit("stale", staleness=25, drift=1e-6), unit("drifted", drift=0.4), unit("fine", drift=0.2)]
    assert policy.select(stats, Budget(-1e9), NOW).saved == (stats[0].unit, stats[1].unit)
    assert policy.select(stats, Budget(11_999), NOW).saved == (stats[0].unit, stats[1].unit)
    assert policy.select(stats, Budget(12_000), NOW).saved == tuple(one.unit for one in stats)


def test_the_first_save_is_full_whatever_is_at_hand() -> None:
    stats = [unit(str(n), drift=None, staleness=None, encoding=None) for n in range(3)]
    assert len(Bounded(BudgetPolicy()).select(stats, Budget(0.0), NOW).saved) == 3


def test_what_cannot_be_measured_is_saved_first_but_not_beyond_what_is_at_hand() -> None:
    stats = [unit("unknown", drift=None), unit("far", drift=1e3)]
    assert saved(stats, 4000) == ["unknown/fp32"]
    assert saved(stats, 3999) == []


# ---- slots


def moments(layer: str, pace: float, drift: float = 1.0) -> list[UnitStats]:
    return [unit(layer, drift=10 * pace), unit(layer, "exp_avg", drift=drift)]


@pytest.mark.parametrize("pace", [1e-6, 1e-4, 1e-2])
def test_weights_come_before_moments_at_any_learning_rate(pace: float) -> None:
    assert saved(moments("a", pace), 4000) == ["a/fp32"]


def test_moments_of_a_layer_that_moves_faster_come_first() -> None:
    stats = moments("slow", 1e-4) + moments("fast", 1e-3)
    assert saved(stats, 12_000) == ["slow/fp32", "fast/fp32", "fast/exp_avg"] or saved(stats, 8000) == [
        "fast/fp32",
        "fast/exp_avg",
    ]
    order = [name for size in (4000, 8000, 12_000, 16_000) for name in saved(stats, size)]
    assert order.index("fast/exp_avg") < order.index("slow/exp_avg")


def test_a_slot_can_be_made_to_count() -> None:
    assert saved(moments("a", 1e-4), 4000, BudgetPolicy(lags={"exp_avg": 11})) == ["a/exp_avg"]


@pytest.mark.parametrize("drift", [0.0, None, math.nan, math.inf])
def test_moments_are_saved_where_nothing_is_known_of_their_weights(drift: float | None) -> None:
    stats = [unit("a", drift=drift), unit("a", "exp_avg", drift=0.5)]
    assert "a/exp_avg" in saved(stats, 8000)
    assert "b/exp_avg" in saved([*stats, unit("b", "exp_avg", drift=0.5)], 12_000)


# ---- encodings


def test_without_an_encoding_everything_is_raw() -> None:
    assert select([unit("a")], None).choices[Unit("a", WEIGHTS)].encoding == RAW


def test_few_bytes_buy_the_coarsest_and_many_the_finest() -> None:
    stats = [unit("a", drift=0.05), unit("b", drift=0.05)]
    policy = BudgetPolicy(encodings=COMPACT)
    found = [[choice.encoding for choice in select(stats, size, policy).choices.values()] for size in (2000, 4000)]
    assert found == [[BF16, None], [BF16, BF16]]
    assert {one.encoding for one in select(stats, 6000, policy).choices.values()} == {BF16_INT8}
    assert {one.encoding for one in select(stats, None, policy).choices.values()} == {RAW}


def test_what_moved_less_than_the_encoding_loses_is_not_stored_in_it() -> None:
    policy = BudgetPolicy(encodings=COMPACT)
    assert saved([unit("a", drift=1e-3)], 2000, policy) == []
    assert select([unit("a", drift=1e-3)], 3000, policy).choices[Unit("a", WEIGHTS)].encoding == BF16_INT8
    # Against a version of the same encoding, only what moved beyond its error counts.
    old = unit("a", drift=5e-3, encoding=BF16, error=1.7e-3, stored_bytes=2000)
    assert select([old], 2000, policy).choices[Unit("a", WEIGHTS)].encoding == BF16


def test_an_error_that_a_save_would_not_change_is_no_reason_against_it() -> None:
    old = unit("a", "exp_avg", drift=9e-3, encoding=INT8_BLOCK, error=6e-3, stored_bytes=1064)
    assert select([old], 1064, BudgetPolicy(encodings=COMPACT)).choices[old.unit].encoding == INT8_BLOCK


def test_bytes_buy_newer_moments_before_more_exact_ones() -> None:
    policy = BudgetPolicy(encodings=COMPACT)
    coarse = {"encoding": INT8_LOG2, "error": 0.1, "stored_bytes": 90}
    stats = [unit("a", "exp_avg_sq", drift=0.102, **coarse), unit("b", "exp_avg_sq", drift=0.102, **coarse)]
    decision = select(stats, 400, policy)
    assert [decision.choices[one.unit].encoding for one in stats] == [INT8_LOG2, INT8_LOG2]


def test_what_a_version_packed_to_is_what_it_is_taken_to_cost() -> None:
    packed = unit("a", encoding=BF16, error=1.7e-3, stored_bytes=700)
    policy = BudgetPolicy(encodings=COMPACT)
    assert saved([packed], 699, policy) == [] and saved([packed], 700, policy) == ["a/fp32"]


def test_values_that_are_not_float32_have_one_way() -> None:
    half = UnitStats(Unit("a", WEIGHTS), 0, True, 2000, 0.1, 10, numel=1000)
    assert expected_bytes(half, BF16) == 2000
    assert select([half], None, BudgetPolicy(encodings=COMPACT)).choices[half.unit].encoding == RAW


def test_what_bounds_demand_is_stored_as_configured_and_budget_chooses_by_itself() -> None:
    policy = with_fixed_encoding(
        bound(policy_from("budget"), Bounds(max_drift=0.3, precision="any")), COMPACT, Bounds(None, 0.3, "any")
    )
    stats = [unit("drifted", drift=0.4), unit("fine", drift=0.2)]
    choices = policy.select(stats, Budget(None), NOW).choices
    assert [choices[one.unit].encoding for one in stats] == [BF16, RAW]
    first = [unit("a", drift=None, staleness=None, encoding=None)]
    assert policy.select(first, Budget(0.0), NOW).choices[first[0].unit].encoding == BF16
    observing = with_fixed_encoding(
        bound(Observe(BudgetPolicy()), Bounds(precision="any")), COMPACT, Bounds(precision="any")
    )
    assert isinstance(observing, Observe) and isinstance(observing.inner, Bounded)


# ---- settings


@pytest.mark.parametrize(
    ("lags", "told"),
    [
        ({"exp_avg": 0}, "between 1e-6 and 1e6"),
        ({"exp_avg": "3"}, "finite number"),
        ({"exp_avg": math.nan}, "finite number"),
        ({WEIGHTS: 3}, "other than fp32"),
        (3, "must map names of slots"),
    ],
)
def test_lags_that_make_no_sense_are_refused(lags: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        policy_from({"name": "budget", "lags": lags})


def test_encodings_are_not_a_setting_of_the_policy() -> None:
    with pytest.raises(ConfigError, match=r"unknown parameter 'encodings'.*Known: lags"):
        policy_from({"name": "budget", "encodings": COMPACT})


# ---- over a run


some = settings(max_examples=40, deadline=None)


@st.composite
def shown(draw: st.DrawFn) -> list[UnitStats]:
    drifts = st.none() | st.floats(0, 2) | st.sampled_from([0.0, 1e-9, math.inf, math.nan])
    return [
        unit(
            f"layer.{n}",
            slot,
            drift=draw(drifts),
            values=draw(st.integers(0, 500)),
            staleness=draw(st.integers(-2, 90)),
            finite=draw(st.integers(0, 9)) > 0,
            encoding=draw(st.sampled_from([RAW, BF16])),
            error=draw(st.sampled_from([0.0, 1e-3, 0.5])),
        )
        for n in range(draw(st.integers(0, 6)))
        for slot in draw(st.sets(st.sampled_from(sorted(COMPACT)), min_size=1))
    ]


@some
@given(stats=shown(), at_hand=st.floats(-5000, 20_000), chance=st.randoms(use_true_random=False))
def test_no_more_is_chosen_than_is_at_hand(stats: list[UnitStats], at_hand: float, chance: random.Random) -> None:
    demanded = frozenset(one.unit for one in stats if chance.random() < 0.2)
    decision = BudgetPolicy(encodings=COMPACT).select(stats, Budget(at_hand, demanded), NOW)
    costs = {one.unit: expected_bytes(one, decision.choices[one.unit].encoding or RAW) for one in stats}
    asked = sum(costs[one] for one in demanded)
    spent = sum(costs[one] for one in decision.saved)
    assert demanded <= set(decision.saved)
    assert spent <= max(asked, at_hand) + 1e-6


@some
@given(stats=shown(), chosen=st.integers(0, 99))
def test_what_moves_gets_to_the_head_of_the_line_if_it_waits_long_enough(stats: list[UnitStats], chosen: int) -> None:
    known = [replace(one, drift=one.drift if one.drift and 1e-9 < one.drift < 10 else 0.1, error=0.0) for one in stats]
    sound = [one for one in known if all(other.finite for other in known if other.unit.layer == one.unit.layer)]
    if sound:
        old = replace(sound[chosen % len(sound)], staleness=10**40)
        waiting = [old if one.unit == old.unit else one for one in known]
        decision = BudgetPolicy().select(waiting, Budget(old.nbytes + 1.0), NOW)
        assert old.unit in decision.saved


@pytest.mark.slow
@some
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_whatever_moves_is_saved_again_and_again(data: st.DataObject, seed: int) -> None:
    """Sizes differ a hundredfold and paces tenfold; the drift of moments stops growing, and they do not starve."""
    chance = random.Random(seed)
    names = [Unit(f"layer.{n}", slot) for n in range(data.draw(st.integers(1, 4))) for slot in (WEIGHTS, "exp_avg")]
    values = {one: int(10 ** chance.uniform(0, 2)) for one in names}
    pace = {one: 10 ** chance.uniform(-3, -2) * (1 if one.slot == WEIGHTS else 30) for one in names}
    per_step = data.draw(st.floats(0.1, 0.5)) * 4 * sum(values.values())
    capacity = max(4 * most for most in values.values()) + per_step
    held, tokens = dict.fromkeys(names, 0), 0.0
    seen: dict[Unit, int] = dict.fromkeys(names, 0)
    for step in range(1, 1500):
        tokens = min(capacity, tokens + per_step)
        stats = [
            unit(
                one.layer,
                one.slot,
                drift=min(1.0, pace[one] * (step - held[one])),
                values=values[one],
                staleness=step - held[one],
            )
            for one in names
        ]
        for one in BudgetPolicy(lags={"exp_avg": 10}).select(stats, Budget(tokens), History(step, step)).saved:
            held[one], seen[one] = step, seen[one] + 1
            tokens -= 4 * values[one]
    assert all(times >= 2 for times in seen.values())


def test_a_layer_that_begins_to_move_is_saved_more_often() -> None:
    """A change of phase: nothing is learned, so nothing has to be unlearned."""
    held, counts = {"a": 0, "b": 0}, {"before": [0, 0], "after": [0, 0]}
    moved = {"a": 0.0, "b": 0.0}
    for step in range(1, 801):
        paces = {"a": 1e-3, "b": 1e-5} if step <= 400 else {"a": 1e-5, "b": 1e-3}
        for name in held:
            moved[name] += paces[name]
        stats = [unit(name, drift=moved[name], staleness=step - held[name]) for name in held]
        for one in select(stats, 4000 if step % 4 == 0 else 0).saved:
            held[one.layer], moved[one.layer] = step, 0.0
            counts["before" if step <= 400 else "after"]["ab".index(one.layer)] += 1
    assert counts["before"][0] > 5 * counts["before"][1] > 0
    assert counts["after"][1] > 5 * counts["after"][0] > 0
