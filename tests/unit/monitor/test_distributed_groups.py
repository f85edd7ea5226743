"""A job of one process; and that gloo is only used where there are more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from monitor.distributed import Group, current_group
from tests.support.ranks import run_ranks


def test_without_a_process_group_a_job_is_alone() -> None:
    assert not dist.is_initialized()
    assert type(current_group()) is Group


def test_alone_is_the_sum_the_maximum_and_the_first_of_itself() -> None:
    group = Group()
    assert (group.rank, group.world_size) == (0, 1)
    assert group.all_reduce_max([True, 3, -2]) == [1, 3, -2]
    assert torch.equal(group.all_reduce_sum(torch.tensor([1.5, 2.0])), torch.tensor([1.5, 2.0]))
    assert group.broadcast("x") == "x"
    assert group.all_gather({"a": 1}) == [{"a": 1}]


_LENGTHS = """
import sys
import torch.distributed as dist
from monitor.distributed import _BROADCAST, _GATHER, GlooGroup
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
group = GlooGroup()
around = [size + more for size in (0, _GATHER, _BROADCAST, 3_000_000) for more in range(-80, 80, 8) if size + more >= 0]
for length in around:
    value = {"rank": rank, "data": bytes([rank + 1]) * (length if rank == length % 2 else 3)}
    values = group.all_gather(value)
    assert [one["rank"] for one in values] == [0, 1]
    assert [len(one["data"]) for one in values] == [length if one == length % 2 else 3 for one in (0, 1)]
    assert values[rank] == value and set(values[1 - rank]["data"]) <= {2 - rank}
    assert group.broadcast(("a" * length, rank)) == ("a" * length, 0)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.core
def test_messages_of_any_length_arrive(tmp_path: Path) -> None:
    run_ranks(_LENGTHS, tmp_path)
