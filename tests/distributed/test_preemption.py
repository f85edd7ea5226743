"""Jobs that real signals tell of their end: what is saved, how they exit, and what stands where time is too short."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from store.catalog import Catalog, open_catalog
from store.certificate import certify
from store.resolve import resolve
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.launch import Launched, alone, torchrun

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

OFTEN: dict[str, Any] = {"every": 2}


def run(directory: Path, steps: int = 12, **spec: Any) -> Launched:
    return alone("preempt.py", {"steps": steps, **spec}, directory)


def catalog(directory: Path) -> Catalog:
    """The store, whole to the last byte."""
    found = open_catalog(LocalFiles(directory / "store"))
    report = verify(found)
    assert [commit.problems for commit in report.commits] == [()] * len(report.commits)
    return found


def steps(directory: Path) -> list[int]:
    return [save.step for save in catalog(directory).saves()]


def digests(launched: Launched, rank: int = 0) -> dict[int, str]:
    return {one["step"]: one["digest"] for one in launched.of("state", rank=rank)}


@pytest.mark.core
def test_everything_is_saved_and_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    uninterrupted = run(whole, settings=OFTEN)
    assert uninterrupted.code == 0 and uninterrupted.one("finished")["restored"]
    ended = run(tmp_path, settings=OFTEN, signals={"0": 5})
    assert ended.code == 75, ended.output
    assert ended.one("left") == {"kind": "left", "rank": 0, "step": 5, "code": 75, "skipped": None, "saved": 15}
    assert "full save of step 5 committed" in ended.output
    assert steps(tmp_path)[0] == 5
    resumed = run(tmp_path, settings=OFTEN)
    assert resumed.one("resumed") == {
        "kind": "resumed", "rank": 0, "step": 5, "digest": digests(ended)[5], "exact": True,
    }  # fmt: skip
    assert digests(resumed)[12] == digests(uninterrupted)[12]


def test_the_first_save_of_a_run_is_tried(tmp_path: Path) -> None:
    """The signal came before the first step; that is the first boundary there is."""
    ended = run(tmp_path, settings={"every": 100}, situation="first_thing")
    assert (ended.code, ended.one("left")["step"]) == (75, 1), ended.output
    assert steps(tmp_path) == [1]


def test_a_part_is_saved_where_time_is_too_short(tmp_path: Path) -> None:
    """A save of everything takes four seconds, and there are two."""
    settings = {"every": 2, "preemption": {"grace_seconds": 2.0}}
    ended = run(tmp_path, settings=settings, situation="slow", signals={"0": 5}, width=64)
    assert ended.code == 75, ended.output
    assert "part of step 5 committed" in ended.output
    found = catalog(tmp_path)
    newest = found.manifest(found.saves()[0])
    ages = [record.staleness for record in newest.units]
    assert newest.step == 5 and 0 < ages.count(0) < len(ages) and set(ages) == {0, 1}
    # Read from the log: the process may end before the script can report it.
    assert f" after the signal: {ages.count(0)} of {len(ages)} layer slots" in ended.output
    resumed = run(tmp_path, steps=5, settings=settings, width=64)
    assert resumed.code == 0 and resumed.one("resumed")["exact"] is False


def test_what_was_saved_in_parts_is_not_called_a_full_save(tmp_path: Path) -> None:
    """Time for everything, but not for certain: a part, and then the rest. On a machine that is busy only the part."""
    settings = {"every": 2, "preemption": {"grace_seconds": 2.0}}
    ended = run(tmp_path, settings=settings, situation="slow", signals={"0": 5}, width=32)
    assert ended.code == 75, ended.output
    found = catalog(tmp_path)
    certificate = certify(resolve(found, found.saves()[0]))
    assert (certificate.step, certificate.exact) == (5, False)
    assert "preempted: full save" not in ended.output
    whole = "all of step 5 committed" in ended.output and "in parts or rounded: not exact" in ended.output
    assert whole or "part of step 5 committed" in ended.output


def test_nothing_is_lost_where_the_storage_does_not_answer(tmp_path: Path) -> None:
    ended = run(tmp_path, settings={"every": 2, "preemption": {"grace_seconds": 1.0}}, situation="hanging",
                signals={"0": 5})  # fmt: skip
    assert ended.code == 75, ended.output
    # Read from the log: the process may end before the script can report it.
    assert "step 5 is not committed yet: not enough time; the newest commit is that of step 4" in ended.output
    assert "The save that is being written may still be committed" in ended.output
    assert steps(tmp_path)[0] == 4
    assert run(tmp_path, steps=4).one("resumed")["digest"] == digests(ended)[4]


def test_the_process_ends_in_time_where_training_itself_is_stuck(tmp_path: Path) -> None:
    ended = run(tmp_path, settings={"every": 2, "preemption": {"grace_seconds": 1.0}}, situation="stuck",
                signals={"0": 5})  # fmt: skip
    assert ended.code == 75, ended.output
    assert "grace period expired before the save finished" in ended.output
    assert steps(tmp_path)[0] == 4


def test_a_save_under_way_is_waited_for(tmp_path: Path) -> None:
    ended = run(tmp_path, settings=OFTEN, situation="under_way", signals={"0": 5})
    assert ended.code == 75, ended.output
    assert steps(tmp_path)[:2] == [5, 4]


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST"])
def test_a_job_of_one_process_heeds_the_sigterm_of_its_scheduler(tmp_path: Path, variable: str) -> None:
    spec = {"number": "SIGTERM", "signals": {"0": 5}, "settings": OFTEN, "environment": {variable: "7"}}
    ended = run(tmp_path, **spec)
    assert (ended.code, ended.one("left")["step"]) == (75, 5), ended.output
    assert "full save of step 5 committed" in ended.output
    assert run(tmp_path, settings=OFTEN).one("resumed")["digest"] == digests(ended)[5]
    (tmp_path / "set").mkdir()
    spec["settings"] = OFTEN | {"preemption": {"signals": ["SIGUSR1"]}}
    assert run(tmp_path / "set", **spec).code == -signal.SIGTERM, "what is set counts"


def test_a_rank_that_fails_ends_a_job_under_slurm_as_ever(tmp_path: Path) -> None:
    """torchrun sends SIGTERM to the other rank. With a handler it would wait until torchrun kills it."""
    spec = {"steps": 8, "situation": "raises", "settings": OFTEN, "environment": {"SLURM_JOB_ID": "7"}}
    ended = torchrun("preempt.py", 2, spec, tmp_path)
    assert ended.code == 1 and "rank 1 fails" in ended.output, ended.output
    assert "closing signal SIGTERM" in ended.output and "forcefully exiting" not in ended.output
    assert not ended.of("left") and set(steps(tmp_path)) <= {2, 4}


def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    """While the save of step 4 is under way."""
    ended = run(tmp_path, settings=OFTEN, situation="twice", signals={"0": 5})
    assert ended.code == -signal.SIGUSR1, ended.output
    assert steps(tmp_path) == [2]
    resumed = run(tmp_path, settings=OFTEN)
    assert (resumed.code, resumed.one("resumed")["digest"]) == (0, digests(ended)[2])


def test_a_forked_child_is_signalled_as_ever(tmp_path: Path) -> None:
    ended = run(tmp_path, steps=5, settings=OFTEN, situation="forked")
    assert (ended.code, ended.one("child")["code"]) == (0, -signal.SIGUSR1), ended.output
    assert not ended.of("left")


def test_a_handler_of_the_script_stays(tmp_path: Path) -> None:
    ended = run(tmp_path, settings=OFTEN, situation="own_handler", signals={"0": 5})
    assert ended.code == 0, ended.output
    assert len(ended.of("own handler")) == 1 and not ended.one("finished")["restored"]


def test_a_handler_of_the_script_may_announce_the_end(tmp_path: Path) -> None:
    ended = run(tmp_path, settings=OFTEN, situation="own_handler_announces", signals={"0": 5})
    assert (ended.code, ended.one("left")["step"]) == (75, 5), ended.output


@pytest.mark.parametrize("settings", [{"preemption": {"signals": []}}, {"policy": {"name": "observe"}}])
def test_switched_off_a_signal_does_what_it_does(tmp_path: Path, settings: dict[str, Any]) -> None:
    ended = run(tmp_path, settings=settings, signals={"0": 5})
    assert ended.code == -signal.SIGUSR1, ended.output
    assert not ended.of("left")


def test_the_loop_may_end_by_itself(tmp_path: Path) -> None:
    settings = {"every": "auto", "preemption": {"exit": False}}
    ended = run(tmp_path, settings=settings, signals={"0": 5})
    assert ended.code == 0, ended.output
    assert ended.one("told") == {"kind": "told", "rank": 0, "step": 5, "preempted": True, "skipped": None}
    assert ended.one("finished")["restored"]
    assert steps(tmp_path)[0] == 5
    assert not list((tmp_path / "store").rglob("*closed*")), "it was interrupted, though in good order"


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.core), 3])
def test_one_rank_hears_of_it_and_all_stop_at_one_step(tmp_path: Path, ranks: int) -> None:
    ended = torchrun("preempt.py", ranks, {"steps": 40, "settings": OFTEN, "signals": {"1": 5}}, tmp_path)
    assert ended.code != 0  # not 75: the teardown of gloo's threads at exit now and then aborts a process
    left = ended.of("left")
    assert [(one["step"], one["code"], one["skipped"]) for one in left] == [(6, 75, None)] * ranks, ended.output[-4000:]
    assert steps(tmp_path)[0] == 6
    resumed = torchrun("preempt.py", ranks, {"steps": 8, "settings": OFTEN}, tmp_path)
    assert resumed.code == 0, resumed.output[-4000:]
    for rank in range(ranks):
        found = resumed.one("resumed", rank=rank)
        assert (found["step"], found["exact"], found["digest"]) == (6, True, digests(ended, rank)[6])


def test_a_rank_whose_state_cannot_be_taken_for_a_moment_does_not_cost_the_grace_period(tmp_path: Path) -> None:
    """Rank 0 hears of it at once, and there is time for another save."""
    spec = {"steps": 8, "settings": {"every": 100}, "situation": "fails_once", "signals": {"1": 3}}
    ended = torchrun("preempt.py", 2, spec, tmp_path)
    assert "boom" in ended.output
    assert "another rank is gone" not in ended.output
    left = ended.of("left")
    assert {(one["code"], one["skipped"]) for one in left} == {(75, None)}
    assert steps(tmp_path) == [max(one["step"] for one in left)]
