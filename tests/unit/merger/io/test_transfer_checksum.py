from __future__ import annotations

import random
import zlib
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from isal import isal_zlib

from merger.io.blocks import Crc32, xxh3
from merger.io.output_file import Hole
from merger.io.transfer import Piece, checksums, combine_crcs, crc_of_zeros
from store.errors import MergeError
from tests.support.extents import wanted


@st.composite
def cut(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, int]]]:
    """Bytes, and pieces of them in some order; between the pieces the bytes are zero."""
    data = bytearray(draw(st.binary(max_size=300)))
    marks = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    spans = list(pairwise(marks))
    kept = [span for span in spans if span[1] > span[0] and draw(st.booleans())]
    inside = {i for start, stop in kept for i in range(start, stop)}
    for i in range(len(data)):
        if i not in inside:
            data[i] = 0
    return bytes(data), draw(st.permutations(kept))


@given(cut(), st.integers(0, 1 << 40))
def test_pieces_in_any_order_with_gaps_give_the_checksum_of_the_whole(
    given_: tuple[bytes, list[tuple[int, int]]], offset: int
) -> None:
    data, spans = given_
    pieces = [Piece(offset + start, stop - start, zlib.crc32(data[start:stop])) for start, stop in spans]
    assert combine_crcs(offset, len(data), pieces) == zlib.crc32(data)


@given(st.integers(0, 100_000))
@example(0)
def test_zeros(nbytes: int) -> None:
    assert crc_of_zeros(nbytes) == zlib.crc32(bytes(nbytes))


def test_zeros_larger_than_memory() -> None:
    """Runs of 2^n zeros are two halves; a run of any size is one of the runs and the rest."""
    known = zlib.crc32(bytes(1 << 16))
    for size in (1 << power for power in range(16, 62)):
        assert crc_of_zeros(size) == known, size
        assert crc_of_zeros(size + 5) == isal_zlib.crc32_combine(known, zlib.crc32(bytes(5)), 5), size
        known = isal_zlib.crc32_combine(known, known, size)


def test_gaps_larger_than_memory() -> None:
    first, last = b"begin", b"end"
    far = 3 * 2**40
    found = combine_crcs(0, far + 3, [Piece(far, 3, zlib.crc32(last)), Piece(0, 5, zlib.crc32(first))])
    # Appending zeros is associative: two ways of making the same run must agree.
    half = combine_crcs(0, far, [Piece(0, 5, zlib.crc32(first))])
    assert found == combine_crcs(0, far + 3, [Piece(0, far, half), Piece(far, 3, zlib.crc32(last))])
    assert found != half


@pytest.mark.parametrize(
    "pieces",
    [
        [Piece(10, 5, 0), Piece(14, 5, 0)],
        [Piece(10, 5, 0), Piece(10, 5, 0)],
        [Piece(10, 10, 0), Piece(12, 2, 0)],
        [Piece(9, 2, 0)],
        [Piece(28, 3, 0)],
        [Piece(10, 21, 0)],
    ],
    ids=["overlap", "twice", "inside", "before", "beyond", "too long"],
)
def test_pieces_that_overlap_or_lie_outside_are_refused(pieces: list[Piece]) -> None:
    random.Random(1).shuffle(pieces)
    with pytest.raises(MergeError, match="written twice, or outside"):
        combine_crcs(10, 20, pieces)


def test_every_hole_has_its_own_pieces() -> None:
    import torch

    data = bytes(range(1, 61))

    def hole(offset: int, numel: int) -> Hole:
        return Hole(offset, wanted(numel, torch.uint8, ("a", 0, numel, 0)))

    holes = [hole(20, 20), hole(0, 20), hole(50, 10)]
    pieces = [Piece(start, 10, zlib.crc32(data[start : start + 10])) for start in (50, 0, 30, 20, 10)]
    assert checksums(pieces, holes) == {
        0: zlib.crc32(data[:20]),
        20: zlib.crc32(data[20:40]),
        50: zlib.crc32(data[50:]),
    }


def test_a_piece_in_no_hole_is_refused() -> None:
    import torch

    holes = [Hole(0, wanted(20, torch.uint8)), Hole(40, wanted(20, torch.uint8))]
    for offset in (30, 38, 60, 100):
        with pytest.raises(MergeError, match=rf"^bytes {offset} to"):
            checksums([Piece(offset, 4, 0)], holes)


@given(st.lists(st.binary(max_size=50), max_size=6))
def test_running_checksums(pieces: list[bytes]) -> None:
    import xxhash

    crc, xxh = Crc32(), xxh3()
    for piece in pieces:
        crc.update(memoryview(piece))
        xxh.update(memoryview(piece))
    whole = b"".join(pieces)
    assert crc.hexdigest() == f"{zlib.crc32(whole):08x}"
    assert xxh.hexdigest() == xxhash.xxh3_128_hexdigest(whole)
