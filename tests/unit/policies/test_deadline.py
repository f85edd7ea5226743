"""The last save: what time is enough for, in which order, and nothing that a commit must not hold."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.policy_checks import any_case, edge_cases, unversioned, usual_units
from policies.base import Budget, Decision, History, UnitStats, nonfinite_slots
from policies.bounds import Bounds, bound, hurried, incomplete
from policies.budget import scales
from policies.deadline import SAFETY, UNKNOWN, DeadlinePolicy, Nothing, WriteEstimate
from policies.encodings import expected_bytes, options
from policies.registry import with_fixed_encoding
from store.encoding import BF16, BF16_INT8, INT8_BLOCK, INT8_LOG2
from store.names import RAW, WEIGHTS, Unit

COMPACT = {WEIGHTS: BF16, "exp_avg": INT8_BLOCK, "exp_avg_sq": INT8_LOG2}
NOW = History(step=100, commits=3)


def urgent(encodings: dict[str, str] | None = None, **limits: Any) -> DeadlinePolicy:
    names = encodings or {}
    bounds = Bounds(precision="any" if names else "exact", **limits)
    return DeadlinePolicy(with_fixed_encoding(bound(Nothing(), bounds), names, bounds), names)


def unit(layer: str, slot: str = WEIGHTS, *, drift: float | None = 0.01, values: int = 1000, **more: Any) -> UnitStats:
    given_ = {"staleness": 10, "encoding": RAW, "numel": values, **more}
    return UnitStats(Unit(layer, slot), 0, True, 4 * values, drift, **given_)


def saved(stats: list[UnitStats], purse: float, one: DeadlinePolicy | None = None) -> dict[str, str | None]:
    found = (one or urgent()).select(stats, purse, NOW).choices
    return {str(unit): choice.encoding for unit, choice in found.items() if choice.saved}


def test_everything_raw_where_there_is_time() -> None:
    stats = [unit("a"), unit("a", "exp_avg", drift=0.0), unit("b", drift=1e-9)]
    assert saved(stats, 12000, urgent(COMPACT)) == {"a/fp32": RAW, "a/exp_avg": RAW, "b/fp32": RAW}


def test_most_damage_a_byte_first_and_what_does_not_fit_is_stepped_over() -> None:
    stats = [
        unit("near", drift=0.01),
        unit("far", drift=0.03),
        unit("huge", drift=0.9, values=5000),
        unit("mid", drift=0.02),
    ]
    assert set(saved(stats, 8000)) == {"far/fp32", "mid/fp32"}
    assert set(saved(stats, 24000)) == {"huge/fp32", "far/fp32"}


def test_the_smallest_is_tried_where_none_fits_as_long_as_there_is_time() -> None:
    stats = [unit("far", drift=0.5), unit("small", values=10), unit("still", drift=0.0, values=1)]
    assert set(saved(stats, 1.0)) == {"small/fp32"}
    assert saved(stats, 0.0) == {}


def test_weights_before_moments_of_the_same_drift() -> None:
    stats = [unit("a", "exp_avg", drift=0.02), unit("a", drift=0.02)]
    assert set(saved(stats, 4000)) == {"a/fp32"}


def test_what_bounds_demand_comes_first() -> None:
    stats = [unit("far", drift=0.5), unit("old", drift=0.01, staleness=95)]
    assert set(saved(stats, 4000)) == {"far/fp32"}
    assert set(saved(stats, 4000, urgent(max_staleness=100, interval=10))) == {"old/fp32"}


def test_what_no_commit_can_do_without_is_saved_at_any_price() -> None:
    stats = [unit("far", drift=0.5), unit("new", staleness=None, drift=None, encoding=None)]
    assert set(saved(stats, 10)) == {"new/fp32"}
    assert set(saved(stats, 4000)) == {"new/fp32"}


def test_without_any_commit_all_is_tried() -> None:
    stats = unversioned(usual_units(3))
    assert urgent().fits(stats, 0.0, NOW)
    assert all(choice.encoding == RAW for choice in urgent().select(stats, 0.0, NOW).choices.values())


def test_a_unit_is_stored_as_coarsely_as_does_good() -> None:
    """What bf16 loses is more than the drift that it would take away: the finer one is taken."""
    assert saved([unit("a", drift=1e-3), unit("b", drift=0.1)], 7000, urgent({WEIGHTS: BF16})) == {
        "a/fp32": BF16_INT8, "b/fp32": BF16,
    }  # fmt: skip


def test_what_is_saved_already_is_not_saved_again() -> None:
    stats = [unit("done", staleness=0, drift=0.0), unit("left", drift=0.01)]
    assert set(saved(stats, 1e9)) == {"left/fp32"}
    assert urgent().fits([stats[0]], 0.0, NOW)


def test_what_stands_still_is_left_where_it_is() -> None:
    stats = [unit("frozen", "frozen", drift=0.0, moving=False), unit("changed", "frozen", drift=0.1, moving=False)]
    assert set(saved([*stats, unit("a")], 1e9)) == {"changed/frozen", "a/fp32"}


def cost(one: UnitStats, decision: Decision) -> float:
    encoding = decision.choices[one.unit].encoding
    return 0.0 if encoding is None else max(1.0, expected_bytes(one, encoding))


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 200),
    share=st.one_of(st.just(math.inf), st.floats(0, 1.2)),
    compact=st.booleans(),
    staleness=st.sampled_from([None, 20]),
)
def test_no_more_than_fits_no_less_and_in_order(seed: int, share: float, compact: bool, staleness: int | None) -> None:
    stats = any_case(seed).stats
    purse = share * sum(one.nbytes for one in stats) if math.isfinite(share) else math.inf
    limits = {} if staleness is None else {"max_staleness": staleness, "interval": 5}
    encodings = COMPACT if compact else {}
    asked = urgent(encodings, **limits)
    decision = asked.select(stats, purse, NOW)
    assert decision == asked.select(stats, purse, NOW) and list(decision.choices) == [one.unit for one in stats]
    sick = nonfinite_slots(stats)
    assert not any(unit.layer in sick for unit in decision.saved)
    assert all(unit.layer in sick for unit in incomplete(stats, decision))
    demanded = asked.bounds.select(stats, Budget(), NOW).saved
    needed = {one.unit for one in stats if one.staleness is None or one.changed_shape}
    wanted = [one for one in stats if one.unit.layer not in sick and (one.moving or one.unit in demanded)]
    wanted = [one for one in wanted if one.staleness != 0 or one.changed_shape]
    if sum(one.nbytes for one in wanted) <= purse or all(one.staleness is None for one in wanted):
        assert set(decision.saved) == {one.unit for one in wanted}
        assert all(decision.choices[one.unit].encoding == RAW for one in wanted)
        return
    assert asked.fits(stats, purse, NOW) is False
    if len(decision.saved) == 1 and purse > 0 and "smallest" in decision.choices[decision.saved[0]].reason:
        (tried,) = (one for one in wanted if one.unit in decision.saved)
        assert purse < cost(tried, decision) and not needed & {one.unit for one in wanted}
        return
    left = purse - sum(cost(one, decision) for one in wanted)
    free = sum(cost(one, decision) for one in wanted if one.unit in needed)
    assert left >= min(0.0, purse - free) - 1e-6
    scale = scales(stats, {})

    def worth(one: UnitStats, error: float) -> float:
        drift = math.inf if one.drift is None or math.isnan(one.drift) else one.drift
        return scale[one.unit.layer][one.unit.slot] * (drift * drift - error * error)

    def bid(one: UnitStats) -> tuple[int, float, float]:
        ways = options(one, encodings.get(one.unit.slot, RAW))
        way = next((way for way in ways if worth(one, way.error) > 0), ways[-1])
        rank = 0 if one.unit in needed else 1 if one.unit in demanded else 2
        return rank, -worth(one, way.error) / way.nbytes, way.nbytes

    out = [one for one in wanted if one.unit not in decision.saved]
    for one in out:
        rank, value, nbytes = bid(one)
        assert rank > 0
        if rank == 1 or value < 0:
            assert nbytes > left, "it would have fitted"
            worse = [bid(other) for other in wanted if other.unit in decision.saved and bid(other)[:2] > (rank, value)]
            assert all(other[2] < nbytes for other in worse), "one behind it took its place"


def test_at_the_rim_of_what_there_is() -> None:
    for case in edge_cases():
        for purse in (0.0, 5000.0, math.inf):
            decision = urgent(COMPACT).select(case.stats, purse, case.history)
            assert len(decision.choices) == len(case.stats)


def test_seconds_become_bytes_by_what_saves_took() -> None:
    writing = WriteEstimate()
    assert writing.affordable(10.0) == UNKNOWN * SAFETY * 10.0
    writing.learn(1000, 2.0)
    assert writing.affordable(10.0) == pytest.approx(SAFETY * 10.0 * 500)
    for _ in range(40):
        writing.learn(1000, 2.0)
        writing.learn(2000, 3.0)  # a second each, whatever is saved
    assert writing.affordable(10.0) == pytest.approx((SAFETY * 10.0 - 1.0) * 1000, rel=1e-3)
    assert writing.affordable(1.0) == pytest.approx(SAFETY * 2000 / 3), (
        "too little for a save as they were: as the last"
    )
    assert writing.affordable(0.0) == 0.0


def test_a_replay_saves_what_was_recorded_and_what_it_needs_itself() -> None:
    stats = [unit("a"), unit("b"), unit("new", staleness=None), unit("sick", staleness=None, finite=False)]
    none = Nothing().select(stats, Budget(), NOW)
    found = hurried(none, stats, {Unit("a", WEIGHTS): BF16, Unit("sick", WEIGHTS): RAW}).choices
    assert [found[one.unit].encoding for one in stats] == [BF16, None, RAW, None]
    assert hurried(none, [replace(stats[1], changed_shape=True)], {}).saved
