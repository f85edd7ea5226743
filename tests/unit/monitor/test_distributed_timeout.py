"""A rank that is late does not end training before the job's own timeout would."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from monitor.distributed import GlooGroup
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

_LATE = """
import sys, time
import torch
from datetime import timedelta
import torch.distributed as dist
from torch.distributed import distributed_c10d
distributed_c10d.default_pg_timeout = timedelta(seconds=2)  # instead of half an hour, as of a group without a timeout
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=timedelta(seconds=120))
from monitor.distributed import current_group
group = current_group()
summing = group.async_sum()
for _ in range(2):
    summing.finish()
    summing.start(torch.zeros(1))
    if rank:
        time.sleep(4.0)
    assert group.all_gather(rank) == [0, 1]
dist.barrier()
dist.destroy_process_group()  # else gloo's threads may end the process with SIGABRT
"""


_BEGUN_BY_ONE = """
import os, sys, threading, time
import pytest
import torch
import torch.distributed as dist
from pathlib import Path
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
from monitor.distributed import current_group
from store.errors import CollectiveError
dist.set_debug_level(dist.DebugLevel.DETAIL)  # torch begins no collective before all ranks do
group, released = current_group(), Path(path).with_name("released")
summing = group.async_sum()
deadline = time.monotonic() + 120
if rank == 0:
    beginning = threading.Thread(target=summing.start, args=(torch.ones(1),), daemon=True)
    beginning.start()
    time.sleep(0.5)
    assert beginning.is_alive(), "torch did not wait for the other rank"
    group.leave()  # as a rank does that Ctrl-C takes out of a step
    while not released.exists():
        assert time.monotonic() < deadline, "the other rank still waits"
        time.sleep(0.05)
else:
    with pytest.raises(CollectiveError):
        group.all_gather(rank)
    released.touch()
os._exit(0)  # else torch's threads may end the process with SIGABRT
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
dist.destroy_process_group()  # else gloo's threads may end the process with SIGABRT
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
dist.destroy_process_group()  # else gloo's threads may end the process with SIGABRT
"""


_LATE_STEP = """
import json, os, signal, sys, time
from datetime import timedelta
from pathlib import Path
import pytest
import torch.distributed as dist
import monitor, monitor.distributed
from store.errors import SaveError
from tests.support.jobs import Job, committed_steps
monitor.distributed._job_timeout = lambda: timedelta(seconds=2)  # of the groups that are made by attach
rank, path, settings, end = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
store = Path(path).with_name("store")
job = Job(store, **settings)
job.step()
job.ckpt.commit_last_step()
dist.barrier()
assert committed_steps(store) == [1]
job.update()
if rank:
    time.sleep(5.0)
job.ckpt.step()
if end == "preempted":
    job.update()
    if rank:
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(monitor.Preempted) as left:
            job.ckpt.step()
        assert left.value.code == 75 and left.value.report.preempted and not left.value.report.saved
    else:
        job.ckpt.step()
        with pytest.raises(SaveError, match="step 3 is not known to be committed"):
            job.ckpt.close()
else:
    reports = [job.step() for _ in range(3)]
    if job.ckpt.config.every == 1:
        assert [report.skipped for report in reports] == ["unreachable"] * 3
    assert job.ckpt.save().skipped == "unreachable"
    assert job.ckpt.save(wait=True, strict=False).skipped == "unreachable"
    newest = "" if rank else "; the newest commit is that of step 1"
    with pytest.raises(SaveError, match=f"later than the job's timeout, or is gone; restart the job{newest}"):
        job.ckpt.save(wait=True)
    with pytest.raises(SaveError, match="step 5 is not known to be committed"):
        job.ckpt.close()
