"""``driftpoint run`` around a real torchrun of two ranks: a rank dies, the job is preempted, it comes to its end."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from store.catalog import open_catalog
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.supervised import alive, supervised, training

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--monitor-interval=0.1",
]  # fmt: skip


def test_a_rank_dies_the_job_is_preempted_and_goes_on_at_the_step_it_left(tmp_path: Path) -> None:
    spec = {"dies": [[1, 5, "kill"]], "dying_rank": 1, "total": 1_000_000}
    with supervised(tmp_path, TORCHRUN + training(tmp_path, **spec), "--grace", 120) as run:
        run.until(lambda: len(run.starts) == 4, timeout=180)
        assert run.starts == [0, 0, 4, 4], run.said
        ended = next(event for event in run.events if event["event"] == "end")
        assert (ended["attempt"], ended["commit"], ended["committed"]) == (1, "00000004-000001", True)
        assert ended["code"] == 1, "torchrun's own code"
        run.until(lambda: run.of("step")[-1]["step"] > 6)
        run.send(signal.SIGTERM)
        assert run.ends() == 75, run.said
        assert "2 processes" in run.said
        assert not any(alive(one["pid"]) for one in run.of("began"))
    left = open_catalog(LocalFiles(tmp_path / "store")).saves()[0].step
    assert left >= run.of("step")[-1]["step"]
    with supervised(tmp_path, TORCHRUN + training(tmp_path, total=left + 4)) as run:
        assert run.ends(240) == 0, run.said
        assert run.starts[4:] == [left, left], run.said
        totals = [one["total"] for one in run.of("done")]
        assert len(totals) == 2 and totals[0] == totals[1]
    assert verify(open_catalog(LocalFiles(tmp_path / "store"))).ok
