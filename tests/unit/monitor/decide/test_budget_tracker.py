"""The account of policy ``budget``: over any window it holds, whatever bounds demand and saves turn out to write."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monitor.decide.budget_tracker import BudgetTracker
from monitor.telemetry.metrics import Metrics
from policies.accounting import BYTES, STALL, Account, TokenBucket
from policies.base import Choice, History, UnitStats
from policies.bounds import Bounded, Bounds
from policies.budget import BudgetPolicy
from store.names import RAW, WEIGHTS, Unit


class Clock:
    """Goes when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def unit(name: str, staleness: int | None = 10, drift: float | None = 0.1, values: int = 100) -> UnitStats:
    encoding = RAW if staleness is not None else None
    return UnitStats(Unit(name, WEIGHTS), 0, True, 4 * values, drift, staleness, numel=values, encoding=encoding)


def account(rate: float, capacity: float) -> tuple[BudgetTracker, Clock, Metrics]:
    clock, metrics = Clock(), Metrics()
    return BudgetTracker(Account({BYTES: TokenBucket(rate, capacity, clock)}), metrics), clock, metrics


def choices(*stats: UnitStats) -> dict[Unit, Choice]:
    return {one.unit: Choice(RAW, "chosen") for one in stats}


def value(metrics: Metrics, name: str) -> float:
    return metrics.registry.get_sample_value(name) or 0.0


def test_without_a_bucket_everything_may_be_spent() -> None:
    spending = BudgetTracker(Account({}), Metrics())
    assert spending.offer([unit("a")], 1).bytes is None
    spending.begin(1, [unit("a")], choices(unit("a")), first=True)
    spending.committed(100, 1.0)


def test_the_first_save_is_free_and_shows_what_a_save_takes_besides() -> None:
    spending, clock, metrics = account(10.0, 1000.0)
    spending.begin(1, [unit("a")], choices(unit("a")), first=True)
    spending.committed(430, 1.0)
    clock.now = 50.0
    assert spending.offer([unit("a")], 1).bytes == 500.0 - 30.0
    assert value(metrics, "driftpoint_budget_bytes") == 500.0


def test_with_a_reserve_for_whole_versions_saves_come_at_even_intervals() -> None:
    whole, difference, life = 300, 100, 4
    for kept_back, longest in ((True, 15), (False, 30)):
        spending, clock, _ = account(10.0, 1000.0)
        saved, made = list[int](), 0
        for step in range(600):
            clock.now, position = float(step), made % (life + 1)
            one = replace(unit("a"), stored_bytes=difference)
            reserve = (whole - difference) * ((made - 1) % (life + 1)) / life if kept_back and made else 0.0
            offered = spending.offer([one], step, lambda kept=reserve: kept).bytes or 0.0
            if offered >= difference:
                spending.begin(step, [one], choices(one), first=not saved)
                spending.committed(whole if position == 0 else difference, 0.1)
                saved, made = [*saved, step], made + 1
        intervals = [after - before for before, after in pairwise(saved[1:])]
        assert max(intervals) == longest
        assert len(saved) == pytest.approx(600 / 14, abs=2)


def test_nothing_of_a_full_bucket_is_kept_back() -> None:
    spending, clock, _ = account(10.0, 450.0)
    for now, offered in ((10.0, 0.0), (30.0, 150.0), (44.0, 430.0), (100.0, 450.0)):
        clock.now = now
        assert spending.offer([unit("a")], 1, lambda: 200.0).bytes == pytest.approx(offered), now


def test_a_save_is_charged_when_it_begins_and_corrected_when_it_is_committed() -> None:
    spending, clock, _ = account(10.0, 1000.0)
    clock.now = 100.0
    spending.begin(1, [unit("a")], choices(unit("a")), first=False)
    assert spending.offer([unit("a")], 1).bytes == 600.0
    spending.committed(250, 1.0)  # it packed well
    assert spending.offer([unit("a")], 1).bytes == 750.0


def test_a_save_that_fails_stays_charged() -> None:
    spending, clock, _ = account(10.0, 1000.0)
    clock.now = 100.0
    spending.begin(1, [unit("a")], choices(unit("a")), first=False)
    spending.begin(2, [unit("a")], choices(unit("a")), first=False)
    spending.committed(400, 1.0)
    assert spending.offer([unit("a")], 1).bytes == 200.0


def test_a_bucket_too_small_for_a_layer_is_widened_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    spending, clock, _ = account(10.0, 50.0)
    clock.now = 1000.0
    with caplog.at_level(logging.WARNING, "driftpoint"):
        for _ in range(3):
            spending.offer([unit("a"), unit("small", values=1)], 1)
    assert len(caplog.records) == 1 and "takes 400 bytes, more than the 50" in caplog.text
    clock.now = 2000.0
    assert spending.offer([unit("a")], 1).bytes == 400.0


