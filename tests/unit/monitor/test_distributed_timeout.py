"""A rank that is late does not end training before the job's own timeout would."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from monitor.distributed import GlooGroup
from tests.support.cli import environment

_LATE = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from torch.distributed import distributed_c10d
distributed_c10d.default_pg_timeout = timedelta(seconds=2)  # instead of half an hour, as of a group without a timeout
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=timedelta(seconds=120))
from monitor.distributed import current_group
group = current_group()
flag = group.async_flag()
for _ in range(2):
    flag.exchange(False)
    if rank:
        time.sleep(4.0)
    assert group.all_gather(rank) == [0, 1]
dist.barrier()
"""


_LATE_AT_THE_END = """
import sys, time
from pathlib import Path
import torch.distributed as dist
rank, path, late = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
from monitor.distributed import current_group
group, waited = current_group(), Path(path).with_name("waited")
barrier = group.barrier(1.0)
if rank == late:
    deadline = time.monotonic() + 120
    while not waited.exists():
        assert time.monotonic() < deadline, "the other rank still waits"
        time.sleep(0.05)
assert not barrier()
waited.touch()
assert group.all_gather(rank) == [0, 1]
assert not barrier()
dist.barrier()
"""


_LATE_COMMIT = """
import sys, time
from pathlib import Path
import torch.distributed as dist
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
from tests.support.jobs import Job, committed_steps
store, waited = Path(path).with_name("store"), Path(path).with_name("waited")
job = Job(store, every=100, timeouts={"close": 1.0})
job.step()
if rank:
    deadline = time.monotonic() + 120
    while not waited.exists():
        assert time.monotonic() < deadline, "the other rank still waits"
        time.sleep(0.05)
assert not job.ckpt.commit_last_step()
waited.touch()
job.step()
while job.ckpt.save(wait=True, strict=False).skipped is not None:  # a second may be too short for a save
    pass
assert committed_steps(store) == [2]
job.ckpt.close(save=False)
dist.barrier()
"""


def test_a_job_goes_on_saving_after_ranks_did_not_meet(tmp_path: Path) -> None:
    run_ranks(_LATE_COMMIT, tmp_path)


def test_a_rank_may_be_as_late_as_the_job_allows(tmp_path: Path) -> None:
    run_ranks(_LATE, tmp_path)


@pytest.mark.parametrize("late", [0, 1])
def test_at_the_end_no_rank_waits_longer_than_the_bound(tmp_path: Path, late: int) -> None:
    """And the job's other collectives go on."""
    run_ranks(_LATE_AT_THE_END, tmp_path, str(late))


def run_ranks(script: str, tmp_path: Path, *options: str) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", script, str(rank), str(tmp_path / "meet"), *options], env=environment())
        for rank in (0, 1)
    ]
    try:
        assert [one.wait(240) for one in ranks] == [0, 0]
    finally:
        for one in ranks:
            one.kill()
            one.wait(60)


@pytest.mark.parametrize(("hours", "expected"), [(6.0, 6.0), (0.1, 0.5)])
def test_groups_have_the_timeout_of_the_job(hours: float, expected: float) -> None:
    """A shorter one than torch's default for gloo is not taken: it may be meant for the accelerator only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(hours=hours))
    try:
        found = GlooGroup()._group._get_backend(torch.device("cpu")).options._timeout  # type: ignore[attr-defined]
        assert found == timedelta(hours=expected)
    finally:
        dist.destroy_process_group()