dist.barrier()
assert committed_steps(store) == [1]
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("settings", "end"),
    [
        pytest.param({}, "close", marks=pytest.mark.core),
        ({}, "preempted"),
        ({"preemption": {"signals": []}}, "close"),
        ({"policy": {"name": "threshold", "threshold": 0.0}, "preemption": {"signals": []}}, "close"),
        ({"every": 100, "preemption": {"signals": []}, "memory": {"enabled": True, "every": 1}}, "close"),
    ],
)
def test_a_step_does_not_raise_for_a_rank_that_is_too_late(tmp_path: Path, settings: dict[str, Any], end: str) -> None:
    """Not on any rank. Training goes on, nothing is saved any more, and the end of the job says so."""
    if "memory" in settings:
        (tmp_path / "shm").mkdir()
        settings = {**settings, "memory": {**settings["memory"], "path": str(tmp_path / "shm")}}
    run_ranks(_LATE_STEP, tmp_path, json.dumps(settings), end)


_LATE_FLAG = """
import sys, time
from datetime import timedelta
from pathlib import Path
import pytest
import torch.distributed as dist
import monitor.distributed
from store.errors import SaveError
from tests.support.jobs import Job, committed_steps
# Of decisions, of the agreement on preemptions, and of the sums for the trace.
timeouts = [timedelta(minutes=30), timedelta(seconds=2), timedelta(minutes=30)]
monitor.distributed._job_timeout = lambda: timeouts.pop(0)
rank, path, late = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=3)
store = Path(path).with_name("store")
job = Job(store, every=3)
assert not timeouts
skipped = []
for step in range(1, 8):
    job.update()
    if rank == late and step == 4:
        time.sleep(5.0)
    report = job.ckpt.step()
    skipped.append(report and report.skipped)
    job.ckpt.flush()
assert skipped[2] is None and "unreachable" in skipped[3:], skipped
assert committed_steps(store) == [3]
with pytest.raises(SaveError, match="step 7 is not known to be committed"):
    job.ckpt.close()
dist.barrier()
dist.destroy_process_group()
"""


_LEFT = """
import sys, time
import torch
import pytest
import torch.distributed as dist
from monitor.distributed import current_group
from store.errors import CollectiveError
rank, path, first = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=3)
group = current_group()
summing, barrier = group.async_sum(), group.barrier(60.0)
summing.start(torch.ones(1))
assert group.all_gather(rank) == [0, 1, 2]
assert summing.finish().item() == 3.0
if rank == 0:
    summing.start(torch.ones(1))  # under way when this rank leaves
    group.leave()
    group.leave()
acts = [lambda: group.all_gather(rank), lambda: group.broadcast(rank), lambda: group.all_reduce_max([rank])]
for act in acts[first:] + acts[:first]:
    with pytest.raises(CollectiveError):
        act()
if rank:
    with pytest.raises(CollectiveError):
        summing.start(torch.ones(1))
else:
    with pytest.raises(CollectiveError):
        barrier()
dist.barrier()
dist.destroy_process_group()
"""


_LEAVES_MEANWHILE = """
import sys, threading, time
import pytest
import torch
import torch.distributed as dist
from monitor.distributed import current_group
from store.errors import CollectiveError
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
group, began, real = current_group(), threading.Event(), dist.all_reduce
summing = group.async_sum()
def slow(values, *, group, **more):
    began.set()
    time.sleep(0.5)
    assert group is not None and group is summing._group, "the sum would be one of the default group"
    return real(values, group=group, **more)
dist.all_reduce = slow
errors = []
def start():
    try:
        summing.start(torch.ones(1))
    except BaseException as error:
        errors.append(error)
thread = threading.Thread(target=start)
thread.start()
assert began.wait(60)
group.leave()
thread.join()
assert not errors, errors
with pytest.raises(CollectiveError):
    summing.start(torch.ones(1))
dist.all_reduce = real
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.core
def test_a_sum_that_another_thread_begins_is_never_one_of_the_default_group(tmp_path: Path) -> None:
    run_ranks(_LEAVES_MEANWHILE, tmp_path)


def test_a_rank_leaves_while_torch_waits_to_begin_a_sum(tmp_path: Path) -> None:
    run_ranks(_BEGUN_BY_ONE, tmp_path)


@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.core), 1, 2])
def test_where_one_rank_left_the_others_do_not_wait(tmp_path: Path, first: int) -> None:
    """The timeout of these groups is half an hour. The job's own group is not touched.

    A collective that fails in the middle can leave a message behind that nobody reads, and that blocks the next."""
    run_ranks(_LEFT, tmp_path, str(first), ranks=3)


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_do_not_wait_for_one_that_was_cut_off(tmp_path: Path, late: int) -> None:
    """Whose agreement on preemptions failed, while the others went on to a decision, which may take half an hour."""
    run_ranks(_LATE_FLAG, tmp_path, str(late), ranks=3)


_UNDER_WAY = """
import sys, time
from datetime import timedelta
from pathlib import Path
import pytest
import torch.distributed as dist
import monitor.distributed
from store.errors import SaveError
from tests.support.jobs import Job, committed_steps
monitor.distributed._job_timeout = lambda: timedelta(seconds=2)
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
store, began = Path(path).with_name("store"), Path(path).with_name("began")
job = Job(store, every=2, preemption={"signals": []})
job.step()
if rank == 0:
    def slow(operation, path):
        if operation == "create" and "manifests" in path:
            time.sleep(6.0)
    job.hook().before = slow
    assert job.step().skipped is None
    dist.barrier()
    with pytest.raises(SaveError, match="step 2 is not known to be committed.*; the newest commit is that of step 2"):
        job.ckpt.save(wait=True)
