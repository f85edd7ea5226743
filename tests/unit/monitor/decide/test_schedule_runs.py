"""``every: auto`` in real training on real stores: it adapts, keeps the bounds, and counts its own interruptions."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import monitor
from monitor.config.load import load_config
from monitor.decide import schedule
from monitor.decide.decider import Decider
from monitor.save import save_task
from policies.interval import FIRST
from store.catalog import open_catalog
from store.errors import ConfigError, StorageError
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.internals import job_of, session_of
from tests.support.jobs import Job, job
from tests.support.launch import python

AUTO: dict[str, Any] = {"every": "auto", "auto": {"gpu_hours_per_interruption": 1e-4}}
"""An interruption every 0.36 seconds: where nothing else does, this asks for a decision at almost every step."""


def reports(one: Job, steps: int, flush: bool = True) -> list[monitor.StepReport]:
    return [report for _ in range(steps) if (report := one.step(flush)) is not None]


def follow(found: list[monitor.StepReport]) -> bool:
    """Each decision comes where the one before it said."""
    return all(later.step == earlier.step + (earlier.interval or 0) for earlier, later in pairwise(found))


def test_it_decides_soon_and_learns_from_there(tmp_path: Path) -> None:
    """An interruption in 50 000 hours asks for seconds between decisions, in steps of milliseconds."""
    with job(tmp_path / "store", every="auto", auto={"max_loss_minutes": 600}) as one:
        one.ckpt.resume()
        found = reports(one, 200)
    assert (found[0].step, found[0].interval) == (FIRST, FIRST)
    assert follow(found) and {report.skipped for report in found} == {None}
    assert sorted(report.interval or 0 for report in found) == [report.interval for report in found]
    assert one.metric("driftpoint_decision_interval_steps") == found[-1].interval != FIRST
    assert one.metric("driftpoint_expected_interruptions_per_hour") == pytest.approx(1 / 50_000, rel=0.01)
    assert one.metric("driftpoint_decision_cost_seconds") > 0
    assert one.metric("driftpoint_saves_total") == len(found)


def test_saves_that_become_slow_are_given_time(tmp_path: Path) -> None:
    """A disk on which each payload takes half a second; an interruption is expected all the time."""
    with job(tmp_path / "store", **AUTO) as one:
        one.ckpt.resume()
        files = one.hook()
        files.before = lambda operation, path: (
            time.sleep(0.5) if operation == "create" and "safetensors" in path else None
        )
        found = []
        while len([report for report in found if report.skipped is None]) < 6:
            time.sleep(0.002)
            report = one.step(flush=False)
            if report is None:
                continue
            found.append(report)
            measured = job_of(one.ckpt).pace.timing.measured()
            if report.interval is not None and measured.durable is not None and measured.step is not None:
                assert measured.durable >= 0.5
                assert report.interval > math.floor(measured.durable / measured.step)
        made = [report.interval for report in found if report.interval is not None]
    assert made[0] == FIRST
    assert {report.skipped for report in found} <= {None, "busy"}
    assert verify(open_catalog(LocalFiles(tmp_path / "store"))).ok


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_what_decisions_cost_training_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They cost a fifth of a second, and then next to nothing; an interruption is expected every 3.6 seconds."""
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)  # steps, decisions, waits for copies
    monkeypatch.setattr(save_task, "time", SimpleNamespace(monotonic=clock))  # saves
    monkeypatch.setattr(schedule, "AdaptiveInterval", partial(schedule.AdaptiveInterval, clock=clock))
    with job(tmp_path / "store", every="auto", auto={"gpu_hours_per_interruption": 0.001}) as one:
        one.ckpt.resume()
        quick = Decider.decide

        def costing(seconds: float) -> Callable[..., Any]:
            def decide(*args: Any) -> Any:
                clock.now += seconds
                return quick(*args)

            return decide

        def decided(times: int) -> list[int]:
            intervals: list[int] = []
            while len(intervals) < times:
                clock.now += 0.02
                report = one.step()
                if report is not None and report.interval is not None:
                    intervals.append(report.interval)
            return intervals

        monkeypatch.setattr(Decider, "decide", costing(0.2))
        costly = decided(6)[-1]
        monkeypatch.setattr(Decider, "decide", costing(0.001))
        cheap = decided(5)[-1]
    assert cheap < costly


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [1, 2, 7, 40])
def test_max_staleness_holds_although_the_policy_saves_nothing(tmp_path: Path, max_staleness: int) -> None:
    """Over a resume too, and whatever the interval would like to be."""
    settings: dict[str, Any] = {
        "every": "auto",
        "policy": {"name": "threshold", "threshold": 1e9},
        "bounds": {"max_staleness": max_staleness},
        "retention": {"keep_last": 1000},
    }
    store = tmp_path / "store"
    for run in range(3):
        with job(store, **settings) as one:
            first = one.ckpt.resume()
            oldest = 0
            held: dict[Any, int] = {}
            for step in range(first + 1, first + 60 + run):
                report = one.step()
                if report is None:
                    assert not held or step - min(held.values()) <= max_staleness
                    continue
                assert report.interval is not None and report.interval <= max_staleness
                known = {stat.unit: stat.staleness for stat in report.stats if stat.staleness is not None}
                oldest = max([oldest, *known.values()])
                held = {unit: step - age for unit, age in known.items()}
                held.update(dict.fromkeys(report.saved or {}, step))
            assert oldest <= max_staleness
    found = open_catalog(LocalFiles(store))
    assert all(unit.staleness <= max_staleness for save in found.saves() for unit in found.manifest(save).units)


