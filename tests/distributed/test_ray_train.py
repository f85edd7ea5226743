"""Ray Train on a real local Ray: its workers are killed, it starts them again, and every loss is that of one run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.cli import ROOT, environment

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

pytest.importorskip("ray.train", reason="ray is not installed: pip install 'ray[train]'")

KILLS = [(0, 300), (1, 800)]
"""Ranks, and steps after which they are killed."""


def lines(folder: Path, rank: int) -> list[list[str]]:
    """Process, step and loss of every step of a rank so far."""
    with suppress(FileNotFoundError):
        text = (folder / f"rank-{rank}.txt").read_text()
        return [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
    return []


def train(folder: Path, kills: list[tuple[int, int]]) -> dict[int, list[list[str]]]:
    """Run the example to its end. A rank that is to be killed is killed once it has come that far."""
    folder.mkdir()
    words = ["--store", str(folder / "store"), "--losses", str(folder), "--steps", "1200"]
    command = [sys.executable, str(ROOT / "examples" / "ray_train.py"), *words]
    given = {**environment(), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    given |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    left, deadline = list(kills), time.monotonic() + 600
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log, env=given)
        try:
            while running.poll() is None and time.monotonic() < deadline:
                if left and (seen := lines(folder, left[0][0])) and int(seen[-1][1]) >= left[0][1]:
                    os.kill(int(seen[-1][0]), signal.SIGKILL)
                    left.pop(0)
                time.sleep(0.02)
        finally:
            running.kill()
    assert (running.wait(), left) == (0, []), (folder / "log").read_text()[-6000:]
    return {rank: lines(folder, rank) for rank in (0, 1)}


def test_killed_workers_resume_bit_for_bit(tmp_path: Path) -> None:
    whole, killed = train(tmp_path / "whole", []), train(tmp_path / "killed", KILLS)
    for rank in (0, 1):
        expected = {step: loss for _, step, loss in whole[rank]}
        assert len(expected) == len(whole[rank]) == 1200
        assert {step for _, step, _ in killed[rank]} == expected.keys()
        assert all(expected[step] == loss for _, step, loss in killed[rank])
        firsts = {process: int(step) for process, step, _ in reversed(killed[rank])}
        assert len(firsts) == 3 and sorted(firsts.values())[1] > 0, "each time from a commit"
