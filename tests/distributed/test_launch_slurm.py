"""The batch script of ``deploy/slurm`` really run: two nodes that are this machine, a notice, a requeue, the end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from store.catalog import open_catalog
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.launch import ROOT
from tests.support.slurm import Batch, Slurm
from tests.support.supervised import training

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

SCRIPT = ROOT / "deploy" / "slurm" / "driftpoint.sbatch"


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    (tmp_path / "driftpoint.yaml").write_text(f"store: {tmp_path / 'store'}\n")
    job = 10_000_000 + time.time_ns() % 1_000_000_000
    yield Slurm(tmp_path, job)
    for left in Path("/tmp").glob(f"driftpoint-{os.getuid()}-{job}-*"):
        shutil.rmtree(left)


def test_a_notice_saves_and_requeues_and_the_next_one_goes_on_to_the_end(slurm: Slurm, tmp_path: Path) -> None:
    with slurm.sbatch(SCRIPT, *training(tmp_path, total=1_000_000)) as batch:
        until(batch, lambda: len(steps(tmp_path)) > 8)
        batch.process.send_signal(signal.SIGUSR1)
        assert batch.process.wait(180) == 75, batch.said
        assert slurm.requeued == [str(slurm.job)], batch.said
        assert batch.said.count("SIGTERM: SIGUSR1 to 1 process") == 2, "each node's supervisor told its own trainer"
    left = open_catalog(LocalFiles(tmp_path / "store")).saves()[0].step
    assert left >= max(steps(tmp_path))
    with slurm.sbatch(SCRIPT, *training(tmp_path, total=left + 4)) as batch:
        assert batch.process.wait(600) == 0, batch.said
        assert "after 1 requeues" in batch.said
    starts = [one["start"] for one in records(tmp_path) if one["kind"] == "resumed"]
    assert starts == [0, 0, left, left], batch.said
    assert slurm.requeued == [str(slurm.job)]
    assert verify(open_catalog(LocalFiles(tmp_path / "store"))).ok


def test_a_job_that_gets_nowhere_is_not_requeued(slurm: Slurm, tmp_path: Path) -> None:
    text = SCRIPT.read_text()
    assert "--max-restarts 3" in text
    script = tmp_path / "job.sbatch"
    script.write_text(text.replace("--max-restarts 3", "--max-restarts 0"))
    with slurm.sbatch(script, *training(tmp_path, broken=9)) as batch:
        assert batch.process.wait(180) == 93, batch.said
    assert "no progress: not requeued" in batch.said
    assert slurm.requeued == []


def records(folder: Path) -> list[dict[str, Any]]:
    path = folder / "results.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def steps(folder: Path) -> list[int]:
    return [one["step"] for one in records(folder) if one["kind"] == "step"]


def until(batch: Batch, holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 180
    while not holds():
        assert batch.process.poll() is None and time.monotonic() < deadline, batch.said
        time.sleep(0.05)