def test_after_a_resume_it_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    with job(tmp_path / "store", **AUTO) as one:
        one.ckpt.resume()
        reports(one, 20)
        last = max(save.step for save in open_catalog(LocalFiles(tmp_path / "store")).saves())
        state = one.weights() if last == 20 else None
    with job(tmp_path / "store", **AUTO) as other:
        assert other.ckpt.resume() == last
        assert other.ckpt.certificate is not None and other.ckpt.certificate.exact
        assert state is None or all((state[key] == value).all() for key, value in other.weights().items())
        assert reports(other, 5)[0].step == last + FIRST


def test_a_save_by_hand_is_one_more_and_starts_the_interval_anew(tmp_path: Path) -> None:
    with job(tmp_path / "store", every="auto", auto={"max_loss_minutes": 600}) as one:
        one.ckpt.resume()
        reports(one, 8)
        asked = one.ckpt.save(wait=True)
        assert (asked.skipped, asked.step) == (None, 8)
        found = reports(one, 8 + (asked.interval or 0))
    assert [report.step for report in found][:1] == [8 + (asked.interval or 0)]


def test_observe_paces_itself_and_writes_nothing(tmp_path: Path) -> None:
    settings = {"every": "auto", "auto": {"max_loss_minutes": 600}, "policy": {"name": "observe"}}
    with job(tmp_path / "store", **settings) as one:
        one.ckpt.resume()
        found = reports(one, 70)
    assert [(report.step, report.skipped) for report in found] == [(s, "observe") for s in (3, 6, 18, 66)]
    assert not (tmp_path / "store").exists()


def test_a_budget_that_pays_for_nothing_saves_nothing_and_the_pace_goes_on(tmp_path: Path) -> None:
    settings = {
        "every": "auto",
        "auto": {"max_loss_minutes": 600},
        "policy": "budget",
        "budget": {"bytes_per_hour": 1.0, "burst_seconds": 1.0},
    }
    with job(tmp_path / "store", **settings) as one:
        one.ckpt.resume()
        found: list[monitor.StepReport] = []
        while len(found) < 4:  # how many steps that takes depends on how long the one save did
            found += reports(one, 1)
    assert follow(found)
    assert [report.skipped for report in found] == [None] + ["nothing"] * (len(found) - 1)


# ---- interruptions

ENDING = """
import os, signal, sys
from pathlib import Path
from tests.support.jobs import Job
job = Job(Path(sys.argv[1]), every="auto")
job.ckpt.resume()
for _ in range(int(sys.argv[3])):
    job.step()
match sys.argv[2]:
    case "killed": os.kill(os.getpid(), signal.SIGKILL)
    case "error": raise RuntimeError("training went wrong")
    case "error in with":
        with job.ckpt: raise RuntimeError("training went wrong")
    case "closed": job.ckpt.close()
    case "saved by hand": job.ckpt.save(wait=True); job.ckpt.save(wait=True); job.ckpt.close()
"""


