"""Planes of mostly small values: their low bits share bytes, the rest is a plane of its own."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from store.encoding import CHUNK
from store.encoding.base import Lane
from store.encoding.compression import frame_bound, pack_bits, pack_chunk, unpack_bits
from store.errors import DamagedError
from tests.support.entries import unpack_chunk
from tests.unit.store.encoding.test_compression import STORED, ZSTD, framed, planes

SPLIT = 2
Bytes = NDArray[np.uint8]


def small(count: int, bits: int, outliers: int = 0, seed: int = 0) -> Bytes:
    rng = np.random.default_rng(seed)
    values = rng.geometric(0.6, count).astype(np.uint8) - 1
    values = np.minimum(values, (1 << bits) - 1)
    values[rng.integers(0, count, outliers)] = rng.integers(0, 256, outliers)
    return values


@given(values=st.binary(max_size=70), bits=st.sampled_from([1, 2, 4]))
def test_bits_of_values_share_bytes_the_first_lowest(values: bytes, bits: int) -> None:
    plane = np.frombuffer(values, np.uint8)
    packed = pack_bits(plane, bits)
    number = sum((value & ((1 << bits) - 1)) << (bits * i) for i, value in enumerate(values))
    assert packed.tobytes() == number.to_bytes(-(-len(values) * bits // 8), "little")
    assert unpack_bits(packed, bits, plane.size).tolist() == [value & ((1 << bits) - 1) for value in values]


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 70_000), bits=st.sampled_from([1, 2, 4, 8]), outliers=st.integers(0, 50),
       seed=st.integers(0, 99))  # fmt: skip
def test_any_plane_comes_back_within_the_bound(count: int, bits: int, outliers: int, seed: int) -> None:
    plane, lanes = small(count, bits, outliers, seed), (Lane(count, 1),)
    frame = pack_chunk(plane, lanes, 1)
    assert len(frame) <= frame_bound(lanes)
    assert unpack_chunk(frame, lanes).tobytes() == plane.tobytes()


@pytest.mark.parametrize(("bits", "outliers"), [(2, 0), (2, 200), (4, 0), (4, 200)])
def test_small_values_take_less_than_zstd_alone_makes_of_them(bits: int, outliers: int) -> None:
    plane = small(CHUNK, bits, outliers)
    frame = pack_chunk(plane, (Lane(CHUNK, 1),), 1)
    [(method, data)] = planes(frame)
    assert (method, data[0] in (2, 4)) == (SPLIT, True)
    assert len(frame) < 0.93 * len(zstandard.compress(plane, 1))
    assert unpack_chunk(frame, (Lane(CHUNK, 1),)).tobytes() == plane.tobytes()


def test_the_rest_is_left_out_where_it_is_zero() -> None:
    for outliers, parts in ((0, 1), (5, 2)):
        [(_, data)] = planes(pack_chunk(small(CHUNK, 2, outliers), (Lane(CHUNK, 1),), 1))
        within = planes(len(data[1:]).to_bytes(4, "little") + data[1:])
        assert len(within) == parts and {method for method, _ in within} <= {STORED, ZSTD}


def inner(*planes: tuple[int, bytes], bits: int = 2) -> bytes:
    return bytes([bits]) + framed(*planes)[4:]


LOW = bytes([0b11100100] * 25)  # of 100 values: 0, 1, 2, 3, ...
HIGH = bytes(99) + b"\x3f"


def test_the_layout_to_the_byte() -> None:
    lanes = (Lane(100, 1),)
    assert unpack_chunk(framed((SPLIT, inner((STORED, LOW)))), lanes).tolist() == [0, 1, 2, 3] * 25
    both = inner((ZSTD, zstandard.compress(LOW)), (ZSTD, zstandard.compress(HIGH)))
    assert unpack_chunk(framed((SPLIT, both)), lanes).tolist() == [0, 1, 2, 3] * 24 + [0, 1, 2, 255]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\2",
        inner((STORED, LOW), bits=3),
        inner((STORED, LOW), bits=8),
        inner((STORED, LOW), bits=0),
        inner((STORED, LOW), bits=4),
        inner((STORED, LOW[1:])),
        inner((STORED, LOW + b"x")),
        inner((SPLIT, inner((STORED, LOW[:7])))),
        inner((STORED, LOW), (SPLIT, inner((STORED, LOW)))),
        inner((STORED, LOW), (STORED, HIGH[1:])),
        inner((STORED, LOW), (STORED, HIGH[:-1] + b"\x40")),
        inner((STORED, LOW), (STORED, HIGH), (STORED, b"")),
        inner((STORED, LOW), (3, HIGH)),
        inner((STORED, LOW)) + b"x",
        inner((STORED, LOW))[:-1],
    ],
)
def test_lies_are_damage(data: bytes) -> None:
    with pytest.raises(DamagedError):
        unpack_chunk(framed((SPLIT, data)), (Lane(100, 1),))


def test_bits_after_the_last_value_are_damage() -> None:
    lanes = (Lane(101, 1),)
    assert unpack_chunk(framed((SPLIT, inner((STORED, LOW + b"\x03")))), lanes).tolist() == [*[0, 1, 2, 3] * 25, 3]
    with pytest.raises(DamagedError, match="after its last value"):
        unpack_chunk(framed((SPLIT, inner((STORED, LOW + b"\x07")))), lanes)
