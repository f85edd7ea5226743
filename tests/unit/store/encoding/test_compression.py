"""Frames of byte planes: what packs does, what does not is stored, and no lie is believed."""

from __future__ import annotations

import contextlib
import struct
import threading
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from store.encoding import CHUNK, ENCODINGS
from store.encoding.base import Lane, lanes_bytes
from store.encoding.compression import frame_bound, pack_chunk, packed_bound
from store.errors import DamagedError
from tests.support.entries import unpack_chunk

STORED, ZSTD = 0, 1
LANES = (Lane(1000, 2), Lane(10, 4))


def content(seed: int = 0) -> NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    return np.concatenate([np.repeat(np.arange(20, dtype=np.uint8), 100), rng.integers(0, 256, 40, dtype=np.uint8)])


def planes(frame: bytes) -> list[tuple[int, bytes]]:
    assert struct.unpack_from("<I", frame)[0] == len(frame) - 4
    at, found = 4, []
    while at < len(frame):
        method, length = struct.unpack_from("<BI", frame, at)
        found.append((method, frame[at + 5 : at + 5 + length]))
        at += 5 + length
    return found


def framed(*planes: tuple[int, bytes], lie: int = 0) -> bytes:
    body = b"".join(struct.pack("<BI", method, len(data)) + data for method, data in planes)
    return struct.pack("<I", len(body) + lie) + body


def test_the_layout_to_the_byte() -> None:
    chunk = np.array([1, 2, 3, 4, 5, 6, 7], np.uint8)
    frame = pack_chunk(chunk, (Lane(2, 2), Lane(3, 1)), 1)
    assert frame == framed((STORED, b"\1\3"), (STORED, b"\2\4"), (STORED, b"\5\6\7"))
    assert unpack_chunk(frame, (Lane(2, 2), Lane(3, 1))).tobytes() == chunk.tobytes()


def test_each_plane_is_packed_or_stored_by_itself() -> None:
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(CHUNK) * 1e-2).astype("<f4")
    frame = pack_chunk(values.view(np.uint8), (Lane(CHUNK, 4),), 1)
    found = planes(frame)
    assert [method for method, _ in found] == [STORED, STORED, STORED, ZSTD]
    assert len(frame) < 0.86 * values.nbytes


def test_planes_are_plain_zstd_frames() -> None:
    frame = pack_chunk(np.zeros(5000, np.uint8), (Lane(5000, 1),), 3)
    [(method, data)] = planes(frame)
    assert method == ZSTD
    assert zstandard.ZstdDecompressor().decompress(data) == bytes(5000)


def test_noise_grows_by_no_more_than_the_bound() -> None:
    noise = np.random.default_rng(0).integers(0, 256, 4 * CHUNK, dtype=np.uint8)
    lanes = (Lane(CHUNK, 4),)
    frame = pack_chunk(noise, lanes, 19)
    assert len(frame) == frame_bound(lanes) == 4 * CHUNK + 24
    assert packed_bound(ENCODINGS["raw"], 2 * CHUNK + 1, "F32") == 2 * frame_bound(lanes) + 4 + 4 * 6


def test_an_unchanged_chunk_packs_to_almost_nothing_as_a_difference() -> None:
    noise = np.random.default_rng(0).integers(0, 256, 2 * CHUNK, dtype=np.uint8)
    lanes = (Lane(CHUNK, 2),)
    frame = pack_chunk(noise, lanes, 1, noise.copy())
    assert len(frame) < 300
    assert unpack_chunk(frame, lanes, noise).tobytes() == noise.tobytes()


@pytest.mark.parametrize("level", [-5, 1, 9])
def test_levels_and_threads_do_not_matter_to_the_reader(level: int) -> None:
    frames = []
    threads = [threading.Thread(target=lambda: frames.append(pack_chunk(content(), LANES, level))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [unpack_chunk(frame, LANES).tobytes() for frame in frames] == [content().tobytes()] * 3


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_flipped_or_lost_byte_is_damage_or_other_bytes_of_the_same_size(data: st.DataObject) -> None:
    frame = bytearray(pack_chunk(content(), LANES, 1))
    if data.draw(st.booleans()):
        frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        del frame[data.draw(st.integers(0, len(frame) - 1)) :]
    with contextlib.suppress(DamagedError):
        assert unpack_chunk(bytes(frame), LANES).size == lanes_bytes(LANES)


@settings(max_examples=300, deadline=None)
@given(junk=st.binary(max_size=60))
def test_junk_is_damage(junk: bytes) -> None:
    with pytest.raises(DamagedError):
        unpack_chunk(junk, LANES)


PLAIN = bytes(200)
GOOD = zstandard.compress(PLAIN)


@pytest.mark.parametrize(
    "frame",
    [
        framed((STORED, PLAIN[1:])),
        framed((2, PLAIN)),
        framed((ZSTD, PLAIN)),
        framed((ZSTD, zstandard.compress(PLAIN[1:]))),
        framed((ZSTD, zstandard.compress(PLAIN + b"x"))),
        framed((ZSTD, GOOD + b"x")),
        framed((ZSTD, GOOD * 2)),
        framed((ZSTD, GOOD[:-1])),
        framed((ZSTD, zstandard.ZstdCompressor(write_content_size=False).compress(PLAIN))),
        framed((ZSTD, GOOD), (STORED, b"")),
        framed((ZSTD, GOOD)) + b"x",
        framed((ZSTD, GOOD), lie=1),
        framed((ZSTD, GOOD), lie=-1),
        struct.pack("<IBI", 6, STORED, 200) + b"x",  # one byte where a plane should be: it must not be repeated
        struct.pack("<IBI", 5, STORED, 200),
        struct.pack("<IB", 1, STORED),
        framed(),
        b"\xff\xff\xff\xff",
        b"\0\0",
    ],
)
def test_lies_are_damage(frame: bytes) -> None:
    lanes = (Lane(200, 1),)
    assert unpack_chunk(framed((ZSTD, GOOD)), lanes).tobytes() == unpack_chunk(framed((STORED, PLAIN)), lanes).tobytes()
    with pytest.raises(DamagedError):
        unpack_chunk(frame, lanes)


def test_a_bomb_is_never_inflated() -> None:
    bomb = zstandard.compress(bytes(256 << 20))
    honest_size_hidden = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))
    # A header that promises what is asked for, and data that is 256 MiB.
    lying = bytearray(bomb)
    assert zstandard.get_frame_parameters(bytes(lying)).content_size == 256 << 20
    header = zstandard.frame_header_size(bytes(lying))
    lying = bytearray(b"\x28\xb5\x2f\xfd\x20") + bytes([100]) + lying[header:]
    assert zstandard.get_frame_parameters(bytes(lying)).content_size == 100
    lanes = (Lane(100_000, 1),)
    tracemalloc.start()
    try:
        for data in (bomb, honest_size_hidden):
            with pytest.raises(DamagedError):
                unpack_chunk(framed((ZSTD, data)), lanes)
        with pytest.raises(DamagedError):
            unpack_chunk(framed((ZSTD, bytes(lying))), (Lane(100, 1), Lane(100_000, 1)))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_frame_of_absurd_length_is_refused_by_its_header() -> None:
    with pytest.raises(DamagedError, match="claims"):
        unpack_chunk(struct.pack("<I", 0xFFFFFFFF) + bytes(10), LANES)
