"""Lanes of which few elements are not 0: a bit for each element, and those elements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from store.encoding import CHUNK
from store.encoding.base import Lane
from store.encoding.compression import FEW, frame_bound, pack_chunk
from store.errors import DamagedError
from tests.support.entries import unpack_chunk
from tests.unit.store.encoding.test_compression import STORED, framed, planes

SPARSE = 3
KINDS = {2: "<u2", 4: "<u4", 8: "<u8"}


def sparse(count: int, width: int, share: float, seed: int = 0) -> NDArray[np.uint8]:
    """Random elements, of which about ``share`` are not 0."""
    rng = np.random.default_rng(seed)
    values = rng.integers(1, 1 << (8 * width - 1), count, dtype=np.uint64).astype(KINDS[width])
    return np.where(rng.random(count) < share, values, 0).astype(KINDS[width]).view(np.uint8)


def sparse_frame(bits: bytes, *rest: tuple[int, bytes]) -> bytes:
    """A frame of one sparse lane, as the format defines it."""
    body = bytes([SPARSE]) + framed((STORED, bits), *rest)[4:]
    return len(body).to_bytes(4, "little") + body


@settings(max_examples=80, deadline=None)
@given(
    count=st.integers(0, 70_000),
    width=st.sampled_from([2, 4, 8]),
    share=st.sampled_from([0.0, 0.001, 1 / FEW, 0.1, 0.9]),
    seed=st.integers(0, 99),
)
def test_any_lane_comes_back_within_the_bound(count: int, width: int, share: float, seed: int) -> None:
    lanes = (Lane(1, 4), Lane(count, width), Lane(count, 1))
    head = np.frombuffer(b"abcd", np.uint8)
    chunk = np.concatenate([head, sparse(count, width, share, seed), np.zeros(count, np.uint8)])
    frame = pack_chunk(chunk, lanes, 1)
    assert len(frame) <= frame_bound(lanes)
    assert unpack_chunk(frame, lanes).tobytes() == chunk.tobytes()


@pytest.mark.parametrize(("width", "share", "more"), [(4, 0.01, 0.02), (4, 0.05, 0.045), (2, 0.01, 0.02)])
def test_it_takes_little_more_than_the_elements_that_are_not_0(width: int, share: float, more: float) -> None:
    """Those take ``width * share`` bytes an element of the lane; their places, at best, 0.010 and 0.036."""
    chunk, lanes = sparse(CHUNK, width, share), (Lane(CHUNK, width),)
    frame = pack_chunk(chunk, lanes, 1)
    assert frame[4] == SPARSE
    assert len(frame) <= (1.01 * width * share + more) * CHUNK
    assert unpack_chunk(frame, lanes).tobytes() == chunk.tobytes()


def test_a_negative_zero_is_an_element() -> None:
    values = np.zeros(1000, "<f4")
    values[10] = -0.0
    frame = pack_chunk(values.view(np.uint8), (Lane(1000, 4),), 1)
    assert frame[4] == SPARSE
    assert unpack_chunk(frame, (Lane(1000, 4),)).tobytes() == values.tobytes()


def test_lanes_with_more_of_them_are_not_sparse() -> None:
    frame = pack_chunk(sparse(CHUNK, 4, 0.2), (Lane(CHUNK, 4),), 1)
    assert len(planes(frame)) == 4


def test_elements_go_where_their_bits_say() -> None:
    bits = bytes([0b0000_0010, 0b1000_0000])  # the elements 1 and 15
    frame = sparse_frame(bits, (STORED, b"\x01\x02"), (STORED, b"\x03\x04"))
    found = unpack_chunk(frame, (Lane(16, 2),)).view("<u2")
    assert {int(i): int(found[i]) for i in np.flatnonzero(found)} == {1: 0x0301, 15: 0x0402}


@pytest.mark.parametrize(
    ("frame", "match"),
    [
        (sparse_frame(bytes([0, 0b0001_0000]), (STORED, b"")), "bits after its last element"),
        (sparse_frame(bytes([1, 0]), (STORED, b"\x01")), "ends within the head"),
        (sparse_frame(bytes([1, 0]), (STORED, b"\x01"), (STORED, b"")), "0 bytes instead of 1"),
        (sparse_frame(bytes([1]), (STORED, b"\x01"), (STORED, b"\x01")), "1 bytes instead of 2"),
        (sparse_frame(bytes([1, 0]), (STORED, b"\x01"), (STORED, b"\x01"), (STORED, b"")), "more than its planes"),
    ],
    ids=["bits beyond", "a plane lost", "a short plane", "short bits", "a plane more"],
)
def test_what_was_never_written_is_damage(frame: bytes, match: str) -> None:
    with pytest.raises(DamagedError, match=match):
        unpack_chunk(frame, (Lane(12, 2),))
