"""A job of one process; and that gloo is only used where there are more."""

from __future__ import annotations

import torch
import torch.distributed as dist

from monitor.distributed import SingleProcessGroup, current_group


def test_without_a_process_group_a_job_is_alone() -> None:
    assert not dist.is_initialized()
    assert isinstance(current_group(), SingleProcessGroup)


def test_alone_is_the_sum_the_maximum_and_the_first_of_itself() -> None:
    group = SingleProcessGroup()
    assert (group.rank, group.world_size) == (0, 1)
    assert group.all_reduce_max([True, 3, -2]) == [1, 3, -2]
    assert torch.equal(group.all_reduce_sum(torch.tensor([1.5, 2.0])), torch.tensor([1.5, 2.0]))
    assert group.broadcast("x") == "x"
    assert group.all_gather({"a": 1}) == [{"a": 1}]
