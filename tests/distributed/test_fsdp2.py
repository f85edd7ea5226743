"""The FSDP2 example, as a user would run, kill and start it again, at another number of ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.launch import ENVIRONMENT, ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def example(directory: Path, ranks: int, seed: int, steps: int) -> subprocess.Popen[bytes]:
    """The example, started as its docstring says; what it prints goes to ``SEED.txt``."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with (directory / f"{seed}.txt").open("wb") as output:
        return subprocess.Popen(
            [*command, str(ROOT / "examples" / "fsdp2.py"), f"--steps={steps}", f"--seed={seed}"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT},
            cwd=directory,
        )


def losses(told: Path) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", told.read_text())}


def test_the_example_is_killed_and_goes_on_at_another_number_of_ranks(tmp_path: Path) -> None:
    told, again_told = tmp_path / "0.txt", tmp_path / "1.txt"
    killed, deadline = example(tmp_path, 2, seed=0, steps=100_000), time.monotonic() + 200
    while "committed step 10" not in told.read_text() or max(losses(told), default=0) % 10 < 5:
        assert killed.poll() is None and time.monotonic() < deadline, told.read_text()[-3000:]
        time.sleep(0.02)
    for process in [*psutil.Process(killed.pid).children(recursive=True), psutil.Process(killed.pid)]:
        process.kill()
    assert killed.wait(180) < 0
    before = losses(told)
    again = example(tmp_path, 3, seed=1, steps=max(before))
    assert again.wait(600) == 0, again_told.read_text()[-3000:]
    resumed = losses(again_told)
    assert min(resumed) % 10 == 1 and min(resumed) > 10 and max(resumed) == max(before)
    assert resumed == pytest.approx({step: before[step] for step in resumed}, rel=1e-4)
