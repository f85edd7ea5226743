"""A place in the data that fits any number of ranks: with torchdata's own loader, and workers that are ahead."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

import monitor
from examples.data_position import DataPosition, GlobalOrder
from store.errors import UsageError
from tests.support.torch_jobs import Job


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(100))


def loader_of(data: Any, **options: Any) -> Any:
    loading = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    return loading.StatefulDataLoader(data, **options)


def positions(length: int, batch: int, ranks: int, workers: int = 0, **options: Any) -> list[DataPosition]:
    made = []
    for rank in range(ranks):
        order = GlobalOrder(length, batch, rank=rank, world_size=ranks, seed=5, **options)
        ahead = {"persistent_workers": True, "drop_last": True} if workers else {}
        loader = loader_of(Numbers(length), batch_size=batch, sampler=order, num_workers=workers, **ahead)
        made.append(DataPosition(loader, order))
    return made


def endless(position: DataPosition) -> Any:
    while True:
        yield from position


def take(found: Iterable[Any], steps: int) -> list[list[int]]:
    """The samples of each step, over all ranks."""
    each = [list(islice(one, steps)) for one in found]
    return [sorted(torch.cat(batches).tolist()) for batches in zip(*each, strict=True)]


def row(length: int, count: int) -> list[int]:
    order = GlobalOrder(length, 1, rank=0, world_size=1, seed=5)
    return [order.sample(at) for at in range(count)]


@given(
    length=st.integers(1, 30),
    phases=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 7)), min_size=1, max_size=4),
)
@settings(deadline=None)
def test_no_sample_is_repeated_or_left_out(length: int, phases: list[tuple[int, int, int]]) -> None:
    """Without a loader: (ranks, batch size, steps) one after the other, over as many epochs as it takes."""
    position, taken = 0, []
    for ranks, batch, steps in phases:
        orders = [GlobalOrder(length, batch, rank=rank, world_size=ranks, seed=5) for rank in range(ranks)]
        left = steps
        while left:
            for order in orders:
                order.position = position
            each = [list(order) for order in orders]
            assert {len(one) for one in each} == {len(orders[0])} and len(orders[0]) % batch == 0
            begun = min(left, len(orders[0]) // batch)
            for number in range(begun):
                taken += [sample for one in each for sample in one[number * batch : (number + 1) * batch]]
            position, left = position + begun * batch * ranks, left - begun
    assert taken == row(length, position)
    for epoch in range(position // length):
        assert sorted(taken[epoch * length : (epoch + 1) * length]) == list(range(length))


@pytest.mark.parametrize(
    ("ranks_before", "ranks", "workers"), [(2, 2, 0), (2, 2, 2), (2, 1, 0), (2, 4, 0), (4, 3, 0), (2, 3, 2)]
)
def test_a_loader_goes_on_with_another_number_of_ranks(ranks_before: int, ranks: int, workers: int) -> None:
    length, batch = 23, 2
    before = positions(length, batch, ranks_before, workers)
    first = take(map(endless, before), 8)  # into the second epoch, or the third
    saved = [one.state_dict() for one in before]
    at = 8 * ranks_before * batch
    assert {one["samples"] for one in saved} == {at}
    after = positions(length, batch, ranks, workers)
    for number, one in enumerate(after):
        one.state_dict()  # as a resume asks for the state that it may have to go back to
        one.load_state_dict(json.loads(json.dumps(saved[number])) if number < len(saved) else saved[0])
        again = one.state_dict()  # a save before anything is taken
        assert again["samples"] == at
        one.load_state_dict(again)
    second = take(map(endless, after), 9)
    whole = row(length, at + 9 * ranks * batch)
    steps = [whole[begin : begin + ranks_before * batch] for begin in range(0, at, ranks_before * batch)]
    steps += [whole[begin : begin + ranks * batch] for begin in range(at, len(whole), ranks * batch)]
    assert first + second == [sorted(step) for step in steps]
    assert {one.samples for one in after} == {len(whole)}


def test_an_iteration_that_was_left_goes_on_with_the_rest() -> None:
    (one,) = positions(23, 2, 1)
    taken = [sample for _ in range(2) for batch in islice(iter(one), 3) for sample in batch.tolist()]
    assert taken == row(23, 12) and one.samples == 12 and len(one) == 6


def test_data_in_another_order_is_refused() -> None:
    (one,), order = positions(23, 2, 1), GlobalOrder(23, 2, rank=0, world_size=1, seed=6)
    saved = one.state_dict()
    with pytest.raises(ValueError, match=r"\[23, 5, True\].*means other samples"):
        DataPosition(loader_of(Numbers(23), batch_size=2, sampler=order), order).load_state_dict(saved)
    with pytest.raises(ValueError, match="sampler=order"):
        DataPosition(loader_of(Numbers(23), batch_size=2), order)


def test_the_same_global_batch_gives_the_same_steps() -> None:
    assert take(map(endless, positions(23, 2, 3)), 9) == take(map(endless, positions(23, 3, 2)), 9)


def test_iterable_data_refuses_another_number_of_ranks() -> None:
    one = DataPosition(loader_of(Stream(), batch_size=2))
    assert [batch.tolist() for batch in islice(iter(one), 3)][-1] == [4, 5]
    saved = one.state_dict()
    again = DataPosition(loader_of(Stream(), batch_size=2))
    again.load_state_dict(saved)
    assert next(iter(again)).tolist() == [6, 7] and again.samples == 4
    with pytest.raises(ValueError, match="samples would be repeated or left out"):
        again.load_state_dict({**saved, "ranks": [0, 2]})


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="data rank below"):
        GlobalOrder(5, 1, rank=2, world_size=2)
    with pytest.raises(ValueError, match="same batch_size"):
        DataPosition(loader_of(Numbers(5), batch_size=2), GlobalOrder(5, 3, rank=0, world_size=1))


def test_a_job_saves_and_resumes_it(tmp_path: Path) -> None:
    def run(steps: int, ranks: int) -> tuple[int, list[list[int]]]:
        """A job that sees its data as rank 0 of so many."""
        job, (position, *_) = Job(1), positions(23, 2, ranks)
        config = {"store": str(tmp_path / "store"), "every": 1, "metrics": {"enabled": False}}
        with monitor.attach((job.model, job.optimizer), config, state={"data": position}) as ckpt:
            begun, seen = ckpt.resume(), []
            for _, batch in zip(range(begun, steps), endless(position), strict=False):
                seen.append(batch.tolist())
                job.train(0, 1)
                ckpt.step()
        return begun, seen

    whole = row(23, 60)
    assert run(4, 2) == (0, [whole[at : at + 2] for at in (0, 4, 8, 12)])
    assert run(7, 2) == (4, [whole[at : at + 2] for at in (16, 20, 24)])
    assert run(9, 3) == (7, [whole[at : at + 2] for at in (28, 34)])
    stream = DataPosition(loader_of(Stream(), batch_size=2))
    job = Job(1)
    stream._ranks = lambda: [0, 2]  # type: ignore[method-assign]
    config = {"store": str(tmp_path / "other"), "every": 1, "metrics": {"enabled": False}}
    with monitor.attach((job.model, job.optimizer), config, state={"data": stream}) as ckpt:
        ckpt.resume()
        next(iter(stream))
        job.train(0, 1)
        ckpt.step()
    again = Job(1)
    with (
        monitor.attach(
            (again.model, again.optimizer), config, state={"data": DataPosition(loader_of(Stream(), batch_size=2))}
        ) as ckpt,
        pytest.raises(UsageError, match="samples would be repeated or left out"),
    ):
        ckpt.resume()
