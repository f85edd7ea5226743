"""Differences between encoded chunks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.encoding.base import Lane, lanes_bytes
from store.encoding.compression import apply_difference, difference


@given(lanes=st.lists(st.builds(Lane, st.integers(0, 40), st.integers(1, 9)), max_size=3), seed=st.integers(0, 1000))
def test_any_two_chunks_there_and_back(lanes: list[Lane], seed: int) -> None:
    rng = np.random.default_rng(seed)
    new, old = (rng.integers(0, 256, lanes_bytes(lanes), dtype=np.uint8) for _ in range(2))
    assert apply_difference(difference(new, old, lanes), old, lanes).tobytes() == new.tobytes()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_small_differences_of_either_sign_are_small_numbers(width: int) -> None:
    dtype = f"<u{width}"
    old = np.array([5, 5, 5, 0, 0, 5], dtype)
    new = np.array([5, 6, 4, 0, 0, 7], dtype)
    new[3] = old[4] = np.iinfo(dtype).max  # one below 0, for it wraps around
    delta = difference(new.view(np.uint8), old.view(np.uint8), (Lane(6, width),)).view(dtype)
    assert delta.tolist() == [0, 2, 1, 1, 2, 4]


def test_nothing_changed_is_nothing() -> None:
    chunk = np.arange(30, dtype=np.uint8)
    assert not difference(chunk, chunk, (Lane(5, 2), Lane(5, 4))).any()


def test_chunks_of_other_sizes_are_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="lanes of 8"):
        difference(np.zeros(8, np.uint8), np.zeros(7, np.uint8), (Lane(4, 2),))
