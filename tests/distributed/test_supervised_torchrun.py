"""``driftpoint run`` around a real torchrun of two ranks: a rank dies, the job is preempted, it comes to its end."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from store.catalog import open_catalog
from store.files import LocalFiles
from store.verify import verify
from tests.support.supervised import alive, supervised, training

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--monitor-interval=0.1",
]  # fmt: skip


def test_a_rank_dies_the_job_is_preempted_and_goes_on(tmp_path: Path) -> None:
    dies = [[1, 5, "kill"], [2, 7, "hang"]]
    spec = {"dies": dies, "dying_rank": 1, "handles": [signal.SIGUSR1], "leaves": 75, "total": 10}
    with supervised(tmp_path, TORCHRUN + training(tmp_path, **spec), "--grace", 120) as run:
        run.until(lambda: [one["how"] for one in run.of("dies")] == ["kill", "hang"], timeout=180)
        assert run.starts == [0, 0, 4, 4], run.said
        assert "attempt 1 ended: exit code 1; kept up to step 4" in run.said, "torchrun's own code"
        run.send(signal.SIGTERM)
        assert run.ends() == 75, run.said
        assert "SIGUSR1 to 2 processes" in run.said
        assert sorted(one["rank"] for one in run.of("signal")) == [0, 1]
        assert not any(alive(one["pid"]) for one in run.of("began"))
    with supervised(tmp_path, TORCHRUN + training(tmp_path, total=10)) as run:
        assert run.ends(240) == 0, run.said
        assert run.starts[4:] == [6, 6]
        totals = [one["total"] for one in run.of("done")]
        assert len(totals) == 2 and totals[0] == totals[1]
    catalog = open_catalog(LocalFiles(tmp_path / "store"))
    assert catalog.saves()[0].step == 10 and verify(catalog).ok
