"""Real training on a real store, recorded, and replayed: the recorded configuration gives the recorded run."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deploy.simulate.plans import SimulationRequest, plan_of, recorded_config
from deploy.simulate.simulation import read_trace
from monitor.config.load import load_config
from policies.base import UnitStats
from policies.replay.movement import movement_of
from policies.replay.recorded_run import Costs, Run, run_of
from policies.replay.replay import replay
from policies.replay.state import ReplayResult
from store.trace import CommitLine, DecisionLine, Trace
from tests.support.jobs import Job, job
from tests.support.kept import kept_step, memory
from tests.support.slow import others_slow

POLICIES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "full, compact and packed": {"policy": "full", "encoding": "compact", "packing": 1},
    "parity": {"policy": {"name": "parity", "k": 3}, "encoding": "compact", "packing": 1, "differences": True},
    "threshold": {"policy": {"name": "threshold", "threshold": 0.05}, "encoding": "compact"},
    "threshold in bounds": {"policy": {"name": "threshold", "threshold": 0.2}, "bounds": {"max_staleness": 4}},
    "budget": {"policy": "budget", "budget": {"bytes_per_hour": 1e9, "burst_seconds": 0.3}, "encoding": "compact"},
    "budget of time": {"policy": "budget", "budget": {"stall_share": 0.2, "storage_share": 0.3, "burst_seconds": 0.3}},
    "auto": {"policy": "auto", "budget": {"bytes_per_hour": 1e10, "burst_seconds": 0.3}, "encoding": "compact"},
    "auto, with differences": {
        "policy": "auto",
        "budget": {"bytes_per_hour": 1e10, "burst_seconds": 0.3},
        "encoding": "compact",
        "packing": 1,
        "differences": True,
    },
    "observe": {"policy": {"name": "observe", "inner": {"name": "parity", "k": 3}}, "encoding": "compact"},
}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def recorded(store: Path, steps: int = 14, asked_at: int | None = None, **settings: Any) -> Trace:
    """Training of so many steps, on from what the store holds; ``save()`` besides at one of them."""
    with job(store, width=64, **settings) as one:
        begin = one.ckpt.resume()
        for step in range(begin + 1, begin + steps + 1):
            one.step()
            if step == asked_at:
                one.ckpt.save(wait=True)
    return read_trace(store.with_name(store.name + ".trace.jsonl"))


def again(run: Run) -> ReplayResult:
    return replay(run, plan_of(SimulationRequest("again", recorded_config(run)), run))


def seen(run: Run) -> list[list[UnitStats]]:
    """What the policy was shown at each decision, from the trace alone."""
    return [
        [
            UnitStats(
                unit=one.unit, position=one.position, block=one.block, nbytes=one.nbytes, drift=line.drift[at],
                staleness=line.staleness[at], finite=at not in line.sick, moving=one.moving,
                changed_shape=at in line.changed, error=line.error[at], numel=one.numel, encoding=line.encoding[at],
                stored_bytes=line.stored_bytes[at],
            )
            for at, one in enumerate(segment.units)
        ]
        for segment in run.segments
        for line in (point.line for point in segment.decisions)
    ]  # fmt: skip


def require_same(run: Run, trace: Trace) -> ReplayResult:
    found = again(run)
    lines = [line for line in trace.lines if isinstance(line, DecisionLine)]
    commits = [line for line in trace.lines if isinstance(line, CommitLine)]
    units = [unit.unit for unit in run.segments[-1].units]
    assert found.as_recorded
    assert [one.saved for one in found.decisions] == [
        {units[index]: encoding for index, encoding in line.saved.items()} for line in lines
    ]
    assert [one.offered for one in found.decisions] == [line.offered for line in lines]
    assert [one.written for one in found.committed] == [line.written for line in commits]
    policy = plan_of(SimulationRequest("again", recorded_config(run)), run)
    for one, shown in zip(found.decisions, seen(run), strict=True):
        if policy.policy.needs_drift:
            assert list(one.stats) == shown
        else:
            assert [replace(each, drift=None) for each in one.stats] == [replace(each, drift=None) for each in shown]
    assert found.stall == pytest.approx(sum(line.stall + line.copy_wait for line in lines))
    return found


@pytest.mark.parametrize("name", POLICIES)
def test_the_recorded_configuration_gives_the_recorded_run(tmp_path: Path, name: str) -> None:
    trace = recorded(tmp_path / "store", **POLICIES[name])
    found = require_same(run_of(trace), trace)
    assert len(found.decisions) == 14 and len(found.committed) > 1


@pytest.mark.parametrize("name", ["full", "parity", "budget", "auto", "auto, with differences"])
def test_so_it_does_over_a_restart_and_a_save_by_hand(tmp_path: Path, name: str) -> None:
    for _ in range(2):
        trace = recorded(tmp_path / "store", 8, asked_at=5, **POLICIES[name])
    run = run_of(trace)
    assert [segment.resumed for segment in run.segments] == [False, True]
    assert len(require_same(run, trace).decisions) == 17


@pytest.mark.parametrize("name", ["full", "parity", "budget", "auto", "auto, with differences"])
def test_so_it_does_where_the_end_of_the_job_allowed_only_a_part(tmp_path: Path, name: str) -> None:
    """How much was saved then is no matter of policy: under another one it is the same."""
    with job(tmp_path / "store", width=64, preemption={"exit": False}, **POLICIES[name]) as one:
        for _ in range(6):
            one.step()
        one.ckpt.flush()
        for _ in range(20):  # as if the storage had become slow: a part first, and then more
            one.ckpt._budget_tracker.writing.learn(1e5, 100.0)
        one.ckpt.preempt()
        one.step()
        assert one.metric("driftpoint_preemptions_total", outcome="full") == 1
    trace = read_trace(tmp_path / "store.trace.jsonl")
    last = [line for line in trace.lines if isinstance(line, DecisionLine) and line.preempted]
    assert len(last) > 1 and 0 < len(last[0].saved) < 15 and {line.step for line in last} == {7}
    run = run_of(trace)
    require_same(run, trace)
    other = replay(
        run, plan_of(SimulationRequest("other", load_config({"policy": {"name": "parity", "k": 5}, "every": 1})), run)
    )
    units = [unit.unit for unit in run.segments[-1].units]
    assert {units[index] for index in last[0].saved} <= set(other.decisions[-len(last)].saved)


@pytest.mark.parametrize("name", others_slow(["parity", "threshold"]))
def test_what_another_policy_would_have_done_is_what_it_does(tmp_path: Path, name: str) -> None:
    """The same training twice, recorded under ``full`` and under another policy: the replay of the first against the
    second. Saves take no time in both, since how long they take differs from run to run."""
    settings = {**POLICIES[name], "packing": "none", "differences": False}
    plain = run_of(recorded(tmp_path / "plain", 30, policy="full"))
    torch.manual_seed(0)
    truth = run_of(recorded(tmp_path / "other", 30, **settings))
    asked = SimulationRequest(name, recorded_config(truth))
    found, want = (replay(run, plan_of(asked, run, Costs(overhead=plain.costs.overhead))) for run in (plain, truth))
    assert want.as_recorded and not found.as_recorded
    assert len(found.committed) == pytest.approx(len(want.committed), abs=1)
    if name == "parity":
        assert [one.saved for one in found.committed] == [one.saved for one in want.committed]
        commits = [point.commit for point in truth.decisions if point.commit is not None]
        sizes = [sum(size[0] for size in commit.sizes.values()) for commit in commits]
        sizes = pytest.approx(sizes, abs=8)  # each tensor ends with a block of its own, which units do not tell
        assert [one.written - plain.costs.overhead for one in found.committed] == sizes
    off = np.array(drift_off(plain, truth))
    assert len(off) > 100
    # Single ones are off by much where steps differ much, as in a model this small; together they are not.
    assert np.median(np.abs(off)) < 0.05
    assert abs(np.mean(np.log1p(off))) < 0.1


def drift_off(plain: Run, truth: Run) -> list[float]:
    """How far drift estimated from one trace is off from that measured in the other, relative, in later training."""
    movement, found = movement_of(plain.segments[0]), []
    for point in truth.decisions[10:]:
        line = point.line
        for index, (drift, staleness) in enumerate(zip(line.drift, line.staleness, strict=True)):
            if drift and staleness:
                since = np.full(len(line.drift), float(line.step - staleness))
                moved = movement.distance(line.step, since)[index]
                found.append(math.hypot(moved, line.error[index]) / drift - 1)
    return found


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "observe"])
def test_a_run_that_went_on_from_memory_is_replayed_too(tmp_path: Path, name: str) -> None:
    store = tmp_path / "store"
    settings = {"width": 64, "every": 4, "memory": memory(store), **POLICIES[name]}
    one = Job(store, **settings)
    one.ckpt.resume()
    for _ in range(10):
        kept_step(one)
    one.ckpt.finish(clean=False)
    two = Job(store, **settings)
    assert two.ckpt.resume() == 10
    for _ in range(14):
        kept_step(two)
    two.ckpt.close()
    trace = read_trace(store.with_name(store.name + ".trace.jsonl"))
    require_same(run_of(trace), trace)


@pytest.mark.parametrize("seed", others_slow(range(16)))
def test_random_runs_of_several_jobs_are_replayed_as_recorded(tmp_path: Path, seed: int) -> None:
    draw, store = random.Random(seed), tmp_path / "store"
    settings = {"width": 64, "every": draw.choice((1, 1, 2, 3)), **POLICIES[draw.choice(list(POLICIES))]}
    settings["resume"] = {"at": draw.choice(("effective", "newest"))}
    for _ in range(draw.randint(2, 4)):
        one, asked_at = Job(store, **settings), draw.randint(1, 12)
        one.ckpt.resume()
        for step in range(1, draw.randint(2, 9) + 1):
            one.step(flush=draw.random() < 0.8)
            if step == asked_at:
                one.ckpt.save(wait=draw.random() < 0.7)
        end = draw.choice(("closed", "saved", "cut off"))
        if end == "cut off":
            one.ckpt.finish(clean=False)
        else:
            one.ckpt.close(save=end == "saved")
    run = run_of(read_trace(store.with_name(store.name + ".trace.jsonl")))
    points = [(segment, point) for segment in run.segments for point in segment.decisions]
    recorded_saves = [
        {segment.units[index].unit: encoding for index, encoding in (point.line.saved if point.saved else {}).items()}
        for segment, point in points
    ]
    found = again(run)
    assert [one.saved for one in found.decisions] == recorded_saves
    assert found.as_recorded