def test_what_bounds_demand_makes_a_debt_that_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    spending, clock, metrics = account(10.0, 1000.0)
    policy = Bounded(BudgetPolicy(), Bounds(max_staleness=15, interval=10))
    with caplog.at_level(logging.WARNING, "driftpoint"):
        for step in (10, 20):
            stats = [unit("a"), unit("b", staleness=1)]
            decision = policy.select(stats, spending.offer(stats, step), History(step, 1))
            assert decision.saved == (stats[0].unit,)
            spending.begin(step, stats, choices(stats[0]), first=False)
            spending.committed(400, 1.0)
    assert [record.message.split(";")[0] for record in caplog.records] == [
        (
            "budget: the save of step 10 exceeds the budget by 400 bytes, because bounds, save() or a failed policy "
            "require it"
        )
    ]
    assert value(metrics, "driftpoint_budget_overdraft_bytes_total") == 800.0
    assert value(metrics, "driftpoint_budget_bytes") == -800.0
    clock.now = 80.0
    assert spending.offer([unit("a")], 1).bytes == 0.0


def test_where_deciding_alone_takes_all_that_is_allowed_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    spending = BudgetTracker(Account({STALL: TokenBucket(0.01, 36.0, clock)}), Metrics())
    spending.begin(1, [unit("a")], choices(unit("a")), first=True)
    spending.on_copy_wait(3.0)
    spending.committed(400, 1.0)
    spending.offer([unit("a")], 1)
    with caplog.at_level(logging.WARNING, "driftpoint"):
        for _ in range(60):
            clock.now += 1.0
            spending.on_copy_wait(0.02)
            assert (spending.offer([unit("a")], 1).bytes or 0.0) <= 0.0
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "budget: there was nothing to spend at the last 20 decisions"
    ]


def test_how_long_the_largest_unit_takes_to_be_paid_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    spending, clock, _ = account(400 / 7200, 1e6)
    with caplog.at_level(logging.WARNING, "driftpoint"):
        for _ in range(3):
            clock.now += 1.0
            spending.offer([unit("a"), unit("small", values=1)], 1)
    assert [record.message.split(",")[:2] for record in caplog.records] == [
        ["budget: at the configured rate the largest unit", " 400 bytes raw"]
    ]
    assert "can be saved every 2 hours" in caplog.text


@dataclass
class Run:
    """A run whose saves write more or less than expected, and whose bounds demand some of them."""

    chance: random.Random
    rate: float
    capacity: float
    max_staleness: int | None
    spent: list[tuple[float, float, float, float]] = field(default_factory=list)
    """Time, bytes written, of them demanded, and beyond what was expected and kept back."""

    def go(self, steps: int) -> None:
        spending, clock, _ = account(self.rate, self.capacity)
        values = {f"layer.{n}": self.chance.randint(1, int(self.capacity / 4) - 30) for n in range(6)}
        pace = {name: 10 ** self.chance.uniform(-4, -1) for name in values}
        held: dict[str, int] = {}
        policy = Bounded(BudgetPolicy(), Bounds(self.max_staleness, interval=1))
        besides = self.chance.randint(0, 100)
        for step in range(1, steps):
            clock.now += self.chance.choice([0.1, 1.0, 5.0])
            stats = [
                unit(name, step - held[name], pace[name] * (step - held[name]), values[name])
                if name in held
                else unit(name, None, None, values[name])
                for name in values
            ]
            decision = policy.select(stats, spending.offer(stats, step), History(step, len(self.spent)))
            if not decision.saved:
                continue
            sizes = {one.unit: one.nbytes for one in stats}
            demanded = [one for one in decision.saved if decision.choices[one].reason.startswith("staleness")]
            spending.begin(step, stats, {one: decision.choices[one] for one in decision.saved}, first=not held)
            first = not held
            held.update({one.layer: step for one in decision.saved})
            worse = self.chance.choice([0, 0, 50])
            written = sum(sizes[one] for one in decision.saved) + besides + worse
            spending.committed(written, 1.0)
            if not first:
                self.spent.append((clock.now, written, sum(sizes[one] for one in demanded), besides + worse))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rate=st.floats(10, 500),
    capacity=st.floats(500, 4000),
    max_staleness=st.none() | st.integers(3, 40),
)
def test_over_every_window_the_budget_holds(seed: int, rate: float, capacity: float, max_staleness: int | None) -> None:
    """But for what bounds demanded, with what such a save takes besides, and what one save came out too large."""
    run = Run(random.Random(seed), rate, capacity, max_staleness)
    run.go(150)
    assert run.spent or rate * 150 < capacity
    for first, (begin, *_) in enumerate(run.spent):
        total = allowed = 0.0
        for now, written, demanded, beyond in run.spent[first:]:
            total += written
            allowed += demanded + (beyond if demanded else 0.0)
            assert total <= rate * (now - begin) + capacity + allowed + 150 + 1e-6