def ends(store: Path, how: str, steps: int = 4, *, fresh: bool = False) -> int:
    """Train, and end. fresh: in a process of its own making, where how Python itself ends matters."""
    script = store.with_name(f"{store.name}-ends.py")
    script.write_text(ENDING)
    return python([script, store, how, steps], store.parent, fresh=fresh, timeout=180).returncode


def interruptions(store: Path) -> float:
    with job(store, every="auto") as one:
        return one.metric("driftpoint_interruptions")


@pytest.mark.parametrize(
    ("how", "code", "counted"),
    [
        ("killed", -signal.SIGKILL, 1),
        ("error", 1, 1),
        ("error in with", 1, 1),
        ("closed", 0, 0),
        ("saved by hand", 0, 0),
        ("at the end of the script", 0, 0),
    ],
)
@pytest.mark.slow
def test_what_is_an_interruption(tmp_path: Path, how: str, code: int, counted: int) -> None:
    assert ends(tmp_path, how, fresh=True) == code
    assert interruptions(tmp_path) == counted
    assert interruptions(tmp_path) == counted  # and is not counted again


@pytest.mark.slow
def test_they_are_kept_count_of_over_many_starts(tmp_path: Path) -> None:
    for how in ("killed", "closed", "killed"):
        ends(tmp_path, how)
    ends(tmp_path, "killed", steps=1)  # before its first commit
    with job(tmp_path, every="auto") as one:
        assert one.metric("driftpoint_interruptions") == 2
        incarnation = session_of(one.ckpt).incarnation
        assert incarnation is not None and 0 < incarnation.rank_seconds < 60
        assert one.metric("driftpoint_expected_interruptions_per_hour") == 0  # nothing was decided yet
        one.ckpt.resume()
        reports(one, FIRST)
        assert one.metric("driftpoint_expected_interruptions_per_hour") > 1  # three in seconds of running


def test_under_a_fixed_interval_nothing_is_counted_nor_written(tmp_path: Path) -> None:
    with job(tmp_path / "store", every=1) as one:
        reports(one, 2)
    assert [path.name for path in (tmp_path / "store" / "epochs").iterdir()] == ["000001.json"]
    with job(tmp_path / "store", every="auto"):
        pass
    assert sorted(path.name for path in (tmp_path / "store" / "epochs").iterdir()) == [
        "000001.json", "000002.closed.json", "000002.json",
    ]  # fmt: skip


def test_a_mark_that_cannot_be_written_is_told_and_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with job(tmp_path / "store", every="auto") as one:
        one.ckpt.resume()
        reports(one, FIRST)

        def full(operation: str, path: str) -> None:
            if operation == "create" and "epochs" in path:
                raise StorageError(f"cannot write {path}: the filesystem is full")

        one.hook().before = full
    assert "noting that the job was closed failed" in caplog.text
    assert interruptions(tmp_path / "store") == 1


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"every": "sometimes"}, "every: it must be a number of steps >= 1, or auto (it is 'sometimes')"),
        ({"every": 0}, "every: it must be a number of steps >= 1, or auto (it is 0)"),
        ({"every": 10, "auto": {"max_loss_minutes": 5}}, "auto: the section holds under `every: auto` only"),
        ({"every": "auto", "auto": {"max_loss_minutes": 0}}, "auto.max_loss_minutes"),
        ({"every": "auto", "auto": {"max_loss_minutes": math.inf}}, "auto.max_loss_minutes"),
        ({"every": "auto", "auto": {"gpu_hours_per_interruption": -1}}, "auto.gpu_hours_per_interruption"),
        ({"every": "auto", "auto": {"preemptions_per_hour": math.nan}}, "auto.preemptions_per_hour"),
        ({"every": "auto", "auto": {"preemption_per_hour": 1}}, "did you mean 'preemptions_per_hour'?"),
        ({"every": "auto", "bounds": {"max_staleness": 0}}, "max_staleness"),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(values)
    assert told in str(caught.value)


@pytest.mark.parametrize("every", ["auto", 7, "7", 7.0])
def test_what_was_a_number_of_steps_still_is(every: Any) -> None:
    from monitor.config.load import load_config

    assert load_config({"every": every}).every == ("auto" if every == "auto" else 7)
