"""Names, sizes and the registry."""

from __future__ import annotations

import pytest

from store.encoding import BLOCK, CHUNK, ENCODINGS, WRITABLE, chunk_sizes, encoding_named, itemsize
from store.encoding.base import PIECE
from store.errors import DamagedError, NewerFormatError


def test_every_encoding_is_registered_under_its_own_name() -> None:
    assert sorted(ENCODINGS) == [
        "bf16",
        "bf16+int8",
        "int16-shared-exponent",
        "int8-block",
        "int8-log2",
        "int8-shared-exponent",
        "int8-shared-exponent-128",
        "int8-sqrt-block",
        "raw",
    ]
    assert sorted(WRITABLE) == sorted(ENCODINGS.keys() - {"int8-sqrt-block"})
    assert all(encoding_named(name).name == name for name in ENCODINGS)
    assert [name for name, encoding in ENCODINGS.items() if encoding.lossless] == ["raw"]


def test_unknown_names_are_of_a_newer_release() -> None:
    with pytest.raises(NewerFormatError, match=r"bf16.*upgrade"):
        encoding_named("bf17")


def test_unknown_dtypes_are_damage() -> None:
    with pytest.raises(DamagedError, match="F128"):
        itemsize("F128")


def test_chunks_and_pieces_are_whole_blocks() -> None:
    assert CHUNK == 1 << 20
    assert BLOCK == 64
    assert CHUNK % PIECE == PIECE % BLOCK == 0
    assert list(chunk_sizes(2 * CHUNK + 5)) == [CHUNK, CHUNK, 5]
    assert list(chunk_sizes(0)) == []


@pytest.mark.parametrize(
    ("name", "numel", "nbytes"),
    [
        ("raw", 7, 28),
        ("bf16", 7, 14),
        ("bf16+int8", 7, 21),
        ("int8-block", 64, 68),
        ("int8-block", 65, 73),
        ("int8-sqrt-block", 3 * CHUNK + 1, 3 * CHUNK + 1 + 4 * (3 * CHUNK // 64 + 1)),
        ("int8-block", 0, 0),
        ("int8-log2", 3 * CHUNK + 1, 3 * CHUNK + 1),
        ("int8-shared-exponent", 3 * CHUNK + 1, 3 * CHUNK + 1 + 3 * CHUNK // 64 + 1),
        ("int16-shared-exponent", 3 * CHUNK + 1, 2 * (3 * CHUNK + 1) + 3 * CHUNK // 4096 + 1),
    ],
)
def test_stored_sizes(name: str, numel: int, nbytes: int) -> None:
    assert encoding_named(name).stored_bytes(numel, "F32") == nbytes


def test_sizes_of_absurd_fragments_cost_nothing() -> None:
    assert encoding_named("int8-block").stored_bytes(1 << 60, "F32") == (1 << 60) // 64 * 68