else:
    assert job.step().skipped is None
    dist.barrier()
    time.sleep(5.0)
    with pytest.raises(SaveError, match="step 2 is not known to be committed"):
        job.ckpt.save(wait=True)
with pytest.raises(SaveError):
    job.ckpt.close()
assert committed_steps(store) == [2]
dist.barrier()
dist.destroy_process_group()
"""


def test_a_save_under_way_where_a_rank_is_late_is_committed_and_named(tmp_path: Path) -> None:
    run_ranks(_UNDER_WAY, tmp_path)


def test_a_job_goes_on_saving_after_ranks_did_not_meet(tmp_path: Path) -> None:
    run_ranks(_LATE_COMMIT, tmp_path)


def test_a_rank_may_be_as_late_as_the_job_allows(tmp_path: Path) -> None:
    run_ranks(_LATE, tmp_path)


@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.core), 1])
def test_at_the_end_no_rank_waits_longer_than_the_bound(tmp_path: Path, late: int) -> None:
    """And the job's other collectives go on."""
    run_ranks(_LATE_AT_THE_END, tmp_path, str(late))


@pytest.mark.core
@pytest.mark.parametrize(("hours", "expected"), [(6.0, 6.0), (0.1, 0.5)])
def test_groups_have_the_timeout_of_the_job(hours: float, expected: float) -> None:
    """A shorter one than torch's default for gloo is not taken: it may be meant for the accelerator only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(hours=hours))
    try:
        found = GlooGroup()._group._get_backend(torch.device("cpu")).options._timeout  # type: ignore[attr-defined]
        assert found == timedelta(hours=expected)
    finally:
        dist.destroy_process_group()


_LOST = """
import os, sys, time
import torch
import torch.distributed as dist
from monitor.distributed import current_group
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
summing = current_group().async_sum()
summing.start(torch.ones(1))
while not summing.done:
    time.sleep(0.01)
assert summing.finish().item() == 2.0
if rank == 1:
    os._exit(0)  # before its part of the next one
summing.start(torch.ones(1))
until = time.monotonic() + 3.0
while time.monotonic() < until:
    assert not summing.done
    time.sleep(0.05)
assert summing._work.is_completed(), "it failed by then"
os._exit(0)
"""


def test_a_sum_that_failed_is_not_done(tmp_path: Path) -> None:
    run_ranks(_LOST, tmp_path)


_USUAL = """
import sys
from pathlib import Path
import torch.distributed as dist
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
from tests.support.jobs import Job
job = Job(Path(path).with_name("store"), every=2, preemption={"signals": ["SIGUSR1"]})
for _ in range(6):
    job.step()
job.ckpt.close()
print("Warning: is seen", file=sys.stderr)
dist.barrier()
dist.destroy_process_group()
"""


def test_no_call_that_torch_warns_of(tmp_path: Path) -> None:
    """As ``Work.exception()``, of which torch itself prints a warning, on every rank."""
    printed = run_ranks(_USUAL, tmp_path)
    assert printed.count("Warning: is seen") == 2
    assert "deprecated" not in printed
