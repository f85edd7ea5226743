"""Policy ``budget`` in a simulation of a trace, against the computed least damage: see test_budget_optimum."""

from __future__ import annotations

import pytest

from deploy.simulate.plans import SimulationRequest, plan_of
from monitor.config.load import load_config
from policies.replay.recorded_run import Run, run_of
from policies.replay.replay import replay
from policies.replay.state import ReplayResult
from tests.support.traces import Mover, power, trace_of
from tests.unit.policies.test_budget_optimum import CASES, Source, affordable, optimum

STEPS = 1600


def run_from(sources: list[Source], steps: int = STEPS) -> Run:
    movers = [Mover(one.unit, one.nbytes, power(one.rate, one.growth), one.position) for one in sources]
    return run_of(trace_of(movers, range(1, steps + 1), every=1))


def replayed(run: Run, **settings: object) -> ReplayResult:
    return replay(run, plan_of(SimulationRequest("it", load_config({"every": 1, **settings})), run))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_simulated_damage_is_near_the_least_there_can_be(name: str) -> None:
    case = CASES[name]
    units = case.sources()
    per_step = affordable(units)
    encoding = {"fp32": case.coarsest} if case.coarsest != "raw" else "raw"
    budget = {"bytes_per_hour": 3600 * per_step, "burst_seconds": 50}
    half, whole = (
        replayed(run_from(units, steps), policy="budget", encoding=encoding, budget=budget)
        for steps in (STEPS // 2, STEPS)
    )
    later = sum(one.written for one in whole.committed[1:])
    assert later <= per_step * (STEPS + 50)
    # Of the second half, to which the first full save matters no more.
    damage = (whole.exposure.total.total - half.exposure.total.total) / (STEPS - STEPS // 2)
    best = optimum(case, units, per_step)
    assert best <= damage <= 1.05 * best


@pytest.mark.slow
def test_turns_of_the_same_bytes_cost_more() -> None:
    units = CASES["linear"].sources()
    per_step, run = affordable(units), run_from(units)
    mine = replayed(run, policy="budget", budget={"bytes_per_hour": 3600 * per_step, "burst_seconds": 50})
    turns = replayed(run, policy={"name": "parity", "k": 40})
    seldom = replayed(run, every=40)
    assert mine.written <= turns.written * 1.02
    assert mine.exposure.total.mean < 0.5 * min(turns.exposure.total.mean, seldom.exposure.total.mean)
