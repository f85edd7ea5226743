"""Fragments as streams of chunks; what every encoding does there is in the contract tests."""

from __future__ import annotations

import numpy as np
import pytest

from store.encoding import CHUNK, ENCODINGS
from store.encoding.stream import BaseEntry, Packing, encoded_chunks, pack_chunks
from store.errors import DamagedError
from tests.support.entries import decode_entry, encode_entry, iter_chunks, reader, split_chunks
from tests.support.reference_encodings import ValuesError, encode_chunk

BF16 = ENCODINGS["bf16"]


def test_no_read_is_larger_than_a_chunk() -> None:
    numel = 3 * CHUNK + 5
    values = np.linspace(-1, 1, numel, dtype="<f4")
    for packing in (None, Packing()):
        asked: list[int] = []
        data = b"".join(encode_entry(iter_chunks(values), BF16, numel, "F32", packing))
        chunks = decode_entry(reader(data, asked), numel, "F32", BF16, packed=packing is not None)
        assert [chunk.size for chunk in chunks] == [CHUNK, CHUNK, CHUNK, 5]
        assert max(asked) <= 2 * CHUNK
        assert asked[-1] == 1  # whether anything is left over


def test_encoded_chunks_are_what_the_encoding_wrote() -> None:
    values = np.linspace(-1, 1, CHUNK + 9, dtype="<f4")
    chunks = [encode_chunk(BF16, chunk) for chunk in iter_chunks(values)]
    data = b"".join(pack_chunks(chunks, BF16, values.size, "F32", Packing()))
    found = list(encoded_chunks(reader(data), values.size, "F32", BF16, packed=True))
    assert [one.tobytes() for one in found] == [one.tobytes() for one in chunks]
    whole = np.concatenate(chunks)
    assert [one.tobytes() for one in split_chunks(whole, BF16, values.size, "F32")] == [one.tobytes() for one in chunks]


def test_wrong_numbers_of_chunks_are_the_writers_mistake() -> None:
    chunk = encode_chunk(BF16, np.ones(10, "<f4"))
    for chunks, numel in (([chunk], 11), ([chunk], 9), ([chunk, chunk], 10), ([], 10), ([chunk], 0)):
        with pytest.raises(ValueError, match="chunk"):
            list(pack_chunks(chunks, BF16, numel, "F32"))
    for base in ([], [chunk, chunk], [chunk[:-2]]):
        with pytest.raises(ValueError, match="chunk"):
            list(pack_chunks([chunk], BF16, 10, "F32", Packing(1, base)))


def test_values_that_cannot_be_held_stop_the_stream() -> None:
    values = np.ones(CHUNK + 1, "<f4")
    values[-1] = np.nan
    stream = encode_entry(iter_chunks(values), BF16, values.size, "F32")
    assert len(next(stream)) == 2 * CHUNK
    with pytest.raises(ValuesError):
        next(stream)


def test_a_base_that_is_cut_off_or_too_long_is_damage() -> None:
    values = np.ones(100, "<f4")
    base = encode_chunk(BF16, values * 2)
    data = b"".join(encode_entry([values], BF16, 100, "F32", Packing(1, [base])))
    for old in (base.tobytes()[:-1], base.tobytes() + b"\0", b""):
        with pytest.raises(DamagedError):
            list(decode_entry(reader(data), 100, "F32", BF16, packed=True, base=BaseEntry(reader(old), packed=False)))


def test_only_packed_entries_have_a_base() -> None:
    base = BaseEntry(reader(b""), packed=False)
    with pytest.raises(DamagedError, match="not packed"):
        list(decode_entry(reader(bytes(20)), 10, "F32", BF16, base=base))
