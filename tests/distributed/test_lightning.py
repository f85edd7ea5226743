"""Real trainings by Lightning, killed in several batches: every loss equals that of the run without Driftpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import Launched, alone, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

pytest.importorskip("lightning", reason="lightning is not installed; .ci/run installs it by itself")

MIDDLE, BEGINNING, LAST = [1, 3], [2, 0], [2, 5]  # epoch and batch; with two ranks, an epoch has six


def run(directory: Path, **spec: Any) -> Launched:
    spec = {"path": sys.path, "store": None, "loader": "plain", **spec}
    directory.mkdir(exist_ok=True)
    if spec.get("devices", 1) > 1:
        return torchrun("lightning_job.py", spec["devices"], spec, directory)
    return alone("lightning_job.py", spec, directory)


def losses(*launched: Launched) -> dict[tuple[int, ...], set[str]]:
    """All losses that a rank had in a batch, by rank, epoch, batch and step before it."""
    found: dict[tuple[int, ...], set[str]] = {}
    for one in (one for launch in launched for one in launch.of("loss")):
        found.setdefault((one["rank"], *one["place"]), set()).add(one["loss"])
    return found


def ends(launched: Launched) -> list[dict[str, Any]]:
    """What every rank ended with, by rank."""
    return sorted(launched.of("end"), key=lambda one: int(one["rank"]))


@pytest.mark.parametrize(
    ("kills", "spec"),
    [
        (
            [MIDDLE, BEGINNING],
            {"loader": "workers", "trainer": {"accumulate_grad_batches": 2, "val_check_interval": 4}},
        ),
        ([MIDDLE], {"loader": "generator", "plateau": True}),
        ([BEGINNING], {"loader": "stateful", "trainer": {"max_steps": 30}}),
        ([MIDDLE], {"loader": "stream"}),
        ([BEGINNING, LAST], {"loader": "plain", "devices": 2, "strategy": "ddp", "victim": 1}),
    ],
    ids=["workers", "generator", "stateful", "stream", "ddp"],
)
def test_killed_it_goes_on_bit_for_bit(tmp_path: Path, kills: list[list[int]], spec: dict[str, Any]) -> None:
    whole = run(tmp_path / "whole", **spec)
    assert whole.code == 0, whole.output[-6000:]
    attempts = []
    for die in (*kills, None):
        attempts.append(run(tmp_path / "killed", store={"every": 1}, die=die, **spec))
        assert (attempts[-1].code == 0) is (die is None), attempts[-1].output[-6000:]
        assert ("resumed step" in attempts[-1].output) is (len(attempts) > 1)
    assert losses(*attempts) == losses(whole)
    assert len(losses(attempts[-1])) < len(losses(whole)) * 2 / 3, "it resumed where it was"
    assert ends(attempts[-1]) == ends(whole)


def test_a_preempted_job_saves_its_last_step_and_a_finished_one_trains_nothing(tmp_path: Path) -> None:
    """Lightning has a handler for SIGTERM, which ends the training between two steps."""
    store = {"every": 1000, "preemption": {"signals": ["SIGTERM"]}}
    ended = run(tmp_path, store=store, die=MIDDLE, signal="SIGTERM")
    assert ended.code == 75 and "full save of step 15 committed" in ended.output, ended.output[-6000:]
    again = run(tmp_path, store=store)
    assert again.code == 0 and "resumed step 15" in again.output, again.output[-6000:]
    finished = run(tmp_path, store=store)
    assert finished.code == 0 and "resumed step 33" in finished.output, finished.output[-6000:]
    assert not losses(finished) and finished.of("end") == again.of("end")
    longer, whole = run(tmp_path, store=store, epochs=4), run(tmp_path / "whole", epochs=4)
    assert losses(ended, again, longer) == losses(whole), longer.output[-6000:]
    assert longer.of("end") == whole.of("end")
