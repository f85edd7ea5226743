"""All ranks or none: an error on one rank is an error, of its own class, on every rank. Ranks are threads here,
meeting in a group that keeps the contract of the real one; real ranks are in tests/distributed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from monitor.distributed import Group, run_on_all_ranks, run_on_rank0
from store.errors import ConfigError, DriftpointError, StorageError


class Threads:
    """A rank of a group whose ranks are threads."""

    def __init__(self, rank: int, meeting: threading.Barrier, table: list[Any]) -> None:
        self.rank, self.world_size = rank, len(table)
        self._meeting, self._table = meeting, table

    def all_gather(self, value: Any) -> list[Any]:
        self._table[self.rank] = value
        self._meeting.wait(180)
        every = list(self._table)
        self._meeting.wait(180)
        return every

    def broadcast(self, value: Any) -> Any:
        return self.all_gather(value)[0]

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        return [max(column) for column in zip(*self.all_gather(list(values)), strict=True)]

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.all_gather(values)).sum(0)


def on_ranks(action: Callable[[Group], Any], world_size: int = 3) -> list[Any]:
    """What the action returns, or the error it raises, by rank."""
    meeting, table, results = threading.Barrier(world_size), [None] * world_size, [None] * world_size

    def work(rank: int) -> None:
        try:
            results[rank] = action(Threads(rank, meeting, table))
        except Exception as error:  # noqa: BLE001 - a thread's edge
            results[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    return results


def fail_on(rank: int, error: Exception, group: Group) -> int:
    if group.rank == rank:
        raise error
    return group.rank * 10


def test_everywhere_gives_each_rank_its_own_result() -> None:
    assert on_ranks(lambda group: run_on_all_ranks(group, lambda: group.rank * 10)) == [0, 10, 20]


def test_an_error_on_one_rank_is_everybodys() -> None:
    results = on_ranks(
        lambda group: run_on_all_ranks(group, lambda: fail_on(1, StorageError("the disk is gone"), group))
    )
    assert [type(one) for one in results] == [StorageError] * 3
    assert [str(one) for one in results] == ["rank 1: the disk is gone", "the disk is gone", "rank 1: the disk is gone"]


def test_the_first_ranks_answer_is_everybodys() -> None:
    assert on_ranks(lambda group: run_on_rank0(group, lambda: f"rank {group.rank}")) == ["rank 0"] * 3


def test_the_first_ranks_error_is_everybodys() -> None:
    results = on_ranks(lambda group: run_on_rank0(group, lambda: fail_on(0, ConfigError("no"), group)))
    assert [(type(one), str(one)) for one in results] == [(ConfigError, "no")] * 3


def test_other_ranks_do_not_act() -> None:
    assert on_ranks(lambda group: run_on_rank0(group, lambda: fail_on(2, ConfigError("no"), group))) == [0, 0, 0]


def test_an_error_class_of_somebody_else_keeps_its_message() -> None:
    class Odd(DriftpointError):
        pass

    results = on_ranks(lambda group: run_on_all_ranks(group, lambda: fail_on(0, Odd("strange"), group)))
    assert type(results[0]) is Odd
    assert [(type(one), str(one)) for one in results[1:]] == [(DriftpointError, "rank 0: strange")] * 2


def test_an_error_that_nobody_raises_on_purpose_is_everybodys_too() -> None:
    error = KeyError("epoch")
    results = on_ranks(lambda group: run_on_all_ranks(group, lambda: fail_on(1, error, group)))
    assert results[1] is error
    assert [(type(results[rank]), str(results[rank])) for rank in (0, 2)] == [
        (DriftpointError, "rank 1: KeyError('epoch')")
    ] * 2
    results = on_ranks(lambda group: run_on_rank0(group, lambda: fail_on(0, error, group)))
    assert results[0] is error
    assert [(type(one), str(one)) for one in results[1:]] == [(DriftpointError, "KeyError('epoch')")] * 2


def test_alone_keeps_the_error_itself() -> None:
    error = StorageError("gone")
    for run in (run_on_all_ranks, run_on_rank0):
        with pytest.raises(StorageError) as caught:
            run(Group(), lambda: fail_on(0, error, Group()))
        assert caught.value is error
