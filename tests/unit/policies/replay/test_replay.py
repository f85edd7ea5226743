"""Replays of made-up runs, where it is known what has to come out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from deploy.simulate.plans import SimulationRequest, plan_of
from monitor.config.load import load_config
from policies.accounting import Fitted
from policies.replay.failure_cost import goodput, latest_first
from policies.replay.recorded_run import Costs, Run, run_of
from policies.replay.replay import replay
from policies.replay.state import ReplayResult
from store.errors import UsageError
from store.names import WEIGHTS, Unit
from store.trace import CommitLine, DecisionLine, FailedLine, Line, MovedLine, ResumedLine, Trace
from tests.support.traces import Mover, decisions, job_line, moved_line, power, trace_of

EVERY = 10
RATE = 1e-3


def movers(layers: int = 4, exponent: float = 1.0) -> list[Mover]:
    return [Mover(Unit(f"layers.{i}", WEIGHTS), 400, power(RATE, exponent), i) for i in range(layers)]


def run(steps: int = 200, **settings: Any) -> Run:
    return run_of(trace_of(movers(), range(EVERY, steps + 1, EVERY), every=EVERY, **settings))


def replayed(found: Run, costs: Costs | None = None, **settings: Any) -> ReplayResult:
    return replay(found, plan_of(SimulationRequest("it", load_config({"every": EVERY, **settings})), found, costs))


def slow(seconds: float, nbytes: int = 1600) -> Costs:
    """Writing so many bytes takes so many seconds."""
    write = Fitted()
    write.learn(nbytes, seconds)
    return Costs(Fitted(), write, 0.0)


def test_everything_every_time() -> None:
    found = replayed(run())
    assert [one.step for one in found.committed] == list(range(EVERY, 201, EVERY))
    assert found.written == 20 * 1600
    exposure = found.exposure
    # Linear drift, saved every 10 steps: the mean of (r t)^2 over t from 0 to 10, and four layers of it.
    assert exposure.total.mean == pytest.approx(4 * (RATE * EVERY) ** 2 / 3, rel=1e-6)
    assert exposure.total.worst == pytest.approx(4 * (RATE * EVERY) ** 2, rel=1e-6)
    assert exposure.drift[WEIGHTS].worst == pytest.approx(RATE * EVERY)
    assert (exposure.lost.mean, exposure.lost.worst) == (EVERY / 2, EVERY)
    assert exposure.rewound.mean == exposure.lost.mean
    assert exposure.unknown == 0


def lines_of_two_jobs() -> Sequence[Line]:
    lines = trace_of(movers(), range(EVERY, 201, EVERY), every=EVERY).lines
    body = [line for line in lines if isinstance(line, DecisionLine | CommitLine)]
    later = [line.model_copy(update={"seconds": line.seconds + 3.5}) for line in body]
    mixed = [line for both in zip(later, body, strict=True) for line in both]
    return lines[0], *mixed


def lines_of_two_models() -> Sequence[Line]:
    lines = trace_of(movers(2), range(EVERY, 101, EVERY), every=EVERY).lines
    others = trace_of(movers(5), range(EVERY, 201, EVERY), every=EVERY).lines
    late = [line for line in others if isinstance(line, MovedLine) and line.step > 100]
    assert late
    return *lines, *late


@pytest.mark.parametrize("make", [lines_of_two_jobs, lines_of_two_models])
def test_a_trace_of_several_jobs_is_refused(make: Callable[[], Sequence[Line]]) -> None:
    """Otherwise it would pass for the trace of one job, with wrong results."""
    with pytest.raises(UsageError, match="mixes several jobs"):
        run_of(Trace(tuple(make()), 0))


def test_half_as_often() -> None:
    found = replayed(run(), every=20)
    assert [one.step for one in found.committed] == list(range(20, 201, 20))
    assert found.exposure.total.mean == pytest.approx(4 * (RATE * 20) ** 2 / 3, rel=1e-6)


def test_a_finer_interval_than_the_trace_has_takes_what_there_is() -> None:
    assert len(replayed(run(), every=3).committed) == 20


def test_an_interval_that_does_not_divide_takes_the_nearest_moments() -> None:
    assert [one.step for one in replayed(run(60), every=25).committed] == [30, 50]


def test_turns_of_layers() -> None:
    found = replayed(run(400), policy={"name": "parity", "k": 4})
    assert [len(one.saved) for one in found.committed] == [4] + [1] * 39
    assert found.written == 1600 + 39 * 400
    # In the long run a layer is saved every 40 steps.
    assert found.exposure.total.mean == pytest.approx(4 * (RATE * 40) ** 2 / 3, rel=0.1)
    assert found.exposure.lost.mean == 5.0
    assert found.exposure.rewound.mean == pytest.approx(5 + 15, rel=0.1)


def test_a_save_that_is_still_written_puts_off_the_next() -> None:
    found = replayed(run(), slow(15.0))
    assert [one.skipped for one in found.decisions] == [None, "busy"] * 10
    # What a failure finds is the save before until 15 s after a decision, each second one of which saves.
    assert found.exposure.lost.worst == 35
    assert found.exposure.lost.mean == pytest.approx((15 * 27.5 + 5 * 17.5) / 20, rel=0.1)


def test_a_save_is_worth_nothing_before_it_is_durable() -> None:
    quick, late = replayed(run(), slow(0.0)), replayed(run(), slow(8.0))
    assert [one.step for one in quick.committed] == [one.step for one in late.committed]
    assert late.exposure.lost.mean == pytest.approx(5 + 8, rel=0.1)
    assert late.exposure.total.mean > quick.exposure.total.mean
    # From the beginning of the run: 10 steps to the first decision, 8 until it is durable.
    assert (quick.exposure.unprotected, late.exposure.unprotected) == (10, 18)


def decaying(every: int) -> ReplayResult:
    """Units that move ten times as far in the first fifth of the run: the tables of its steps differ."""
    lines: list[Line] = [job_line(movers(), {"every": EVERY}), *decisions(range(EVERY, 1001, EVERY))]
    for step in range(EVERY, 1001, EVERY):
        fast = [Mover(one.unit, one.nbytes, power(RATE * (10 if step <= 200 else 1), 1.0)) for one in movers()]
        lines.append(moved_line(fast, step, (10, 20, 40, 80, 160, 320)))
    lines.sort(key=lambda line: getattr(line, "step", 0))
    return replayed(run_of(Trace(tuple(lines), 0)), every=every)


def test_saving_seldom_is_not_flattered_by_the_steps_that_it_leaves_out() -> None:
    often, seldom = decaying(EVERY), decaying(300)
    since = latest_first([often.timeline, seldom.timeline])
    assert since == (0, 300.0)
    mine, other = (one.seen_from(since).exposure for one in (often, seldom))
    assert mine.total.mean < other.total.mean
    # The same steps for both, and all of them: after the last save, too.
    assert mine.total.weight == other.total.weight == 700
    assert other.lost.worst == 300
    assert (often.exposure.unprotected, seldom.exposure.unprotected) == (10, 300)


def test_bounds_hold() -> None:
    found = replayed(run(), policy={"name": "threshold", "threshold": 1.0}, bounds={"max_staleness": 50})
    assert found.exposure.staleness.worst == 50
    found = replayed(run(), policy={"name": "threshold", "threshold": 1.0}, bounds={"max_drift": 0.025})
    assert found.exposure.drift[WEIGHTS].worst == pytest.approx(0.03)


def test_a_budget_holds_over_every_window() -> None:
    rate, burst = 40.0, 60.0
    found = replayed(run(2000), policy="budget", budget={"bytes_per_hour": 3600 * rate, "burst_seconds": burst})
    first, *later = found.committed
    assert len(first.saved) == 4 and len(later) > 50
    for begin, one in enumerate(later):
        for last in range(begin, len(later)):
            spent = sum(each.written for each in later[begin : last + 1])
            assert spent <= rate * (later[last].seconds - one.seconds) + rate * burst + 1e-6
    spent = sum(one.written for one in later)
    assert spent == pytest.approx(rate * 2000, rel=0.05)


def test_twice_the_same() -> None:
    settings: Mapping[str, Any] = {"policy": "budget", "budget": {"bytes_per_hour": 3600 * 30.0}, "encoding": "compact"}
    one, other = (replayed(run(), **settings) for _ in range(2))
    assert (one.decisions, one.exposure) == (other.decisions, other.exposure)


def test_a_save_that_failed_when_it_was_recorded_fails() -> None:
    base = decisions(range(EVERY, 61, EVERY))
    saved = dict.fromkeys(range(4), "raw")
    lines: list[Line] = [job_line(movers(), {"every": EVERY})]
    for line in base:
        lines.append(line.model_copy(update={"saved": saved, "skipped": None}))
        if line.step == 30:
            lines.append(FailedLine(step=30, seconds=line.seconds, reason="StorageError"))
        else:
            sizes = dict.fromkeys(range(4), (400, "raw", 0.0, None))
            lines.append(CommitLine(step=line.step, seconds=line.seconds, took=0.0, written=1600, sizes=sizes))
    lines.append(moved_line(movers(), 60, (10, 20, 40)))
    found = replayed(run_of(Trace(tuple(lines), 0)), policy={"name": "parity", "k": 2})
    assert [one.step for one in found.committed] == [10, 20, 40, 50, 60]
    assert found.exposure.lost.worst == 20


def test_after_a_resume_drift_begins_at_what_was_resumed() -> None:
    one = movers()
    lines: list[Line] = [job_line(one, {"every": EVERY}), *decisions(range(EVERY, 101, EVERY))]
    lines.append(moved_line(one, 100, (10, 20, 40, 80)))
    lines.append(job_line(one, {"every": EVERY}, started=500.0))
    lines.append(ResumedLine(step=60, newest=60, seconds=1.0))
    lines += decisions(range(70, 161, EVERY))
    lines.append(moved_line(one, 160, (10, 20, 40, 80)))
    found = replayed(run_of(Trace(tuple(lines), 0)), policy={"name": "threshold", "threshold": 0.0499})
    assert [decision.step for decision in found.committed] == [10, 60, 110, 160]
    first = next(decision for decision in found.decisions[10:] if decision.step == 70)
    assert [shown.drift for shown in first.stats] == pytest.approx([0.01] * 4)
    assert [shown.staleness for shown in first.stats] == [10] * 4


def went_back() -> Run:
    """A job that resumed at step 80, where the newest commit is of step 100."""
    one = movers()
    lines: list[Line] = [job_line(one, {"every": EVERY}), *decisions(range(EVERY, 101, EVERY))]
    lines += [moved_line(one, 100, (10, 20, 40, 80)), job_line(one, {"every": EVERY}, started=500.0)]
    lines += [ResumedLine(step=80, newest=100, seconds=1.0), *decisions(range(90, 161, EVERY))]
    lines.append(moved_line(one, 160, (10, 20, 40, 80)))
    return run_of(Trace(tuple(lines), 0))


def test_a_composite_that_goes_back_saves_everything_next() -> None:
    parity: dict[str, Any] = {"policy": {"name": "parity", "k": 4}}
    for settings, saved in ((parity, 4), ({**parity, "resume": {"at": "newest"}}, 1)):
        found = replayed(went_back(), **settings)
        assert [len(decision.saved) for decision in found.committed[10:] if decision.step == 90] == [saved]
        assert found.exposure.unprotected == EVERY


def test_under_a_budget_only_what_the_job_went_back_behind_is_saved_next() -> None:
    """As :meth:`monitor.ledger.Ledger.adopt` has it: a full save at each resume might use up all of the budget."""
    budget = {"bytes_per_hour": 3600 * 20.0, "burst_seconds": 30.0}  # a layer at every second decision
    found = replayed(went_back(), policy="budget", budget=budget)
    newest = {unit: decision.step for decision in found.decisions[:10] for unit in decision.saved}
    assert sorted(newest.values()) == [30, 50, 70, 90]
    first = next(decision for decision in found.decisions[10:] if decision.step == 90)
    shown = {one.unit: one.staleness for one in first.stats}
    assert shown == {unit: None if step > 80 else 90 - step for unit, step in newest.items()}


def test_a_restart_gives_no_burst() -> None:
    one = movers()
    lines: list[Line] = []
    for process in range(5):
        lines.append(job_line(one, {"every": EVERY}, started=1000.0 * process))
        if process:
            lines.append(ResumedLine(step=40 * process, newest=40 * process, seconds=0.0))
        lines += decisions(range(40 * process + EVERY, 40 * process + 41, EVERY))
        lines.append(moved_line(one, 40 * process + 40, (10, 20)))
    budget = {"bytes_per_hour": 3600 * 20.0, "burst_seconds": 1e4}
    found = replayed(run_of(Trace(tuple(lines), 0)), policy="budget", budget=budget, resume={"at": "newest"})
    later = sum(decision.written for decision in found.committed[1:])
    assert 0 < later <= 20 * 31 * 5


@pytest.mark.parametrize(("newest", "kept"), [(40, True), (30, False)])
def test_the_last_save_of_a_killed_job_counts_if_it_was_resumed(newest: int, kept: bool) -> None:
    """Its commit is told only when training learns of it, which a killed job never did."""
    one, saved = movers(), dict.fromkeys(range(4), "raw")
    sizes = dict.fromkeys(range(4), (400, "raw", 0.0, None))
    lines: list[Line] = [job_line(one, {"every": EVERY})]
    for line in decisions(range(EVERY, 41, EVERY)):
        lines.append(line.model_copy(update={"saved": saved, "skipped": None}))
        if line.step < 40:
            lines.append(CommitLine(step=line.step, seconds=line.seconds, took=0.0, written=1600, sizes=sizes))
    lines += [moved_line(one, 40, (10, 20)), job_line(one, {"every": EVERY}, started=500.0)]
    lines += [ResumedLine(step=newest, newest=newest, seconds=1.0), *decisions(range(newest + EVERY, 81, EVERY))]
    lines.append(moved_line(one, 80, (10, 20)))
    run = run_of(Trace(tuple(lines), 0))
    found = replayed(run, policy="full")
    before = [
        decision.step for decision in found.committed if decision.seconds <= 40 and decision in found.decisions[:4]
    ]
    assert before == [10, 20, 30] + [40] * kept
    assert found.written == 1600 * (len(before) + len(run.segments[1].decisions))
    # Of the segment of the commit only: one of a job that had gone back is older, however great its step.
    if not kept:
        back = [line.model_copy(update={"newest": 100}) if isinstance(line, ResumedLine) else line for line in lines]
        assert len(replayed(run_of(Trace(tuple(back), 0))).committed) == len(found.committed)


def test_what_is_not_finite_is_not_saved() -> None:
    lines: list[Line] = [job_line(movers(), {"every": EVERY})]
    lines += [
        line.model_copy(update={"sick": (1,) if line.step in (30, 40) else ()})
        for line in decisions(range(EVERY, 61, EVERY))
    ]
    lines.append(moved_line(movers(), 60, (10, 20, 40)))
    found = replayed(run_of(Trace(tuple(lines), 0)), policy={"name": "threshold", "threshold": 0.0})
    sick = Unit("layers.1", WEIGHTS)
    assert [one.step for one in found.committed if sick in one.saved] == [10, 20, 50, 60]
    assert found.exposure.staleness.worst == 30


def test_a_decision_line_without_stats_is_replayed_all_the_same() -> None:
    line = DecisionLine(step=30, seconds=30.0, commits=3, skipped="busy")
    lines = [line if one.step == 30 else one for one in decisions(range(EVERY, 61, EVERY))]
    found = run_of(Trace((job_line(movers(), {"every": EVERY}), *lines, moved_line(movers(), 60, (10, 20, 40))), 0))
    assert 30 in [one.step for one in replayed(found, policy={"name": "parity", "k": 2}).committed]


def test_goodput() -> None:
    assert goodput(stall_share=0.0, lost_seconds=0.0, restart_seconds=0.0, mtbf_seconds=1.0) == 1.0
    assert goodput(stall_share=0.1, lost_seconds=10.0, restart_seconds=100.0, mtbf_seconds=1000.0) == pytest.approx(
        0.9 * 990 / 1100
    )
    assert goodput(stall_share=0.0, lost_seconds=9.0, restart_seconds=0.0, mtbf_seconds=3.0) == 0.0
    assert not math.isnan(goodput(stall_share=1.0, lost_seconds=0.0, restart_seconds=0.0, mtbf_seconds=1e9))
