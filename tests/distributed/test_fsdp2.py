"""FSDP2 in place at other world sizes, from other frameworks and back: what comes back is what was saved, to the last
bit, gathered by parameter name; and training goes on. The example, as a user would run, kill and start it again.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from store.catalog import open_catalog
from store.storage.local import LocalFiles
from tests.support.launch import ENVIRONMENT, ROOT, Launched, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CHAIN: dict[str, tuple[int, dict[str, Any]]] = {
    "2 ranks, ZeRO-3": (2, {"kind": "zero", "stage": 3, "precision": "fp32"}),
    "3 ranks, FSDP2": (3, {"kind": "fsdp2", "checkpointed": True}),
    "1 rank, ZeRO-2": (1, {"kind": "zero", "stage": 2, "precision": "fp32"}),
    "4 ranks, FSDP2 in two replicas": (4, {"kind": "fsdp2", "hybrid": 2, "bf16": True, "reshard": False}),
    "2 ranks, DDP": (2, {"kind": "ddp"}),
}
LINKS = list(CHAIN)[1:]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Launched]:
    """Each link resumes from the store what the one before left, compares, trains and saves."""
    pytest.importorskip("deepspeed")
    directory = tmp_path_factory.mktemp("fsdp2")
    launched = {}
    for number, (name, (ranks, case)) in enumerate(CHAIN.items()):
        launched[name] = torchrun("resume_reshard.py", ranks, {"case": case, "seed": number}, directory)
        assert launched[name].code == 0, launched[name].output[-6000:]
    newest = open_catalog(LocalFiles(directory / "store")).saves()[0]
    assert (newest.step, newest.epoch) == (3 * len(CHAIN), len(CHAIN))
    return launched


@pytest.mark.parametrize("link", LINKS)
def test_the_whole_state_comes_back(chain: dict[str, Launched], link: str) -> None:
    resumed = chain[link].of("resumed")
    assert len(resumed) == CHAIN[link][0]
    for one in resumed:
        assert one["differences"] == []
        assert one["unlike_fresh"] > 10
        assert one["slots"] == ["buffer", "exp_avg", "exp_avg_sq", "fp32", "frozen"]
        assert (one["step"], one["exact"]) == (3 * (1 + LINKS.index(link)), True)


@pytest.mark.parametrize("link", CHAIN)
def test_training_goes_on(chain: dict[str, Launched], link: str) -> None:
    assert [one["finite"] for one in chain[link].of("trained")] == [True] * CHAIN[link][0]


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
