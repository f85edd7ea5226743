from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.stdlib_text import SEPARATOR, Batches, standard_library

TEXT = np.random.default_rng(0).integers(0, 256, 40 * 8 + 5, dtype=np.uint8)
"""40 windows of 8, and a bit."""


def batches(**changed: int) -> Batches:
    settings = {"length": 8, "size": 2, "seed": 3, **changed}
    return Batches(TEXT, **settings)


def taken(source: Batches, count: int) -> list[torch.Tensor]:
    return [next(source) for _ in range(count)]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_text_is_python_sources_in_an_order_that_does_not_change() -> None:
    text = standard_library(1 << 18)
    assert len(text) == 1 << 18
    assert b"def " in text.tobytes()
    assert text.tobytes().count(SEPARATOR) >= 2
    assert np.array_equal(text, standard_library(1 << 18))


@pytest.mark.slow
def test_a_smaller_limit_gives_the_beginning_of_the_same_text() -> None:
    assert standard_library(1 << 18)[: 1 << 12].tobytes() == standard_library(1 << 12).tobytes()


def test_a_batch_is_windows_of_the_text() -> None:
    batch = next(batches())
    assert batch.shape == (2, 8)
    assert batch.dtype == torch.int64
    windows = {tuple(window) for window in TEXT[:320].reshape(-1, 8).tolist()}
    assert all(tuple(row) in windows for row in batch.tolist())


def test_an_epoch_holds_every_window_once_and_the_next_is_in_another_order() -> None:
    source = batches()
    first, second = torch.cat(taken(source, 20)), torch.cat(taken(source, 20))
    assert sorted(first.tolist()) == sorted(TEXT[:320].reshape(-1, 8).tolist())
    assert sorted(first.tolist()) == sorted(second.tolist())
    assert not torch.equal(first, second)


def test_the_seed_decides_the_order() -> None:
    assert equal(taken(batches(), 30), taken(batches(), 30))
    assert not equal(taken(batches(), 5), taken(batches(seed=4), 5))


def test_ranks_share_out_what_one_rank_would_take() -> None:
    alone = taken(batches(size=4), 15)
    two = [batches(rank=rank, world_size=2) for rank in range(2)]
    assert equal(alone, [torch.cat([next(source) for source in two]) for _ in range(15)])


@given(before=st.integers(0, 45), after=st.integers(1, 45))
def test_a_saved_place_continues_as_if_nothing_had_happened(before: int, after: int) -> None:
    source = batches()
    taken(source, before)
    place = source.state_dict()
    expected = taken(source, after)
    resumed = batches()
    resumed.load_state_dict(place)
    assert equal(expected, taken(resumed, after))


def test_a_saved_place_is_not_moved_by_going_on() -> None:
    source = batches()
    place = source.state_dict()
    taken(source, 25)
    assert place == batches().state_dict()
    assert place != source.state_dict()


def test_another_world_size_goes_on_with_windows_not_seen_yet() -> None:
    two = [batches(rank=rank, world_size=2) for rank in range(2)]
    seen = torch.cat([next(source) for _ in range(5) for source in two])
    alone = batches(size=4)
    alone.load_state_dict(two[1].state_dict())
    rest = torch.cat(taken(alone, 5))
    assert sorted(torch.cat([seen, rest]).tolist()) == sorted(TEXT[:320].reshape(-1, 8).tolist())


@pytest.mark.parametrize("changed", [{"seed": 4}, {"length": 16}])
def test_a_place_in_another_order_is_refused(changed: dict[str, int]) -> None:
    place = batches().state_dict()
    with pytest.raises(ValueError, match="same text, window length and seed"):
        batches(**changed).load_state_dict(place)


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        batches(size=41)
