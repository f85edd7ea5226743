"""One trace of several ranks, whose distances are those of the whole state; and one that a SIGKILL interrupts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from store.trace import CommitLine, DecisionLine, MovedLine, ResumedLine, incarnations
from tests.support.launch import ENVIRONMENT, WORKERS, Launched, torchrun
from tests.support.traced import distances, trace_of, traced

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

RUNS: dict[str, dict[str, Any]] = {
    "ddp": {"policy": {"name": "parity", "k": 3}, "encoding": "compact"},
    "unwritable": {"policy": {"name": "threshold", "threshold": 0.05}},
    "zero2": {"policy": "full", "encoding": "compact"},
    "zero3": {"policy": {"name": "observe", "inner": {"name": "threshold", "threshold": 0.05}}},
}
TRACED = [name for name in RUNS if name != "unwritable"]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Launched, Path]:
    directory = tmp_path_factory.mktemp("trace")
    (directory / "unwritable.trace.jsonl").mkdir()
    done = torchrun("trace_run.py", 2, {"runs": RUNS}, directory, timeout=900)
    assert done.code == 0, done.output[-6000:]
    return done, directory


@pytest.mark.parametrize("name", TRACED)
def test_what_moved_is_summed_over_ranks(launched: tuple[Launched, Path], name: str) -> None:
    done, directory = launched
    (found,) = traced(directory / f"{name}.trace.jsonl")
    assert found.job.world_size == 2
    by_rank = [torch.load(directory / f"{name}.{rank}.pt", weights_only=True) for rank in (0, 1)]
    states = {step: by_rank[0][step] | by_rank[1][step] for step in by_rank[0]}
    layers = done.one("done", name=name, rank=0)["layers"]
    lines = found.of(MovedLine)
    assert [line.step for line in lines] == list(range(2, 8))
    for line in lines:
        for then, ratios in line.since.items():
            true = distances(states[line.step], states[then], layers)
            seen = {unit: ratio for unit, ratio in zip(found.units, ratios, strict=True) if ratio is not None}
            assert set(seen) == set(true) == {one.unit for one in found.job.units if one.moving}
            for unit, ratio in seen.items():
                assert ratio == pytest.approx(true[unit], rel=0.06), (line.step, then, unit)


@pytest.mark.parametrize("name", TRACED)
def test_one_rank_writes_all_lines(launched: tuple[Launched, Path], name: str) -> None:
    _, directory = launched
    (found,) = traced(directory / f"{name}.trace.jsonl")
    assert [line.step for line in found.of(DecisionLine)] == list(range(1, 9))
    assert len({line.step for line in found.of(CommitLine)}) == len(found.of(CommitLine)) >= 7
    assert found.job.observing == (name == "zero3")
    raw = sum(unit.nbytes for unit in found.job.units)
    assert sum(nbytes for nbytes, *_ in found.of(CommitLine)[0].sizes.values()) <= raw


@pytest.mark.parametrize("name", RUNS)
def test_every_rank_takes_part_whatever_is_written(launched: tuple[Launched, Path], name: str) -> None:
    done, _ = launched
    ends = done.of("done", name=name)
    assert sorted(end["rank"] for end in ends) == [0, 1]
    assert all(end["memory"] > 0 and end["skipped"] in (None, "observe", "nothing") for end in ends)


def test_a_trace_goes_on_after_a_kill(tmp_path: Path) -> None:
    spec, path = tmp_path / "spec.json", tmp_path / "store.trace.jsonl"
    spec.write_text(json.dumps({"directory": str(tmp_path)}))
    for wanted in (4, 8, 12):
        process = subprocess.Popen(
            [sys.executable, str(WORKERS / "trace_killed.py"), str(spec)], env={**os.environ, **ENVIRONMENT}
        )
        try:
            deadline = time.monotonic() + 180
            while not path.exists() or path.read_bytes().count(b'{"kind":"commit"') < wanted:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            process.kill()
            process.wait()
        with path.open("ab") as torn:  # as a kill in the middle of a write leaves it
            torn.write(b'{"kind":"decision","st')
    trace = trace_of(path)
    assert trace.skipped == 3
    found = list(incarnations(trace))
    assert [job.epoch for job, _ in found] == [1, 2, 3]
    for (_, before), (_, lines) in pairwise(found):
        (resumed,) = [line for line in lines if isinstance(line, ResumedLine)]
        committed = [line.step for line in before if isinstance(line, CommitLine)]
        assert resumed.step >= max(committed)
        steps = [line.step for line in lines if isinstance(line, DecisionLine)]
        assert steps == list(range(resumed.step + 1, resumed.step + 1 + len(steps)))
