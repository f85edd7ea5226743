"""Staging buffers are used again, and copies are the state as it stood when they were asked for."""

from __future__ import annotations

import threading

import pytest
import torch

from monitor.adapters.base import Piece
from monitor.adapters.module_tensors import as_bytes
from monitor.observe.units import UnitLayout
from monitor.save.async_copy import AsyncCopy
from monitor.save.staging import StagingPool
from store.errors import SaveError
from store.names import Fragment, Unit

UNIT = Unit("blocks.0", "fp32")


def free_bytes(pool: StagingPool) -> int:
    return sum(b.numel() * b.element_size() for sets in pool._free.values() for _, buffers in sets for b in buffers)


def layout(tensors: list[torch.Tensor]) -> UnitLayout:
    return UnitLayout.of([Piece(Fragment(str(i), "fp32", 0, t.numel()), t) for i, t in enumerate(tensors)])


def tensors() -> list[torch.Tensor]:
    return [torch.randn(5), torch.randn(3).to(torch.bfloat16)]


def test_reserved_buffers_are_taken_and_taken_again() -> None:
    pool, live = StagingPool(), layout(tensors())
    pool.reserve(UNIT, live)
    assert free_bytes(pool) == 5 * 4 + 3 * 2
    first = pool.take(UNIT, live)
    assert free_bytes(pool) == 0
    assert [(b.dtype, b.numel()) for b in first] == [(torch.float32, 5), (torch.bfloat16, 3)]
    pool.give(UNIT, first, live)
    again = pool.take(UNIT, live)
    assert [b.data_ptr() for b in again] == [b.data_ptr() for b in first]


def test_what_is_prepared_is_what_was_reserved() -> None:
    pool, live = StagingPool(), layout(tensors())
    pool.reserve(UNIT, live)
    reserved = [b.data_ptr() for b in pool._free[UNIT][0][1]]
    pool.prepare(UNIT, live)
    assert [b.data_ptr() for b in pool._free[UNIT][0][1]] == reserved and len(pool._free[UNIT]) == 1


def test_buffers_in_use_are_not_touched() -> None:
    pool, live = StagingPool(), layout(tensors())
    pool.reserve(UNIT, live)
    taken = pool.take(UNIT, live)
    for buffer in taken:
        buffer.fill_(7)
    pool.prepare(UNIT, live)
    assert all(bool((buffer == 7).all()) for buffer in taken)
    assert free_bytes(pool) == 0


def test_a_unit_that_appeared_after_attaching_is_reserved_when_prepared() -> None:
    pool, live = StagingPool(), layout(tensors())
    pool.prepare(UNIT, live)
    assert free_bytes(pool) == 5 * 4 + 3 * 2
    pool.prepare(UNIT, live)
    assert free_bytes(pool) == 5 * 4 + 3 * 2


def test_a_second_set_is_another_one() -> None:
    pool, live = StagingPool(), layout(tensors())
    one, other = pool.take(UNIT, live), pool.take(UNIT, live)
    assert not {b.data_ptr() for b in one} & {b.data_ptr() for b in other}


def test_buffers_of_an_earlier_shape_are_dropped() -> None:
    pool = StagingPool()
    pool.reserve(UNIT, layout(tensors()))
    taken = pool.take(UNIT, layout([torch.zeros(9)]))
    assert [b.numel() for b in taken] == [9]
    assert free_bytes(pool) == 0


def copying(live: list[torch.Tensor]) -> tuple[AsyncCopy, list[torch.Tensor]]:
    made, buffers = AsyncCopy(), [torch.empty_like(t) for t in live]
    made.add(live, buffers)
    made.start()
    return made, buffers


def test_copies_are_equal_to_the_bit_and_stand_still() -> None:
    live = [torch.tensor([float("nan"), -0.0, 1e-45]), torch.arange(3)]
    made, buffers = copying(live)
    made.finish()
    made.require_whole()
    before = [bytes(as_bytes(buffer)) for buffer in buffers]
    assert before == [bytes(as_bytes(t)) for t in live]
    for t in live:
        t.zero_()
    made.finish()
    assert [bytes(as_bytes(buffer)) for buffer in buffers] == before


def test_a_change_before_the_copy_is_noticed() -> None:
    live = tensors()
    made, _ = copying(live)
    live[0].add_(1)
    made.finish()
    with pytest.raises(SaveError, match="staging: eager"):
        made.require_whole()


def test_a_copy_that_failed_is_not_whole() -> None:
    live = tensors()
    made = AsyncCopy()
    made.add([*live, torch.zeros(3)], [torch.empty_like(live[0]), torch.empty_like(live[1]), torch.empty(2)])
    with pytest.raises(RuntimeError):
        made.finish()
    made.finish()
    with pytest.raises(SaveError):
        made.require_whole()


def test_two_threads_finish_the_same_copies_once() -> None:
    live = [torch.randn(1 << 16) for _ in range(8)]
    made, buffers = copying(live)
    threads = [threading.Thread(target=made.finish) for _ in range(4)]
    for thread in threads:
        thread.start()
    made.finish()
    assert all(torch.equal(t, b) for t, b in zip(live, buffers, strict=True))
    for thread in threads:
        thread.join()


def test_bytes_are_the_tensors_own_memory() -> None:
    tensor = torch.tensor([1.0, 2.0])
    view = as_bytes(tensor)
    assert view.nbytes == 8 and view.format == "B"
    tensor[0] = 0.0
    assert bytes(view[:4]) == b"\0\0\0\0"
